"""What a plan means for the choice between delayed gradients and a flush."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from megatron_2bw.planner.cost.costs import iteration, unpriced_receives
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.rules import needs_megatron_0_19
from megatron_2bw.planner.search.efficiency import EXACT
from megatron_2bw.planner.search.finder import Choice
from megatron_2bw.planner.search.search import Plan
from megatron_2bw.planner.specs.layout import Receives
from megatron_2bw.schedule.registry import MEGATRON
from megatron_2bw.schedule.timeline import percent

MANY = 8
"""Microbatches per stage from which a flush costs little: at m = 8d it idles (d-1)/m < 1/8 longer than it works."""
NARROW = 4096
"""Hidden size up to which Transformer Engine's norms need no GPU for themselves: see ``megatron_2bw/README.md``."""
WORTH_A_FLAG = 0.01
"""Of the time of a batch."""


def advice(plan: Plan) -> Iterator[str]:
    """Sentences: the delay that 2bw trades, when a flush reaches the loss earlier, and when not to use 2bw."""
    yield from _how_far_off(plan)
    if needs_megatron_0_19(plan.best.layout):
        yield (
            f"{name(plan.best.layout)} needs megatron-core 0.19: 0.18 sums the gradients of experts that are not split "
            "like other weights over the wrong ranks."
        )
    if plan.best.layout.schedule == "1f1b-flush":
        yield (
            "1f1b-flush trains as Megatron's own schedule does, to the last bit: without -m megatron_2bw and "
            "--pipeline-schedule, too."
        )
    yield from _receives(plan)
    delayed, flushed = plan.best_of(delayed=True), plan.best_of(delayed=False)
    if delayed is None:
        return
    layout = delayed.layout
    count = layout.delayed_microbatches
    what = f"the first {count} microbatches of every batch" if 0 < count < layout.microbatches else "every batch"
    yield (
        f"2bw computes {what} with weights that lack the update of the batch before (delay 1): "
        f"m = {layout.microbatches} microbatches on d = {layout.pipeline} stages."
    )
    share = plan.progress.synchronous
    if share:
        yield (
            f"The first {share:.0%} of the batches are priced without the delay, as a flush on the same stages: train "
            "with as many --synchronous-warmup-iters."
        )
    if flushed is not None:
        yield from _against_flush(plan, delayed, flushed)
    if plan.assumption:
        yield plan.assumption
    if flushed is None:
        yield "No layout without a delay was tried, or none fits: --pipeline-schedule says which schedules are."
        return
    yield from _tie(delayed, flushed)
    faster = _break_even(plan, delayed, flushed) < plan.progress.efficiency
    if faster and layout.microbatches >= MANY * layout.pipeline:
        bound = (1 - share) * (layout.pipeline - 1) / layout.microbatches
        times = f"{1 - share:g} x " if share else ""
        yield (
            f"m >= {MANY}d: all that 2bw saves of a flush on the same stages is its bubble, {times}(d-1)/m = "
            f"{percent(bound)} of the time. "
            f"Prefer {name(flushed.layout)}, whose gradients are exact, unless that gain is worth a delay."
        )


def _receives(plan: Plan) -> Iterator[str]:
    """What earlier ones would save, where that is something and nothing forbids them; and what speaks against them."""
    layout, model = plan.best.layout, plan.model
    if layout.receives is Receives.EARLY and model.hidden_size > NARROW:
        yield (
            f"With a hidden size of {model.hidden_size:,}, norms of Transformer Engine may wait for the whole GPU, and "
            "with --pipeline-receives early for each other (megatron_2bw/README.md): leave it out unless you know "
            "better."
        )
    yield from (f"It is {note}." for note in unpriced_receives(layout))
    has_choice = layout.schedule != MEGATRON and layout.receives is Receives.DEFAULT
    if not has_choice or model.num_experts or model.hidden_size > NARROW:
        return
    early_s = iteration(model, layout.but(receives=Receives.EARLY), plan.cluster).time_s
    saved = 1 - early_s / plan.best.iteration.time_s
    if saved >= WORTH_A_FLAG:
        yield (
            f"Its receives are late, the default on GPUs, and so {percent(saved)} of its time are transfers that "
            "--pipeline-receives early hides, with which another layout may be better still: plan again with it. The "
            "norms are narrow enough for it; read what else waits for a GPU (megatron_2bw/README.md) before you choose "
            "it, and leave it out beside --sft and --dataloader-inter-document-masking."
        )


def _tie(delayed: Choice, flushed: Choice) -> Iterator[str]:
    """A warning where the two cannot be told apart."""
    if delayed.measured_s and flushed.measured_s:
        return
    error = max(delayed.iteration.relative_error, flushed.iteration.relative_error)
    if abs(_time_ratio(delayed, flushed) - 1) <= error:
        yield (
            f"Their times differ by less than the error bar of {error:.0%}: run both before you choose; on one node, "
            "--verify-top does."
        )


def _how_far_off(plan: Plan) -> Iterator[str]:
    """Predictions beside what was measured, if anything was."""
    ran = [choice for choice in plan.choices if choice.measured_s]
    if not ran:
        return
    from statistics import median  # Most plans measure nothing, and it loads a dozen modules.

    off = [choice.iteration.time_s / choice.measured_s - 1 for choice in ran]
    worst, furthest = max(zip(off, ran, strict=True), key=lambda pair: abs(pair[0]))
    yield (
        f"{len(ran)} of these layouts ran on this machine, which ranks them {_ranked(ran)}: the prediction was "
        f"off by {percent(median(map(abs, off)))} (median), at most {worst:+.1%} ({name(furthest.layout)})."
    )


def _ranked(ran: list[Choice]) -> str:
    """How the measured order agrees with the predicted one; times that overlap have no order."""

    swapped = [(faster, slower) for faster, slower in combinations(ran, 2) if faster.loss_time_s > slower.loss_time_s]
    if not swapped:
        return "as predicted"
    wrong = [
        f"{name(faster.layout)} before {name(slower.layout)}"
        for faster, slower in swapped
        if faster.to_loss_s(faster.measured_range_s[1]) < slower.to_loss_s(slower.measured_range_s[0])
    ]
    if not wrong:
        return "as predicted, but for times that overlap"
    return f"not as predicted ({', '.join(wrong)})"


def _time_ratio(one: Choice, other: Choice) -> float:
    """Of the times of their batches: both measured, or else both predicted."""
    if one.measured_s and other.measured_s:
        return one.measured_s / other.measured_s
    return one.iteration.time_s / other.iteration.time_s


def _break_even(plan: Plan, delayed: Choice, flushed: Choice) -> float:
    """The sample efficiency at which both reach a loss at once."""
    slowed = delayed.loss_time_s * plan.progress.efficiency / delayed.iteration.time_s  # By batches without a delay.
    return slowed * _time_ratio(delayed, flushed)


def _against_flush(plan: Plan, delayed: Choice, flushed: Choice) -> Iterator[str]:
    efficiency, break_even = plan.progress.efficiency, _break_even(plan, delayed, flushed)
    other, more = name(flushed.layout), percent(1 / break_even - 1)
    if break_even >= max(1, efficiency):
        over = " over the whole run" if plan.progress.synchronous else ""
        less = percent(1 - 1 / break_even)
        yield f"Do not use 2bw here: {other} takes {less} less time per batch{over}, without a delay."
    elif plan.progress == EXACT:
        yield (
            f"It reaches a loss before {other} as long as it needs less than {more} more samples for it; "
            f"say how many with --sample-efficiency (break-even {break_even:.3f})."
        )
    elif break_even < efficiency:
        earlier = percent(1 - break_even / efficiency)
        yield (
            f"At sample efficiency {efficiency:g} it reaches a loss {earlier} earlier than {other} "
            f"(break-even {break_even:.3f})."
        )
    else:
        earlier = percent(1 - efficiency / break_even)
        yield (
            f"At sample efficiency {efficiency:g} a flush reaches the loss {earlier} earlier: "
            f"use {other} (break-even {break_even:.3f})."
        )
