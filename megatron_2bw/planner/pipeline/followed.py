"""Seconds per batch of 1F1B with a flush whatever its stages are, by following the microbatches.

What happens in a step depends on the step before. So once everything is equally much later than some steps before,
that repeats, and the rest is not followed.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_2bw.planner.pipeline.periods import ROUNDING, Pipeline, Stage, flush_s


def uneven_one_f_one_b_s(pipeline: Pipeline) -> float:
    """What ``periods.one_f_one_b_s`` is for some stages; exact for all.

    In step i, stage s runs backward i and then forward ``i + d - s``. As many microbatches pass in the slowest turn as
    it has stages.

    >>> lighter, even = Stage(1, 1), Stage(2, 2)
    >>> uneven_one_f_one_b_s(Pipeline(stages=4, microbatches=100, first=lighter, middle=even, last=lighter))
    406
    """
    p, left, later_s, widths = pipeline, pipeline.microbatches, 0, pipeline.widths
    stages = p.in_order
    sends_s = (0, *p.links_s)
    ends_s, inputs_s = _first_forwards_s(p, stages)
    outputs_s: list[float] = [0] * p.stages  # When the last gradient that a stage has sent is there.
    steps = [[*ends_s, *inputs_s[1:], *outputs_s[1:]]]
    while left:
        arrival_s = 0
        for stage in range(p.stages - 1, -1, -1):
            end_s = max(arrival_s, ends_s[stage]) + stages[stage].backward_s
            arrival_s = outputs_s[stage] = max(end_s, outputs_s[stage]) + sends_s[stage]
            if p.stages - stage < left:
                end_s = max(end_s, inputs_s[stage]) + stages[stage].forward_s
                if stage + 1 < p.stages:
                    inputs_s[stage + 1] = max(end_s, inputs_s[stage + 1]) + sends_s[stage + 1]
            ends_s[stage] = end_s
        left -= 1
        steps.append([*ends_s, *inputs_s[1:], *outputs_s[1:]])
        for period in widths:
            repeats = (left - p.stages) // period
            if repeats > 0 and len(steps) > period:
                shift_s = shift_of(steps[-1 - period], steps[-1])
                if shift_s is not None:
                    left, later_s = left - repeats * period, later_s + repeats * shift_s
    return ends_s[0] + later_s + flush_s(p)


def shift_of(before_s: Sequence[float], now_s: Sequence[float]) -> float | None:
    """How much later all of these are than before; None if not equally much."""
    shift_s = now_s[0] - before_s[0]
    rounding_s = ROUNDING * now_s[0]
    if abs(now_s[-1] - before_s[-1] - shift_s) > rounding_s:  # Mostly, this is enough to tell.
        return None
    shifts_s = (now - before for before, now in zip(before_s, now_s, strict=True))
    return shift_s if all(abs(one_s - shift_s) <= rounding_s for one_s in shifts_s) else None


def _first_forwards_s(p: Pipeline, stages: list[Stage]) -> tuple[list[float], list[float]]:
    """When each stage has done the forwards that come before its first backward, and has the input of the next one."""
    ends_s: list[float] = []
    inputs_s: list[float] = [0]
    arrivals_s: list[float] = [0] * min(p.stages, p.microbatches)
    for stage, ((forward_s, _), send_s) in enumerate(zip(stages, (*p.links_s, 0), strict=True)):
        end_s = sent_s = 0
        for microbatch in range(min(p.stages - stage, p.microbatches)):
            end_s = max(end_s, arrivals_s[microbatch]) + forward_s
            sent_s = arrivals_s[microbatch] = max(end_s, sent_s) + send_s
        ends_s.append(end_s)
        inputs_s.append(sent_s)
    return ends_s, inputs_s[: p.stages]
