"""Durations in, Timeline out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.calls import lowered
from megatron_2bw.schedule.durations import Durations, Seconds
from megatron_2bw.schedule.engine import Model, Outcome, run
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.timeline import Event, Timeline, ratio

ROUNDING = 1e-11
"""Of floating times that are equal."""


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
    outcome = _unblocked(lowered(schedule), batches, durations, delays)
    events = tuple(
        tuple(Event(timed.action.shifted(timed.call), timed.start_s, timed.end_s) for timed in of_rank)
        for of_rank in outcome.timed
    )
    return Timeline(events=events, name=schedule.name)


def _unblocked(
    schedule: Schedule,
    batches: int,
    durations: Durations,
    delays: Mapping[tuple[int, Action], Seconds] | None = None,
    *,
    model: Model = Model.HOST,
) -> Outcome:
    outcome = run(schedule, [batches], durations, model=model, delays=delays)
    if outcome.blocked:
        where = ", ".join(f"rank {b.rank} in call {b.span.call} at {b.action}" for b in outcome.blocked)
        raise ScheduleError(f"{schedule.name} gets stuck: {where}; validate() names the broken rule")
    return outcome


def steady_state(schedule: Schedule, durations: Durations, *, model: Model = Model.HOST) -> SteadyState:
    """Time per batch and bubble of an endless run.

    A call depends on a few calls before it. Once all times in so many calls are those of some calls earlier, plus one
    shift, that goes on for ever, and the period is exact, for floats to 1e-11. While faster stages still catch up with
    slower ones, it is by how much the slowest time has moved on: never too short, and too long by no more than the
    difference to the fastest one.

    ``bubble = 1 - (F + B + UPDATE of one batch, summed over ranks) / (ranks * period)``.

    Args:
        schedule: default reductions and transfers are added where it has none.
        durations: of every action.
        model: what waiting means.

    >>> from megatron_2bw.schedule.registry import build
    >>> steady_state(build("gpipe", stages=3, microbatches=2), Durations(forward_s=1, backward_s=2))
    SteadyState(period_s=Fraction(12, 1), bubble_ratio=Fraction(1, 2))
    """
    for turns in (schedule.stages + 4, 5 * (schedule.stages + 4)):
        end = _End.of(lowered(schedule), durations, turns, model)
        repeated = next(filter(end.repeats, range(1, turns + 1)), None)
        if repeated is not None:
            break
    bounds = range(1, turns + 1) if repeated is None else [repeated]
    period_s = min(ratio(max(end.shifts_s(turn)), turn) for turn in bounds)
    total_s = len(schedule.programs) * period_s
    return SteadyState(period_s, (total_s - end.work_s) / total_s if total_s else 0)


class _End(NamedTuple):
    """The last calls of a long run, without those in which it is known to end."""

    times_s: list[list[Seconds]]
    """Per call: ends of all actions, and of all transfers and reductions of its batch."""
    depth: int
    """Calls from which all later ones follow."""
    work_s: Seconds
    """Of one call, summed over ranks."""

    @classmethod
    def of(cls, schedule: Schedule, durations: Durations, turns: int, model: Model) -> _End:
        """Long enough to compare its end with what was up to ``turns`` calls earlier."""
        batches = [action.batch for program in schedule.programs for action in program.steady]
        ahead, behind = max(*batches, 1), -min(batches)
        depth = 1 + ahead + behind
        first = max(behind, 1)  # The pipeline fills in call 0, and there are no updates of earlier batches.
        last = first + depth + turns
        outcome = _unblocked(schedule, last + ahead, durations, model=model)
        times_s = [list(arrivals_s) for arrivals_s in outcome.arrivals_s]
        work_s: Seconds = 0
        for timed in (timed for of_rank in outcome.timed for timed in of_rank):
            times_s[timed.call].append(timed.end_s)
            if timed.call == first:
                work_s += timed.end_s - timed.start_s
        return cls(times_s[first:last], depth, work_s)

    def shifts_s(self, turn: int) -> Iterator[Seconds]:
        """How much later everything is at the end than ``turn`` calls before."""
        now, before = self.times_s[-self.depth :], self.times_s[-self.depth - turn : -turn]
        for row, row_before in zip(now, before, strict=True):
            yield from (now_s - before_s for now_s, before_s in zip(row, row_before, strict=True))

    def repeats(self, turn: int) -> bool:
        """Whether all of that is one shift."""
        shifts_s = self.shifts_s(turn)
        shift_s = next(shifts_s)
        rounding_s = ROUNDING * shift_s if isinstance(shift_s, float) else 0
        return all(abs(other_s - shift_s) <= rounding_s for other_s in shifts_s)
