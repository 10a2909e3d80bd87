"""Predictions for many configurations, one JSON object per line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from megatron_2bw.planner.cost.costs import unpriced_receives
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import GROUPED, STEPS
from megatron_2bw.planner.flags.flags import layout_flags, read, replicas
from megatron_2bw.planner.flags.model_flags import model_flags, positions_of, vocabulary
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.naming import schedule_name
from megatron_2bw.planner.report.report import prediction_json
from megatron_2bw.planner.rows.arguments import (
    LAYOUT,
    MODEL,
    OURS,
    flags_of,
    flags_that_set,
    in_our_names,
    without,
)
from megatron_2bw.planner.rows.spelling import as_arguments, check_spelling, unclear
from megatron_2bw.planner.search.finder import price
from megatron_2bw.planner.specs.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.specs.inputs import (
    build,
    checked,
    cluster_of,
    is_model,
    load_cluster,
    load_model,
    model_of,
    parsed,
    read_text,
    sized,
    typed,
)
from megatron_2bw.planner.specs.kernels import fuses_attention
from megatron_2bw.planner.specs.layout import Layout, Precision, RecomputeModule
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.schedule.registry import MEGATRON

_DECIDED = "tied bias rmsnorm learned_positions rotary dropout dense_layers recompute fp8".split()
_DECIDED += "chunks overlap_transfers fused_attention fused_swiglu fused_loss distributed_optimizer dispatcher".split()
"""Fields of ours that Megatron says in other words, too."""
_POSITIONS = {"--position-embedding-type", "--use-rotary-position-embeddings"}
_NOT_IN_FLAGS = ("split_transfers", "keeps_main_gradients", "waits_for_sends")
"""Fields of a Layout that today's Megatron does not have."""
_MAIN_SIZES = {"num_layers", "hidden_size", "num_attention_heads"}
"""Without any of which a row is taken to lack the model."""
_SIZES = ("nodes", "gpus", "data")
_OUTCOMES = ("prediction", "error")


def predicted_rows(
    file: Path, defaults: dict[str, Any], *, ignored: Set[str] = frozenset()
) -> Iterator[tuple[str, bool]]:
    """(line, it failed) for every line of ``file``: the same object with ``prediction``, or with ``error``.

    A row has the fields of Model and Layout side by side, or a ``model`` (a name or an object); ``cluster`` (the
    same), ``nodes`` and ``gpus`` where they differ from the defaults. ``data`` follows from ``gpus`` where it is not
    given. Megatron's arguments (``micro_batch_size``, ``bf16``), as ``vars(args)`` has them, mean what its flags do;
    short names (``tp``, ``pp``, ``vp``, ``dp``, ``cp``, ``ep``, ``etp``, ``sp``, ``mbs``, ``gbs``, ``layers``,
    ``hidden``, ``heads``, ``seq_len``, ``vocab``) say the same as long ones. All of these may be in capitals or have
    hyphens; sizes may have the names of other tables (``num_gpus``, ``tensor_parallel``); numbers and truth values may
    be texts. A ``model`` that is not known is a label where the sizes are given. What else a row has stays in it,
    unless it looks like one of these misspelled.

    Args:
        file: a JSON object per line.
        defaults: of ``cluster``, ``nodes`` and ``gpus``.
        ignored: flags of Megatron whose arguments do not count.

    Raises:
        PlanError: the file cannot be read.
    """
    text = read_text(file, f"--jsonl {file}", "a file with one JSON object per line")
    if ignored and (unused := sorted(ignored - _flags_of_any(text))):
        raise PlanError(f"--ignore {unused[0]}: no row has it; leave it out")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where, row = f"{file.name}, line {number}", {}
        try:
            row = parsed(line, "row")
            outcome = {"prediction": predicted(row, defaults, ignored=ignored)}
        except PlanError as error:
            outcome = {"error": f"{where}: {error}"}
        kept = {key: value for key, value in row.items() if key not in _OUTCOMES}
        yield json.dumps({**kept, **outcome}), "error" in outcome


def _flags_of_any(text: str) -> set[str]:
    """Flags that set keys of any of the rows."""
    found: set[str] = set()
    for line in text.split("\n"):
        with contextlib.suppress(PlanError):
            found.update(*map(flags_that_set, as_arguments(parsed(line, "row"))))
    return found


def _completed(row: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    is_sized = any(OURS.get(key, key) in _SIZES for key in row)
    given = {key: value for key, value in defaults.items() if value is not None}
    return {**{key: value for key, value in given.items() if key not in _SIZES or not is_sized}, **row}


def predicted(
    row: dict[str, Any], defaults: Mapping[str, Any] | None = None, *, ignored: Collection[str] = ()
) -> dict[str, Any]:
    """The prediction for one row, completed by ``defaults``, without the arguments of ``ignored`` flags.

    Raises:
        PlanError: the row describes no configuration that runs.
    """
    row = without(_completed(as_arguments(row), defaults or {}), ignored)
    check_spelling(row)
    ours, theirs = in_our_names(row)
    notes = unclear(row)
    if ours.keys() >= _MAIN_SIZES and isinstance(ours.get("model"), str) and not is_model(ours["model"]):
        notes += [f"model {ours.pop('model')!r} is none of ours, so a label: priced is what the sizes beside it say"]
    options = Options(values=flags_of(theirs))
    model, base = _model(ours, options), _cluster(ours)
    layout = _layout(ours, model, base, microbatches=theirs.get("num_microbatches"))
    if "precision" not in ours:
        notes.append(f"no precision, such as bf16: priced in {layout.precision}")
    if "microbatch" not in ours:
        notes.append(f"no micro_batch_size: priced with {layout.microbatch}")
    words = [*model_flags(model), "--vocab-size", str(model.vocab_size), *layout_flags(model, layout)]
    added = [] if RecomputeModule.MOE_ACT in layout.modules_again else [GROUPED]
    added += ["--global-batch-size"] * (STEPS in options)  # Beside it, Megatron's is only a placeholder.
    added += [] if "dispatcher" in ours else ["--moe-token-dispatcher-type"]
    ours_said = Options.parse(words).without(added)  # The planner adds them.
    options = dataclasses.replace(options, values={**ours_said.values, **options.values})
    run = read(options, gpus=layout.gpus, kind=model.kind, gpu=base.gpu, fused=ours.get("fused_attention"))
    for field in _DECIDED:
        said = getattr(run.model if field in MODEL else run.layout, field)
        if field in ours and ours[field] != said:
            raise PlanError(f"{field} {ours[field]}: Megatron's arguments in the row say {said}; leave out one")
    for key in sorted(MODEL) if "model" in ours else ():
        _compare(key, getattr(run.model, key), getattr(model, key))
    layout = dataclasses.replace(run.layout, **{name: getattr(layout, name) for name in _NOT_IN_FLAGS})
    choice = price(run.model, layout, sized(base, gpus=layout.gpus))
    return {**prediction_json(run.model, choice), "notes": [*notes, *run.notes, *unpriced_receives(layout)]}


def _model(ours: dict[str, Any], options: Options) -> Model:
    """The model as far as fields of ours describe it."""
    fields = {key: value for key, value in ours.items() if key in MODEL}
    if "model" not in ours:
        if _POSITIONS.intersection(options.values):
            fields = positions_of(options) | fields
        if "--moe-layer-freq" in options:  # It says which layers have experts, and what the widths are of.
            fields = {
                key: value for key, value in fields.items() if key not in ("dense_layers", "dense_ffn_hidden_size")
            }
        if not _MAIN_SIZES & fields.keys():
            raise PlanError("model is missing; give a name, an object, or sizes such as num_layers")
        if "vocab_size" not in fields:
            kind = checked(fields.get("kind", Kind.GPT), Kind, "kind")
            fields["vocab_size"] = vocabulary(options, kind, name="vocab_size", remedy="it, a whole number")
        return build(Model, fields, "model")
    source = ours["model"]
    if not isinstance(source, str | dict):
        raise PlanError(f"model {source!r}: give a name or an object, or the sizes beside it")
    model = load_model(source) if isinstance(source, str) else model_of(source, "model")
    for key, value in typed(Model, fields, "model").items():
        _compare(key, getattr(model, key), value)
    return model


def _compare(key: str, named: Any, given: Any) -> None:
    """Whether what a row says of a model is what the model has that it names."""
    if named != given and key != "name":
        raise PlanError(f"{key} {given}: the model has {named}; leave out one of them")


def _cluster(ours: dict[str, Any]) -> Cluster:
    cluster = ours.get("cluster")
    if isinstance(cluster, dict):
        return cluster_of(cluster, "cluster")
    if isinstance(cluster, str):
        return load_cluster(cluster)
    what = "cluster is missing" if cluster is None else f"cluster {cluster!r}"
    raise PlanError(f"{what}; give one of {', '.join(CLUSTERS)}, or an object")


def _layout(ours: dict[str, Any], model: Model, base: Cluster, *, microbatches: Any = None) -> Layout:
    """The layout as far as fields of ours describe it, or so many ``microbatches`` in place of the batch."""
    fields = typed(Layout, {key: value for key, value in ours.items() if key in LAYOUT}, "layout")
    fields["schedule"] = schedule_name(fields.get("schedule", MEGATRON).lower())
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
    unit, count = fields.get("microbatch", 1) * fields["data"], 1  # As Megatron.
    if microbatches is not None:
        count = checked(microbatches, int, "num_microbatches")
        batch = fields.get("global_batch", count * unit)
        if unit > 0 and batch != count * unit:
            has = f"global_batch {batch} has {batch / unit:g} per replica"
            raise PlanError(f"num_microbatches {count}: {has}; leave out one of them")
    fields.setdefault("global_batch", count * unit)
    return build(Layout, fields, "layout")


def _looked_at(model: Model, fields: dict[str, Any]) -> dict[str, bool]:
    """Which fields Megatron looks at only beside others, and whether those are there."""
    precision = fields.get("precision", Precision.BF16)
    return {
        **dict.fromkeys(("expert_tensor", "dense_layers"), model.num_experts > 0),
        "sequence_parallel": fields.get("tensor", 1) > 1,
        "fused_swiglu": model.swiglu,
        "overlap_transfers": fields.get("chunks", 1) > 1,
        "gradients_in_fp32": precision is Precision.FP16,
        "gradients_in_bf16": precision is Precision.BF16,
    }
