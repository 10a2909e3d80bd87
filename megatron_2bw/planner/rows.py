"""Predictions for many configurations, one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_2bw.planner.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.finder import price
from megatron_2bw.planner.flags import FP8_FORMATS, LAYOUT_NUMBERS, SPELLED, layout_flags, read, replicas
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
from megatron_2bw.planner.kernels import fuses_attention
from megatron_2bw.planner.layout import Layout, Precision
from megatron_2bw.planner.model import Kind, Model
from megatron_2bw.planner.model_flags import MODEL_NUMBERS, model_flags, vocabulary
from megatron_2bw.planner.naming import schedule_name
from megatron_2bw.planner.options import Options
from megatron_2bw.planner.report import prediction_json
from megatron_2bw.planner.row_arguments import flags_of
from megatron_2bw.planner.rules import MEGATRON
from megatron_2bw.planner.unpriced import GROUPED

_OURS = {
    "global_batch_size": "global_batch",
    "data_parallel_size": "data",
    "pipeline_schedule": "schedule",
    "use_distributed_optimizer": "distributed_optimizer",
    "overlap_grad_reduce": "overlap_gradients",
    "overlap_param_gather": "overlap_parameters",
    "accumulate_allreduce_grads_in_fp32": "gradients_in_fp32",
    "fp8_param_gather": "fp8_parameters",
    "grad_reduce_in_bf16": "gradients_in_bf16",
    "tp_comm_overlap": "overlap_tensor",
    "pipeline_model_parallel_layout": "pipeline_layout",
    "virtual_pipeline_model_parallel_size": "chunks",
    "world_size": "gpus",
    **{flag[2:].replace("-", "_"): name for flag, name in {**MODEL_NUMBERS, **LAYOUT_NUMBERS}.items()},
    "pp": "pipeline",
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "vp": "chunks",
    "vpp": "chunks",
    "sp": "sequence_parallel",
    "num_moe_experts": "num_experts",
    "dp": "data",
    "mbs": "microbatch",
    "gbs": "global_batch",
}
"""Our names for Megatron's, as its arguments spell them, and for those that tables of measurements have."""
_OF_RECOMPUTATION = ("recompute_granularity", "recompute_activations")
_MEGATRONS = {
    "num_query_groups": ("group_query_attention",),
    "ffn_hidden_size": ("moe_ffn_hidden_size", "moe_layer_freq"),
    "vocab_size": ("padded_vocab_size",),
    "recompute_method": _OF_RECOMPUTATION,
    "recompute_num_layers": _OF_RECOMPUTATION,
}
"""Names that mean what they do in Megatron where one of these is beside them."""
_DECIDED = "tied bias rmsnorm learned_positions dropout dense_layers recompute fp8 chunks fused_attention".split()
_DECIDED += "fused_swiglu fused_loss distributed_optimizer".split()
"""Fields of ours that Megatron says in other words, too."""
_PRECISIONS = {"torch.bfloat16": Precision.BF16, "torch.float16": Precision.FP16, "torch.float32": Precision.FP32}
_MODEL = {field.name for field in dataclasses.fields(Model) if field.name != "given_flags"}
_LAYOUT = {field.name for field in dataclasses.fields(Layout) if field.name != "optimizer"}
_NOT_IN_FLAGS = ("split_transfers", "keeps_main_gradients")
"""Fields of a Layout that today's Megatron does not have."""
_KEYS = {*_MODEL, *_LAYOUT, "optimizer", "model", "cluster", "nodes", "gpus"}
_SIZES = ("nodes", "gpus", "data")
_OUTCOMES = ("prediction", "error")


def predicted_rows(
    file: Path, defaults: dict[str, Any], *, ignored: Collection[str] = ()
) -> Iterator[tuple[str, bool]]:
    """(line, it failed) for every line of ``file``: the same object with ``prediction``, or with ``error``.

    A row has the fields of Model and Layout side by side, or a ``model`` (a name or an object); ``cluster`` (the
    same), ``nodes`` and ``gpus`` where they differ from the defaults. ``data`` follows from ``gpus`` where it is not
    given. Megatron's arguments (``micro_batch_size``, ``bf16``), as ``vars(args)`` has them, mean what its flags do;
    ``tp``, ``pp``, ``vp``, ``dp``, ``cp``, ``ep``, ``etp``, ``sp``, ``mbs`` and ``gbs`` say the same as their names.
    What else a row has stays in it, unless it looks like one of these misspelled.

    Args:
        file: a JSON object per line.
        defaults: of ``cluster``, ``nodes`` and ``gpus``.
        ignored: flags of Megatron whose arguments do not count.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise PlanError(f"--jsonl {file}: {reason}; give a file with one JSON object per line") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where, row = f"{file.name}, line {number}", {}
        try:
            row = parsed(line, "row")
            outcome = {"prediction": predicted(_completed(row, defaults), ignored=ignored)}
        except PlanError as error:
            outcome = {"error": f"{where}: {error}"}
        kept = {key: value for key, value in row.items() if key not in _OUTCOMES}
        yield json.dumps({**kept, **outcome}), "error" in outcome


def _completed(row: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    row = {key: value for key, value in row.items() if value is not None}
    is_sized = any(_OURS.get(key, key) in _SIZES for key in row)
    return {**{key: value for key, value in defaults.items() if key not in _SIZES or not is_sized}, **row}


def predicted(row: dict[str, Any], *, ignored: Collection[str] = ()) -> dict[str, Any]:
    """The prediction for one row, without the arguments of ``ignored`` flags.

    Raises:
        PlanError: the row describes no configuration that runs.
    """
    row = {key: value for key, value in row.items() if value is not None}
    ours, theirs = _in_our_names(row)
    for key in row.keys() - _KEYS:
        is_spelled = key in _OURS or hasattr(Layout, key) or "--" + key.replace("_", "-") in SPELLED
        nearest = None if is_spelled else misspelled(key, _KEYS)
        if nearest is not None and nearest not in row:
            raise PlanError(f"unknown key {key!r}; did you mean {nearest!r}?")
    options = Options(values=flags_of(theirs)).without(ignored)
    model, base = _model(ours, options), _cluster(ours)
    layout = _layout(ours, model, base)
    words = [*model_flags(model), "--vocab-size", str(model.vocab_size), *layout_flags(model, layout)]
    ours_said = Options.parse(words).without([GROUPED, "--moe-token-dispatcher-type"])  # The planner adds them.
    options = dataclasses.replace(options, values={**ours_said.values, **options.values})
    run = read(options, gpus=layout.gpus, kind=model.kind, gpu=base.gpu, fused=ours.get("fused_attention"))
    for field in _DECIDED:
        said = getattr(run.model if field in _MODEL else run.layout, field)
        if field in ours and ours[field] != said:
            raise PlanError(f"{field} {ours[field]}: Megatron's arguments in the row say {said}; leave out one")
    if "model" in ours:
        _compare(run.model, model)
    layout = dataclasses.replace(run.layout, **{name: getattr(layout, name) for name in _NOT_IN_FLAGS})
    choice = price(run.model, layout, sized(base, gpus=layout.gpus))
    return {**prediction_json(run.model, choice), "notes": list(run.notes)}


def _in_our_names(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``row`` as fields of ours, and what is left for Megatron's flags to say."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value in row.items():
        is_format = key == "fp8" and (isinstance(value, bool) or value in FP8_FORMATS)
        name = _OURS.get(key, key)
        if is_format:
            theirs[key] = FP8_FORMATS[0] if value is True else value
        elif name not in _KEYS or key == "optimizer" or any(other in row for other in _MEGATRONS.get(key, ())):
            theirs[key] = value
        elif sources.setdefault(name, key) == key:
            ours[name] = value
        elif ours[name] != value:
            raise PlanError(f"{key} {value!r} and {sources[name]} {ours[name]!r} disagree; leave out one of them")
    for name, precision in _precisions(theirs):
        if ours.setdefault("precision", precision) != precision:
            raise PlanError(f"{name} {row[name]!r} and precision {ours['precision']!r} disagree; leave out one of them")
    if "encoder_seq_length" in theirs:
        ours.setdefault("seq_length", theirs.pop("encoder_seq_length"))
    return ours, theirs


def _precisions(theirs: dict[str, Any]) -> Iterator[tuple[str, Precision]]:
    """Of Megatron's arguments, which are taken out of the row, and the precision they ask for."""
    asked = [name for name in ("bf16", "fp16") if name in theirs]
    on = [name for name in asked if theirs.pop(name)]
    if len(on) > 1:
        raise PlanError("bf16 and fp16 exclude each other; leave one out")
    if asked:
        yield (on or asked)[0], Precision(on[0]) if on else Precision.FP32
    if (precision := _PRECISIONS.get(str(theirs.pop("params_dtype", "")))) is not None:
        yield "params_dtype", precision


def _model(ours: dict[str, Any], options: Options) -> Model:
    """The model as far as fields of ours describe it."""
    fields = {key: value for key, value in ours.items() if key in _MODEL}
    if "model" not in ours:
        if "vocab_size" not in fields:
            kind = checked(fields.get("kind", Kind.GPT), Kind, "kind")
            fields["vocab_size"] = vocabulary(options, kind)
        return build(Model, fields, "model")
    source = ours["model"]
    if not isinstance(source, str | dict):
        raise PlanError(f"model {source!r}: give a name or an object, or the sizes beside it")
    model = load_model(source) if isinstance(source, str) else model_of(source, "model")
    _compare(model, dataclasses.replace(model, **typed(Model, fields, "model")))
    return model


def _compare(model: Model, other: Model) -> None:
    """Whether a row's sizes are those of the model it names."""
    for key in sorted(_MODEL - {"name"}):
        if getattr(model, key) != getattr(other, key):
            raise PlanError(f"{key} {getattr(other, key)}: the model has {getattr(model, key)}; leave out one of them")


def _cluster(ours: dict[str, Any]) -> Cluster:
    cluster = ours.get("cluster")
    if isinstance(cluster, dict):
        return cluster_of(cluster, "cluster")
    if isinstance(cluster, str):
        return load_cluster(cluster)
    raise PlanError(f"cluster is missing; give one of {', '.join(CLUSTERS)}, or an object")


def _layout(ours: dict[str, Any], model: Model, base: Cluster) -> Layout:
    """The layout as far as fields of ours describe it."""
    fields = typed(Layout, {key: value for key, value in ours.items() if key in _LAYOUT}, "layout")
    fields["schedule"] = schedule_name(fields.get("schedule", MEGATRON))
    fields.setdefault("pipeline", 1)
    if fields.get("expert_tensor") == 0:
        raise PlanError("expert_tensor 0: give a whole number of at least 1, or leave it out")
    for name, looks in _looked_at(model, fields).items():
        if not looks:
            fields.pop(name, None)
            ours.pop(name, None)
    size = {key: checked(ours[key], int, key) for key in ("nodes", "gpus") if key in ours}
    ranks = max(math.prod(fields.get(name, 1) for name in ("pipeline", "tensor", "context")), 1)
    if "data" in fields and "gpus" not in size:
        gpus = fields["data"] * ranks
    else:
        gpus = sized(base, **size).gpus
        fields.setdefault("data", replicas(gpus, ranks, node=base.gpus_per_node))
    if fields["data"] * ranks != gpus:
        raise PlanError(
            f"data {fields['data']} x pipeline x tensor x context = {ranks} are not {gpus} GPUs; leave out data"
        )
    fields.setdefault("fused_attention", fuses_attention(base.gpu, fields.get("precision", Precision.BF16)))
    fields.setdefault("global_batch", fields.get("microbatch", 1) * fields["data"])  # As Megatron.
    return build(Layout, fields, "layout")


def _looked_at(model: Model, fields: dict[str, Any]) -> dict[str, bool]:
    """Which fields Megatron looks at only beside others, and whether those are there."""
    precision = fields.get("precision", Precision.BF16)
    return {
        "expert_tensor": model.num_experts > 0,
        "sequence_parallel": fields.get("tensor", 1) > 1,
        "fused_swiglu": model.swiglu,
        "gradients_in_fp32": precision is Precision.FP16,
        "gradients_in_bf16": precision is Precision.BF16,
    }
