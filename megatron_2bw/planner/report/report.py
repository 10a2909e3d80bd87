"""Plans and estimates as text and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from megatron_2bw.planner.cost.costs import PRICED, SCHEDULES
from megatron_2bw.planner.flags.flags import in_flags, layout_flags
from megatron_2bw.planner.flags.model_flags import model_flags
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.memory.memory import StageMemory
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.report.advice import advice
from megatron_2bw.planner.rules import delay_of
from megatron_2bw.planner.search.decisions import Rejection
from megatron_2bw.planner.search.efficiency import EXACT, correction_flags
from megatron_2bw.planner.search.finder import Choice, first_of_kinds
from megatron_2bw.planner.search.search import Plan
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.specs.space import LEAST_TOKENS, Space
from megatron_2bw.planner.table import billions, gib, seconds, table, wrapped
from megatron_2bw.schedule.registry import MEGATRON
from megatron_2bw.schedule.timeline import percent

_HEAD = ("layout", "time", "error", "tokens/s", "TFLOP/s", "bubble", "delay", "memory/GiB", "headroom/GiB")
MEMORY_ERROR = 0.05
"""Share of a GPU's memory by which a prediction may be off: the bound that ``tests/planner/test_memory.py`` checks."""
_NOTHING = 1e-4
"""Share of the time of a batch below which a part is not worth a line."""


def flags_of(model: Model, layout: Layout) -> list[str]:
    """All that goes behind the training script, but for data, tokenizer and optimizer."""
    return [*layout_flags(model, layout), *model_flags(model)]


def planned_flags(plan: Plan, choice: Choice) -> list[str]:
    """Those of ``choice``, and what the measured progress it was found by asks of 2bw."""
    corrected = correction_flags(plan.progress, choice.layout) if plan.assumption else ()
    return [*flags_of(plan.model, choice.layout), *corrected]


def sentences(plan: Plan) -> list[str]:
    """What to know of the best layout before its flags are pasted."""
    return [*_narrow(plan), *advice(plan)]


def plan_lines(plan: Plan, top: int, space: Space, notes: Sequence[str] = ()) -> Iterator[str]:
    """The best layouts, what they mean, what is out, and the flags of the best."""
    yield from _heading(plan.model, plan.cluster, plan.global_batch)
    yield ""
    yield from table(_row_head(plan), (_row(plan, choice) for choice in shown(plan, top)))
    yield ""
    yield f"memory: of the fullest stage, {gib(plan.cluster.memory_bytes)} GiB per GPU; TFLOP/s: per GPU, of the model"
    yield "bubble: share of time in which stages wait, uneven stages and updates among the reasons; error: of the time"
    yield from stage_totals(memory.stages(plan.model, plan.best.layout))
    if said := sentences(plan):
        yield ""
        yield from paragraph(said)
    yield from noted(notes)
    yield ""
    yield from _rejected(plan)
    if left_out := untried(plan.model, space):
        yield f"Not tried unless asked for: {'; '.join(left_out)}."
    yield ""
    yield from launch_lines(plan.model, plan.best.layout, plan.cluster, planned_flags(plan, plan.best))


def paragraph(said: Sequence[str]) -> list[str]:
    """Sentences in lines; a flag is not cut at its hyphens."""
    return textwrap.wrap(" ".join(said), 110, break_on_hyphens=False)


def noted(notes: Sequence[str]) -> list[str]:
    """A line for each."""
    return [f"note: {note}" for note in notes]


def _narrow(plan: Plan) -> Iterator[str]:
    """A warning where the best might not fit, as far as one can say."""
    needed_bytes = MEMORY_ERROR * plan.cluster.memory_bytes
    if plan.best.headroom_bytes >= needed_bytes:
        return
    roomy = next((choice for choice in plan.choices if choice.headroom_bytes >= needed_bytes), None)
    instead = f"; of those that were compared, {name(roomy.layout)} leaves more" if roomy else ""
    yield (
        f"{name(plan.best.layout)} leaves {gib(plan.best.headroom_bytes)} GiB, less than the "
        f"{MEMORY_ERROR:.0%} by which the prediction may be off{instead}."
    )


def shown(plan: Plan, top: int) -> list[Choice]:
    """The best ``top`` that differ in more than how they save memory and spread layers."""
    return list(first_of_kinds(plan.choices).values())[:top]


def _heading(model: Model, cluster: Cluster, global_batch: int) -> Iterator[str]:
    yield (
        f"{model.name or model.kind.upper()}: {billions(model.parameters)} parameters, a vocabulary of "
        f"{model.vocab_size:,}, sequences of "
        f"{model.seq_length:,} tokens, batches of {global_batch:,} samples"
    )
    yield f"{cluster.nodes} x {cluster.name}: {cluster.gpus:,} x {cluster.gpu.name}"


def _row_head(plan: Plan) -> tuple[str, ...]:
    measured = ("measured",) if plan.best.measured_s else ()
    return (*_HEAD, *measured, "to loss") if plan.progress != EXACT else (*_HEAD, *measured)


def _row(plan: Plan, choice: Choice) -> list[str]:
    iteration = choice.iteration
    cells = [
        name(choice.layout),
        seconds(iteration.time_s),
        f"\u00b1{100 * iteration.relative_error:.0f}%",
        f"{iteration.tokens_per_s:,.0f}",
        f"{iteration.flops_per_gpu_s / 1e12:.1f}",
        percent(iteration.bubble_ratio),
        str(delay_of(choice.layout)),
        gib(choice.memory.total_bytes),
        gib(choice.headroom_bytes),
    ]
    if plan.best.measured_s:
        cells.append(seconds(choice.measured_s) if choice.measured_s else "")
    return [*cells, seconds(choice.loss_time_s)] if plan.progress != EXACT else cells


def stage_totals(stages: Sequence[StageMemory]) -> Iterator[str]:
    """GiB of every stage, equal neighbours together."""
    parts = []
    for size, group in groupby(stages, key=lambda stage: gib(stage.total_bytes)):
        first, *rest = (stage.stage for stage in group)
        parts.append(f"{first}-{rest[-1]}: {size}" if rest else f"{first}: {size}")
    for start in range(0, len(parts), 10):
        line = "  ".join(parts[start : start + 10])
        yield f"GiB by stage of the best:  {line}" if not start else f"{'':27}{line}"


def _rejected(plan: Plan) -> Iterator[str]:
    found = "Rules broken, with one example each:" if plan.rejected else "None breaks a rule."
    yield f"{plan.layouts:,} layouts decided. {found}"
    for rejection in plan.rejected:
        yield f"  {rejection.count:,} x {rejection.rule}: {in_flags(rejection.reason)} ({rejection.example})"


def untried(model: Model, space: Space) -> list[str]:
    """What a search in ``space`` leaves out, though it has a price, unless it is asked for."""
    others = f"--pipeline-schedule {', '.join(name for name in PRICED if name not in SCHEDULES)}"
    has_short = model.kind is Kind.GPT and model.seq_length < 2 * LEAST_TOKENS
    short = f"--context-parallel-size above 1 for sequences of less than {2 * LEAST_TOKENS:,} tokens"
    splits = "--expert-tensor-parallel-size other than 1 and --tensor-model-parallel-size"
    left_out = {
        others: space.schedules is None,
        short: space.contexts is None and has_short,
        splits: space.expert_tensors is None and model.num_experts > 0,
    }
    return [what for what, is_left_out in left_out.items() if is_left_out]


def launch_lines(model: Model, layout: Layout, cluster: Cluster, flags: Sequence[str]) -> Iterator[str]:
    """What to put around and behind the training script: ``flags``."""
    yield f"flags of {name(layout)}; data, tokenizer, optimizer and what no price depends on, such as"
    yield "--rotary-base, stay yours:"
    yield ""
    # From Blackwell on, which has mxfp8, Megatron does not ask for it.
    if (layout.tensor > 1 or layout.context > 1) and not cluster.gpu.has_mxfp8:
        yield "    export CUDA_DEVICE_MAX_CONNECTIONS=1"
    module = "" if layout.schedule == MEGATRON else "-m megatron_2bw "
    enough = -(-layout.gpus // cluster.gpus_per_node)
    nodes = next(count for count in range(enough, layout.gpus + 1) if layout.gpus % count == 0)
    ranks, script = f"--nproc-per-node {layout.gpus // nodes}", f"{module}pretrain_{model.kind}.py \\"
    if nodes == 1:
        yield f"    torchrun {ranks} {script}"
    else:
        yield f"    torchrun --nnodes {nodes} {ranks} --node-rank $NODE_RANK --master-addr $MASTER_ADDR \\"
        yield f"        {script}"
    yield from wrapped(map(shlex.quote, flags), indent=" " * 8)


def choice_json(model: Model, choice: Choice, flags: Sequence[str]) -> dict[str, Any]:
    """Layout, predictions and ``flags`` of ``choice``."""
    return {
        "name": name(choice.layout),
        "layout": dataclasses.asdict(choice.layout),
        **prediction_json(model, choice),
        "flags": shlex.join(flags),
    }


def prediction_json(model: Model, choice: Choice) -> dict[str, Any]:
    """What is predicted of ``choice``."""
    iteration = choice.iteration
    return {
        "time_s": iteration.time_s,
        "measured_s": choice.measured_s,
        "measured_range_s": choice.measured_range_s,
        "relative_error": iteration.relative_error,
        "error_source": iteration.error_source,
        "time_to_loss_s": choice.loss_time_s,
        "delay": delay_of(choice.layout),
        "tokens_per_s": iteration.tokens_per_s,
        "flops_per_gpu_s": iteration.flops_per_gpu_s,
        "bubble_ratio": iteration.bubble_ratio,
        "parts_s": dict(iteration.parts),
        "fits": choice.headroom_bytes >= 0,
        "headroom_bytes": choice.headroom_bytes,
        "microbatches": choice.layout.microbatches,
        "stages": [
            {**dataclasses.asdict(stage), "total_bytes": stage.total_bytes}
            for stage in memory.stages(model, choice.layout)
        ],
    }


def _json_of(thing: Model | Cluster) -> dict[str, Any]:
    """What `inputs` reads as ``thing`` again, where it is to be priced."""
    left_out = {field.name for field in dataclasses.fields(thing) if not field.metadata.get("from_file", True)}
    whole = dataclasses.asdict(dataclasses.replace(thing, **dict.fromkeys(left_out)))
    return {name: value for name, value in whole.items() if name not in {*left_out, "given_flags"}}


def _rejection_json(rejection: Rejection) -> dict[str, Any]:
    return {name: getattr(rejection, name) for name in ("step", "rule", "reason", "example", "count")}


def plan_json(plan: Plan, top: int, space: Space) -> dict[str, Any]:
    """All that ``plan_lines`` says."""
    return {
        "model": _json_of(plan.model),
        "cluster": _json_of(plan.cluster),
        "profiled": plan.cluster.profile is not None,
        "global_batch": plan.global_batch,
        "sample_efficiency": plan.progress.efficiency,
        "synchronous_warmup_fraction": plan.progress.synchronous,
        "delayed_microbatches_fraction": plan.progress.delayed,
        "choices": [choice_json(plan.model, choice, planned_flags(plan, choice)) for choice in shown(plan, top)],
        "advice": sentences(plan),
        "rejected": [_rejection_json(rejection) for rejection in plan.rejected],
        "layouts": plan.layouts,
        "not_tried": untried(plan.model, space),
    }


def estimate_lines(model: Model, cluster: Cluster, choice: Choice, notes: Sequence[str]) -> Iterator[str]:
    """Time, throughput, bubble and memory of one configuration."""
    layout, iteration = choice.layout, choice.iteration
    yield from _heading(model, cluster, layout.global_batch)
    yield f"{name(layout)}: m = {layout.microbatches} microbatches per batch and replica, delay {delay_of(layout)}"
    yield ""
    yield f"time per batch  {seconds(iteration.time_s)} \u00b1{100 * iteration.relative_error:.0f}%"
    for part, time_s in sorted(iteration.parts.items(), key=lambda item: -item[1]):
        if time_s > _NOTHING * iteration.time_s:
            yield f"  {part:<24} {seconds(time_s)}"
    rate = f"{iteration.flops_per_gpu_s / 1e12:.1f} TFLOP/s per GPU"
    yield f"throughput      {iteration.tokens_per_s:,.0f} tokens/s, {rate}"
    yield f"bubble          {percent(iteration.bubble_ratio)}"
    yield f"error bar       {iteration.error_source}"
    yield ""
    yield from _memory_table(memory.stages(model, layout))
    yield ""
    yield _verdict(choice, cluster)
    yield from noted(notes)


def _memory_table(stages: Sequence[StageMemory]) -> Iterator[str]:
    parts = [stage.parts for stage in stages]
    heads = [part for part in parts[0] if any(of_stage[part] for of_stage in parts)]
    rows = []
    cells = (
        [*(gib(of_stage[part]) for part in heads), gib(stage.total_bytes)]
        for of_stage, stage in zip(parts, stages, strict=True)
    )
    for row, group in groupby(zip(cells, stages, strict=True), key=lambda pair: pair[0]):
        first, *rest = (stage.stage for _, stage in group)
        rows.append([f"{first}-{rest[-1]}" if rest else str(first), *row])
    return table(["stage (GiB)", *heads, "total"], rows)


def _verdict(choice: Choice, cluster: Cluster) -> str:
    capacity, fullest = cluster.memory_bytes, choice.memory
    is_close = abs(choice.headroom_bytes) < MEMORY_ERROR * capacity
    tight = f", less than the {MEMORY_ERROR:.0%} by which this may be off" if is_close else ""
    if choice.headroom_bytes >= 0:
        share = percent(choice.headroom_bytes / capacity)
        return (
            f"fits: {gib(choice.headroom_bytes)} GiB of {gib(capacity)} ({share}) are free on stage "
            f"{fullest.stage}{tight}"
        )
    return (
        f"does not fit: stage {fullest.stage} needs {gib(fullest.total_bytes)} GiB of {gib(capacity)}, "
        f"{gib(-choice.headroom_bytes)} too much{tight}"
    )


def compared(best: Choice, other: Choice) -> Iterator[str]:
    """Where ``other`` loses time against ``best``."""
    longer = other.loss_time_s / best.loss_time_s - 1
    how = "as long to a loss as"
    if abs(longer) > _NOTHING:
        how = f"{percent(abs(longer))} {'longer' if longer > 0 else 'less'} to a loss than"
    yield (
        f"{name(other.layout)} takes {seconds(other.iteration.time_s)}, {how} {name(best.layout)} "
        f"({seconds(best.iteration.time_s)}):"
    )
    names = dict.fromkeys([*best.iteration.parts, *other.iteration.parts])
    gaps = {part: other.iteration.parts.get(part, 0.0) - best.iteration.parts.get(part, 0.0) for part in names}
    for part, gap_s in sorted(gaps.items(), key=lambda item: -item[1]):
        if abs(gap_s) > _NOTHING * best.iteration.time_s:
            yield f"  {part:<24} {'+' if gap_s > 0 else '-'}{seconds(abs(gap_s))}"
    yield f"It fits: {gib(other.headroom_bytes)} GiB are free on stage {other.memory.stage}."
