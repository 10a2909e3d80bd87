"""What a plan means for the choice between delayed gradients and a flush."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.planner.naming import name
from megatron_2bw.planner.search import Choice, Plan
from megatron_2bw.planner.table import percent

MANY = 8
"""Microbatches per stage from which a flush costs little: at m = 8d it idles (d-1)/m < 1/8 longer than it works."""


def advice(plan: Plan) -> Iterator[str]:
    """Sentences: the delay that 2bw trades, when a flush reaches the loss earlier, and when not to use 2bw."""
    delayed, flushed = plan.best_of(delayed=True), plan.best_of(delayed=False)
    if delayed is None:
        return
    layout = delayed.layout
    yield (
        f"2bw computes every batch with weights that lack the update of the batch before (delay 1): "
        f"m = {layout.microbatches} microbatches on d = {layout.pipeline} stages."
    )
    if flushed is None:
        yield "No layout without a delay fits."
        return
    yield from _against_flush(plan, delayed, flushed)
    faster = delayed.iteration.time_s < flushed.iteration.time_s
    if faster and layout.microbatches >= MANY * layout.pipeline:
        bound = (layout.pipeline - 1) / layout.microbatches
        yield (
            f"m >= {MANY}d: all that 2bw saves of a flush on the same stages is its bubble, (d-1)/m = {percent(bound)} "
            f"of the time (12% at m = {MANY}d). "
            f"Prefer {name(flushed.layout)}, whose gradients are exact, unless that gain is worth a delay."
        )


def _against_flush(plan: Plan, delayed: Choice, flushed: Choice) -> Iterator[str]:
    break_even = delayed.iteration.time_s / flushed.iteration.time_s
    other, more = name(flushed.layout), percent(1 / break_even - 1)
    if break_even >= 1:
        yield f"Do not use 2bw here: {other} takes {percent(1 - 1 / break_even)} less time per batch, without a delay."
    elif plan.efficiency == 1:
        yield (
            f"It reaches a loss before {other} as long as it needs less than {more} more samples for it; "
            f"say how many with --sample-efficiency (break-even {break_even:.3f})."
        )
    elif flushed.loss_time_s > delayed.loss_time_s:
        earlier = percent(1 - delayed.loss_time_s / flushed.loss_time_s)
        yield (
            f"At sample efficiency {plan.efficiency:g} it reaches a loss {earlier} earlier than {other} "
            f"(break-even {break_even:.3f})."
        )
    else:
        earlier = percent(1 - flushed.loss_time_s / delayed.loss_time_s)
        yield (
            f"At sample efficiency {plan.efficiency:g} a flush reaches the loss {earlier} earlier: "
            f"use {other} (break-even {break_even:.3f})."
        )
