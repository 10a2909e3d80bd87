"""Durations in, Timeline out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_2bw.schedule.action import Action, ActionType
from megatron_2bw.schedule.calls import lowered
from megatron_2bw.schedule.engine import Durations, Seconds, run
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.timeline import Event, Timeline, ratio, work_s

__all__ = ["Durations", "SteadyState", "simulate", "steady_state"]


class SteadyState(NamedTuple):
    """An endless run, far from its ends."""

    period_s: Seconds
    """Time per batch."""
    bubble_ratio: Seconds
    """Idle share of that time, averaged over ranks; updates are work."""


def simulate(
    schedule: Schedule,
    durations: Durations,
    batches: int,
    *,
    delays: Mapping[tuple[int, Action], Seconds] | None = None,
) -> Timeline:
    """Run ``batches`` calls, the last one a drain.

    Transfers overlap with computation and sends are buffered. Integers and Fractions stay exact.

    Args:
        schedule: default reductions and transfers are added where it has none.
        durations: of every action.
        batches: at least 1.
        delays: by how much single actions take longer; the key is (rank, action), the action's batch
            and version counted from the start of the run, as in the Timeline.

    Raises:
        ScheduleError: the schedule gets stuck (``validate`` says why).
        ValueError: no batches, or durations for another number of stages.

    >>> from megatron_2bw.schedule.registry import build
    >>> timeline = simulate(build("2bw", stages=4, microbatches=4), Durations(forward_s=1, backward_s=2), 40)
    >>> timeline.makespan_s, timeline.peak_in_flight
    (489, (4, 3, 2, 1))
    """
    if batches < 1:
        raise ValueError(f"batches = {batches}; a run has at least 1")
    outcome = run(lowered(schedule), [batches], durations, delays=delays)
    if outcome.blocked:
        where = ", ".join(f"rank {b.rank} in call {b.span.call} at {b.action}" for b in outcome.blocked)
        raise ScheduleError(f"{schedule.name} gets stuck: {where}; validate() names the broken rule")
    events = tuple(
        tuple(Event(timed.action.shifted(timed.call), timed.start_s, timed.end_s) for timed in of_rank)
        for of_rank in outcome.timed
    )
    return Timeline(events=events, name=schedule.name)


def steady_state(schedule: Schedule, durations: Durations) -> SteadyState:
    """Time per batch and bubble in the middle of a long run.

    ``bubble = 1 - (F + B + UPDATE of one batch, summed over ranks) / (ranks * period)``.

    >>> from megatron_2bw.schedule.registry import build
    >>> steady_state(build("gpipe", stages=3, microbatches=2), Durations(forward_s=1, backward_s=2))
    SteadyState(period_s=Fraction(12, 1), bubble_ratio=Fraction(1, 2))
    """
    settle, window = 2 * schedule.stages + 4, schedule.stages + 4
    timeline = simulate(schedule, durations, settle + window + schedule.stages)
    ends_s = {
        event.action.batch: event.end_s
        for events in timeline.events
        for event in events
        if event.action.type is ActionType.BACKWARD and event.action.stage == 0
    }
    period_s = ratio(ends_s[settle + window] - ends_s[settle], window)
    work_per_batch_s = ratio(work_s(timeline), len(ends_s))
    total_s = len(timeline.events) * period_s
    return SteadyState(period_s, (total_s - work_per_batch_s) / total_s if total_s else 0)
