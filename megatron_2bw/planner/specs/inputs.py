"""Models and clusters by name or from JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megatron_2bw.planner.errors import MOST, PlanError, wrong_count
from megatron_2bw.planner.multiples import nearest_multiple
from megatron_2bw.planner.specs.cluster import CLUSTERS, GPUS, MESHES, Cluster, Gpu, known
from megatron_2bw.planner.specs.layout import RecomputeModule
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


def load_model(source: str) -> Model:
    """The model called ``source``, or the one in the JSON file of that name.

    >>> load_model("gpt-2.2b").hidden_size
    2304

    Raises:
        PlanError: neither exists, or the file is no model.
    """
    if _is_file(source):
        return model_of(read_json(source), source)
    return known(source, MODELS, "model")


def load_cluster(source: str) -> Cluster:
    """The cluster called ``source``, or the one in the JSON file of that name.

    Raises:
        PlanError: neither exists, or the file is no cluster.
    """
    if _is_file(source):
        return cluster_of(read_json(source), source)
    return known(source, CLUSTERS, "cluster")


def sized(cluster: Cluster, *, nodes: int | None = None, gpus: int | None = None) -> Cluster:
    """``cluster`` with another number of nodes, or of GPUs: whole nodes, or a part of one.

    >>> sized(CLUSTERS["dgx-a100"], gpus=64).nodes, sized(CLUSTERS["dgx-a100"], gpus=4).gpus_per_node
    (8, 4)

    Raises:
        PlanError: a number below 1, or one that fills no whole nodes.
    """
    for field, count in (("nodes", nodes), ("gpus", gpus)):
        if count is not None and count < 1:
            raise PlanError(f"{field} {count}: give a whole number of at least 1")
    node = cluster.gpus_per_node
    if gpus is None:
        return cluster if nodes is None else dataclasses.replace(cluster, nodes=nodes)
    if nodes is not None and gpus != nodes * node:
        raise PlanError(f"gpus {gpus} and nodes {nodes} disagree: a node has {node}; leave one out")
    if gpus < node:
        return dataclasses.replace(cluster, gpus_per_node=gpus, nodes=1, whole_node=node)
    if gpus % node:
        raise PlanError(f"gpus {gpus} is no multiple of {node}, the GPUs of a node; use {nearest_multiple(gpus, node)}")
    return dataclasses.replace(cluster, nodes=gpus // node)


def model_of(values: dict[str, Any], where: str) -> Model:
    """The Model that a JSON object describes; its keys are the fields.

    Raises:
        PlanError: a key is missing, unknown or of the wrong type; ``where`` says where.
    """
    if values.get("given_flags"):
        raise PlanError(f"{where}: given_flags are those of a command line; leave the key out, or give the flags there")
    return build(Model, values, where)


def cluster_of(values: dict[str, Any], where: str) -> Cluster:
    """The Cluster that a JSON object describes: ``gpu`` is a name or an object.

    ``nodes`` is 1 and ``intra_node_gb_s`` the GPU's NVLink where they are not given; then, V100s have no switch.

    Raises:
        PlanError: a key is missing, unknown or of the wrong type; ``where`` says where.
    """
    if "profile" in values:
        raise PlanError(f"{where}: unknown key 'profile'; give the file of a profile as --profile FILE")
    gpu = values.get("gpu")
    if isinstance(gpu, dict):
        gpu = build(Gpu, {"name": where, **gpu}, f"{where}: gpu")
    elif isinstance(gpu, str):
        gpu = known(gpu, GPUS, "gpu")
    else:
        said = "missing" if gpu is None else f"{gpu}, and all GPUs are of one kind"
        raise PlanError(f"{where}: gpu is {said}; give a name, one of {', '.join(GPUS)}, or an object")
    defaults = {"name": Path(where).stem, "nodes": 1, "intra_node_gb_s": gpu.nvlink_gb_s}
    cluster = build(Cluster, {**defaults, **values, "gpu": gpu}, where)
    if values.keys() & {"intra_node_gb_s", "group_gb_s"} or not gpu.name.startswith("v100"):
        return cluster
    return dataclasses.replace(cluster, group_gb_s=MESHES.get(cluster.gpus_per_node, ()))


def build[Thing](kind: type[Thing], values: dict[str, Any], where: str) -> Thing:
    """An instance of the dataclass ``kind``; keys and types are checked.

    Raises:
        PlanError: a key is missing, unknown or of the wrong type; ``where`` says where.
    """
    fields, types = typed(kind, values, where), _types(kind)
    for field in dataclasses.fields(kind):
        if field.name not in values and field.default is dataclasses.MISSING:
            raise PlanError(f"{where}: {field.name} is missing; give {_wanted(types[field.name])}")
    try:
        return kind(**fields)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def typed(kind: type, values: dict[str, Any], where: str) -> dict[str, Any]:
    """``values`` as the fields of the dataclass ``kind``, some of which may be missing.

    Raises:
        PlanError: a key is unknown or of the wrong type; ``where`` says where.
    """
    types = _types(kind)
    fields = [field.name for field in dataclasses.fields(kind) if field.metadata.get("from_file", True)]
    for key in values:
        if key not in fields:
            (nearest,) = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)
            raise PlanError(f"{where}: unknown key {key!r}; did you mean {nearest!r}? There are {', '.join(fields)}")
    return {key: checked(value, types[key], f"{where}: {key}") for key, value in values.items()}


def parsed(text: str, where: str) -> dict[str, Any]:
    """The JSON object in ``text``.

    Raises:
        PlanError: it is malformed, or no object.
    """
    try:
        values = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: no JSON: {error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"{where}: {text.strip()[:40]!r} is no JSON object; write {{...}}")
    return values


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets keys repeat, and Python would take the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values


def modules_of(words: Collection[str], where: str) -> tuple[RecomputeModule, ...]:
    """The modules called ``words``, each once, as `RecomputeModule` lists them.

    >>> print(*modules_of(["mlp", "mla_up_proj", "mlp"], "--recompute-modules"))
    mla_up_proj mlp

    Raises:
        PlanError: one is none.
    """
    modules = {checked(word, RecomputeModule, where) for word in words}
    return tuple(module for module in RecomputeModule if module in modules)


@cache
def _types(kind: type) -> dict[str, type]:
    return get_type_hints(kind)


def checked(value: Any, kind: type, where: str) -> Any:
    """``value`` as a ``kind``.

    Raises:
        PlanError: it is none.
    """
    if get_origin(kind) is tuple:
        kinds, parts = get_args(kind), value if isinstance(value, tuple) else checked(value, list, where)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(parts)
        if len(kinds) != len(parts):
            raise PlanError(f"{where} {value!r}: give a list of {len(kinds)}")
        return tuple(checked(part, kind, where) for part, kind in zip(parts, kinds, strict=True))
    if issubclass(kind, Enum):
        try:
            return kind(value.lower() if isinstance(value, str) else value)
        except ValueError as error:
            raise PlanError(f"{where} {value!r}: choose one of {', '.join(kind)}") from error
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # Tables with gaps have all numbers of a column as floats.
    if kind is bool and type(value) in (int, float) and value in (0, 1):
        value = bool(value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise PlanError(f"{where} {value!r}: give {_wanted(kind)}")
    if kind is int and abs(value) > MOST:  # Python refuses to print the product of two that are long enough.
        raise PlanError(wrong_count(where, value, 0))
    return value


def _wanted(kind: type) -> str:
    return f"one of {', '.join(kind)}" if issubclass(kind, Enum) else _KINDS.get(kind, "an object")


def is_model(source: str) -> bool:
    """Whether there is a model called ``source``, or such a file."""
    try:
        return _is_file(source) or known(source, MODELS, "model") is not None
    except PlanError:
        return False


def _is_file(source: str) -> bool:
    try:
        return source.endswith(".json") or Path(source).is_file()
    except OSError:  # Too long for the name of one.
        return False


def read_json(source: str) -> dict[str, Any]:
    """The JSON object in the file ``source``.

    Raises:
        PlanError: it cannot be read, or is none.
    """
    return parsed(read_text(Path(source), source, "a JSON file or a name"), source)


def read_text(file: Path, said: str, wanted: str) -> str:
    """What is in ``file``, which a user calls ``said``.

    Raises:
        PlanError: it cannot be read; give ``wanted``.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise PlanError(f"{said}: {reason}; give {wanted}") from error
