"""Predictions for many configurations, one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_2bw.planner.accepted import DIST_MUON
from megatron_2bw.planner.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.finder import price
from megatron_2bw.planner.flags import FP8_FORMATS, LAYOUT_NUMBERS, chunks_of
from megatron_2bw.planner.inputs import (
    build,
    checked,
    cluster_of,
    load_cluster,
    load_model,
    misspelled,
    model_of,
    parsed,
    sized,
    typed,
)
from megatron_2bw.planner.kernels import fuses_attention, gpu_problem
from megatron_2bw.planner.layout import Fp8, Layout, Precision
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.model_flags import MODEL_NUMBERS
from megatron_2bw.planner.naming import schedule_name
from megatron_2bw.planner.patterns import dense_first
from megatron_2bw.planner.report import prediction_json
from megatron_2bw.planner.row_arguments import is_local, said
from megatron_2bw.planner.rules import MEGATRON, problem
from megatron_2bw.planner.unpriced import uncovered

_OF_MEGATRON = {
    "global_batch_size": "global_batch",
    "data_parallel_size": "data",
    "pipeline_schedule": "schedule",
    "use_distributed_optimizer": "distributed_optimizer",
    "overlap_grad_reduce": "overlap_gradients",
    "overlap_param_gather": "overlap_parameters",
    "accumulate_allreduce_grads_in_fp32": "gradients_in_fp32",
    "recompute_granularity": "recompute",
    "fp8_param_gather": "fp8_parameters",
    "grad_reduce_in_bf16": "gradients_in_bf16",
    "tp_comm_overlap": "overlap_tensor",
    "pipeline_model_parallel_layout": "pipeline_layout",
    **{flag[2:].replace("-", "_"): name for flag, name in {**MODEL_NUMBERS, **LAYOUT_NUMBERS}.items()},
    "pp": "pipeline",
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "num_moe_experts": "num_experts",
    "dp": "data",
    "mbs": "microbatch",
    "gbs": "global_batch",
}
"""Our names for Megatron's, as its arguments spell them, and for those that tables of measurements have."""
_UNCOVERED = {"fp4": "fp4_format"}
"""Other names of what is refused."""
_MODEL = {field.name for field in dataclasses.fields(Model)}
_LAYOUT = {field.name for field in dataclasses.fields(Layout)}
_KEYS = {*_MODEL, *_LAYOUT, "model", "cluster", "nodes", "gpus"}
_OUTCOMES = ("prediction", "error")
_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"


def predicted_rows(
    file: Path, cluster: str | None, *, nodes: int | None = None, gpus: int | None = None
) -> Iterator[tuple[str, bool]]:
    """(line, it failed) for every line of ``file``: the same object with ``prediction``, or with ``error``.

    A row has the fields of Model and Layout side by side, or a ``model`` (a name or an object); ``cluster`` (the
    same), ``nodes`` and ``gpus`` where they differ from the arguments. ``data`` follows from ``gpus`` where it is not
    given. Megatron's arguments (``micro_batch_size``, ``bf16``), or ``tp``, ``pp``, ``dp``, ``cp``, ``ep``, ``mbs`` and
    ``gbs``, say the same. What else a row has stays in it, unless it looks like one of these misspelled, or is an
    argument that the cost model does not cover.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise PlanError(f"--jsonl {file}: {reason}; give a file with one JSON object per line") from error
    defaults = {"cluster": cluster, "nodes": nodes}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where, row = f"{file.name}, line {number}", {}
        try:
            row = parsed(line, "row")
            outcome = {"prediction": predicted({**defaults, **({} if "data" in row else {"gpus": gpus}), **row})}
        except PlanError as error:
            outcome = {"error": f"{where}: {error}"}
        kept = {key: value for key, value in row.items() if key not in _OUTCOMES}
        yield json.dumps({**kept, **outcome}), "error" in outcome


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """The prediction for one row.

    Raises:
        PlanError: the row describes no configuration that runs.
    """
    row = _in_our_names(row)
    for key in {key for key, value in row.items() if value is not None} - _KEYS:
        nearest = misspelled(key, _KEYS)
        if nearest is not None and nearest not in row and not hasattr(Layout, key):
            raise PlanError(f"unknown key {key!r}; did you mean {nearest!r}?")
    model, base = _model(row), _cluster(row)
    if row.get(_PER_CHUNK) is not None:
        per_chunk = checked(row[_PER_CHUNK], int, _PER_CHUNK)
        chunks = chunks_of(per_chunk, model, checked(row.get("pipeline", 1), int, "pipeline"))
        _agree(row, "chunks", chunks, f"{_PER_CHUNK} {per_chunk}: chunks")
    if row.get("expert_tensor") == 0:
        raise PlanError("expert_tensor 0: give a whole number of at least 1, or leave it out")
    if not model.num_experts:
        row.pop("expert_tensor", None)  # Megatron does not look at it.
    layout = _layout(row, base)
    refused = problem(model, layout) or gpu_problem(
        base.gpu, layout.precision, fused_attention=layout.fused_attention, fp8=layout.fp8
    )
    if refused:
        raise PlanError(refused)
    return prediction_json(model, price(model, layout, sized(base, gpus=layout.gpus)))


def _in_our_names(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with the names of our fields, and without what asks for nothing."""
    decided = said(row)
    if "recompute" in decided:
        row = {key: value for key, value in row.items() if key != "recompute_granularity"}  # Megatron sets it.
    named = {key: value for key, value in row.items() if key not in _OF_MEGATRON}
    if "precision" not in row and any(row.get(key) is not None for key in ("bf16", "fp16")):
        named["precision"] = "bf16" if row.get("bf16") else "fp16" if row.get("fp16") else "fp32"
    _set_fp8(named, row)
    if row.get("cross_entropy_loss_fusion") and row.get("cross_entropy_fusion_impl") == "te":
        named.setdefault("fused_loss", True)
    for key, value in row.items():
        what = uncovered("--" + _UNCOVERED.get(key, key).replace("_", "-"), value)
        if what:
            raise PlanError(f"{key} {value!r}: the cost model does not cover {what}; leave the row out")
        name = _OF_MEGATRON.get(key)
        if name is not None and value is not None:
            _agree(named, name, value, key)
    for name, value in decided.items():
        if named.setdefault(name, value) != value:
            raise PlanError(
                f"{name} {named[name]!r}: Megatron's arguments in the row say {value!r}; leave out one of them"
            )
    if row.get("group_query_attention") is False:
        named.pop("num_query_groups", None)  # Megatron does not look at it.
    elif row.get("group_query_attention") and "model" not in row:
        named.setdefault("num_query_groups", 1)  # Its default.
    if named.get("optimizer") == DIST_MUON:
        named |= {"optimizer": "muon", "distributed_optimizer": True}
    if named.get("num_experts"):
        _set_widths(named, row)
    return named


def _agree(named: dict[str, Any], name: str, value: Any, source: str) -> None:
    """Set a field that may be there already.

    Raises:
        PlanError: with another value.
    """
    if named.setdefault(name, value) != value:
        raise PlanError(f"{source} {value!r} and {name} {named[name]!r} disagree; leave out one of them")


def _set_fp8(named: dict[str, Any], row: dict[str, Any]) -> None:
    """The recipe: ours, or Megatron's, which has a format beside it; as in Megatron, a recipe alone means nothing."""
    ours, recipe = named.pop("fp8", None), row.get("fp8_recipe")
    formats = {key: row.get(key) for key in ("fp8_format", "fp8")}
    if ours in (True, *FP8_FORMATS):
        ours = None
    else:
        del formats["fp8"]
    for key, value in formats.items():
        if value not in (None, False, True, *FP8_FORMATS):
            raise PlanError(f"{key} {value!r}: choose one of {', '.join(FP8_FORMATS)}")
    asked = any(formats.values()) and not is_local(row)  # Megatron's own layers have no products in 8 bits.
    megatrons = (recipe or Fp8.DELAYED.value) if asked else None
    other = megatrons if ours == Fp8.NONE else megatrons or recipe
    if ours and other not in (None, ours):
        raise PlanError(f"fp8 {ours!r} and fp8_recipe {other!r} disagree; leave out one of them")
    if ours or megatrons:
        named["fp8"] = ours or megatrons


def _set_widths(named: dict[str, Any], row: dict[str, Any]) -> None:
    """Of experts and, where the first layers have none, of their MLP; Megatron's words are other ones than ours."""
    pattern = row.get("moe_layer_freq")
    if pattern is not None:
        named["dense_layers"] = dense_first(str(pattern), named.get("num_layers"), where="moe_layer_freq")
        if named["dense_layers"] and named.get("ffn_hidden_size"):
            named.setdefault("dense_ffn_hidden_size", named["ffn_hidden_size"])
    if row.get("moe_ffn_hidden_size") is not None:
        named["ffn_hidden_size"] = row["moe_ffn_hidden_size"]


def _model(row: dict[str, Any]) -> Model:
    fields, source = {key: value for key, value in row.items() if key in _MODEL}, row.get("model")
    if "model" not in row:
        return build(Model, fields, "model")
    if not isinstance(source, str | dict):
        raise PlanError(f"model {source!r}: give a name or an object, or the sizes beside it")
    model = load_model(source) if isinstance(source, str) else model_of(source, "model")
    for key, value in fields.items():
        if key != "name" and value != getattr(model, key):
            raise PlanError(f"{key} {value!r}: the model has {getattr(model, key)!r}; leave out one of them")
    return model


def _cluster(row: dict[str, Any]) -> Cluster:
    cluster = row["cluster"]
    if isinstance(cluster, dict):
        return cluster_of(cluster, "cluster")
    if isinstance(cluster, str):
        return load_cluster(cluster)
    raise PlanError(f"cluster is missing; give one of {', '.join(CLUSTERS)}, or an object")


def _layout(row: dict[str, Any], base: Cluster) -> Layout:
    fields = typed(Layout, {key: value for key, value in row.items() if key in _LAYOUT}, "layout")
    fields["schedule"] = schedule_name(fields.get("schedule", MEGATRON))
    fields.setdefault("pipeline", 1)
    size = {key: checked(row[key], int, key) for key in ("nodes", "gpus") if row.get(key) is not None}
    gpus = sized(base, **size).gpus
    ranks = max(fields.get("pipeline", 1) * fields.get("tensor", 1) * fields.get("context", 1), 1)
    if "data" not in fields and gpus % ranks:
        raise PlanError(f"gpus {gpus} is no multiple of pipeline x tensor x context = {ranks}; give data")
    fields.setdefault("data", gpus // ranks)
    if "gpus" in size and fields["data"] * ranks != gpus:
        raise PlanError(
            f"data {fields['data']} x pipeline x tensor x context = {ranks} are not {gpus} GPUs; leave out data"
        )
    fields.setdefault("fused_attention", fuses_attention(base.gpu, fields.get("precision", Precision.BF16)))
    return build(Layout, fields, "layout")
