"""Predictions for many configurations, one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_2bw.planner.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.inputs import build, checked, cluster_of, load_cluster, load_model, parsed, sized, typed
from megatron_2bw.planner.layout import Layout, Precision
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.report import prediction_json
from megatron_2bw.planner.rules import fuses_attention, gpu_problem, problem
from megatron_2bw.planner.search import price

_MODEL = {field.name for field in dataclasses.fields(Model)}
_LAYOUT = {field.name for field in dataclasses.fields(Layout)}
_MACHINE = {"model", "cluster", "nodes", "gpus"}


def predicted_rows(
    file: Path, cluster: str | None, *, nodes: int | None = None, gpus: int | None = None
) -> Iterator[tuple[str, bool]]:
    """(line, it failed) for every line of ``file``: the same object with ``prediction``, or with ``error``.

    A row has the fields of Model and Layout side by side, or a ``model`` by name; ``cluster`` (a name or an
    object), ``nodes`` and ``gpus`` where they differ from the arguments. ``data`` follows from ``gpus`` where it is
    not given. What else a row has stays in it.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise PlanError(f"--jsonl {file}: {reason}; give a file with one JSON object per line") from error
    defaults = {"cluster": cluster, "nodes": nodes, "gpus": gpus}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            row = parsed(line, where)
        except PlanError as error:
            yield json.dumps({"error": str(error)}), True
            continue
        try:
            outcome = {"prediction": predicted({**defaults, **row}, where)}
        except PlanError as error:
            outcome = {"error": str(error)}
        yield json.dumps({**row, **outcome}), "error" in outcome


def predicted(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The prediction for one row.

    Raises:
        PlanError: the row describes no configuration that runs.
    """
    model = _model(row, where)
    base = _cluster(row, where)
    fields = typed(Layout, {key: value for key, value in row.items() if key in _LAYOUT}, where)
    if "data" not in fields:
        ranks = max(fields.get("pipeline", 1) * fields.get("tensor", 1), 1)
        size = {key: checked(row[key], int, f"{where}: {key}") for key in ("nodes", "gpus") if row[key] is not None}
        gpus = sized(base, **size).gpus
        if gpus % ranks:
            raise PlanError(f"{where}: gpus {gpus} is no multiple of pipeline x tensor = {ranks}; give data")
        fields["data"] = gpus // ranks
    precision = fields.get("precision", Precision.BF16)
    fields.setdefault("fused_attention", fuses_attention(base.gpu, precision))
    layout = build(Layout, fields, where)
    refused = problem(model, layout) or gpu_problem(base.gpu, precision, fused_attention=layout.fused_attention)
    if refused:
        raise PlanError(f"{where}: {refused}")
    return prediction_json(model, price(model, layout, sized(base, gpus=layout.gpus)))


def _model(row: dict[str, Any], where: str) -> Model:
    if isinstance(row.get("model"), str):
        return load_model(row["model"])
    return build(Model, {key: value for key, value in row.items() if key in _MODEL}, where)


def _cluster(row: dict[str, Any], where: str) -> Cluster:
    cluster = row["cluster"]
    if isinstance(cluster, dict):
        return cluster_of(cluster, f"{where}: cluster")
    if isinstance(cluster, str):
        return load_cluster(cluster)
    raise PlanError(f"{where}: cluster is missing; give one of {', '.join(CLUSTERS)}, or an object")
