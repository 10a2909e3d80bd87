"""All systems of the two papers on stages that wait instead of computing: part two of ``schedules.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from timed_stage import BACKWARD_S, FORWARD_S, Run, measure, steady_period_s

from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.registry import PER_MICROBATCH, build
from megatron_2bw.schedule.simulate import steady_state

BATCHES = 16
SYSTEMS = ("inter-layer", "gems", "gpipe", "1f1b-flush", "chimera", "mixpipe", "2bw", "pipedream")
LIMITS = {4: 3, 8: 7}
"""By depth: activations that fit."""
MIXPIPE = {4: (("k", 2), ("gamma", 1)), 8: (("k", 6), ("gamma", 1))}
"""By depth: the shortest that keeps to the limit without computing anything twice."""


def report_timed(repetitions: int) -> Iterator[str]:
    """As many microbatches as stages, for PipeDream one per batch, with room for all activations and with less.

    Args:
        repetitions: whose median counts.
    """
    waits = f"F = {FORWARD_S} s, B = {BACKWARD_S} s"
    yield from ("", f"Timed stages: {waits}, {BATCHES} batches, transfers and reductions real", "", _HEAD)
    for stages in LIMITS:
        for name in ("2bw", "1f1b-flush"):
            yield _line(name, stages, repetitions=repetitions)
    limits = ", ".join(f"{limit} at d = {stages}" for stages, limit in LIMITS.items())
    again = f"* computes them again, B = {BACKWARD_S + FORWARD_S:g} s"
    yield from ("", f"The same with room for few activations ({limits}); {again}", "", _HEAD)
    for stages, limit in LIMITS.items():
        for name in SYSTEMS:
            yield _line(name, stages, limit=limit, repetitions=repetitions)
    yield from ("", "pipedream updates after every microbatch: a batch of its is one, of the others d.")


_HEAD = (
    f"{'schedule':<14} {'d':>2} {'m':>2} {'in units of F':>14} {'simulated s/batch':>18} {'measured':>9} {'share':>6}"
)


def _line(name: str, stages: int, *, limit: int | None = None, repetitions: int) -> str:
    """Without a limit, all activations are kept."""
    options = MIXPIPE[stages] if name == "mixpipe" else ()
    microbatches = 1 if name in PER_MICROBATCH else stages
    schedule = build(name, stages=stages, microbatches=microbatches, **dict(options))
    recomputes = limit is not None and max(schedule.in_flight) > limit
    backward_s = BACKWARD_S + recomputes * FORWARD_S
    units = steady_state(schedule, Durations(forward_s=1, backward_s=round(backward_s / FORWARD_S))).period_s
    run = Run(
        schedule=name,
        options=options,
        stages=stages,
        microbatches=microbatches,
        batches=BATCHES * stages // microbatches,
        forward_s=FORWARD_S,
        backward_s=backward_s,
    )
    measured_s = statistics.median(steady_period_s(measure(run)) for _ in range(repetitions))
    shown, ideal_s = name + "*" * recomputes, float(units) * FORWARD_S
    line = f"{shown:<14} {stages:>2} {microbatches:>2} {int(units):>14} {ideal_s:>18.3f} {measured_s:>9.3f}"
    line += f" {ideal_s / measured_s:>6.3f}"
    print(line, flush=True)
    return line
