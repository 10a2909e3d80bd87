"""Which calls make up a run, and what every call asks of a Program."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from megatron_2bw.schedule.action import WORK, Action, Reduction
from megatron_2bw.schedule.as_sent import Lefts, as_sent, calls_as_sent, followed
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule


class Phase(StrEnum):
    """The part of a Program that a call runs."""

    FILL = "fill"
    STEADY = "steady"
    DRAIN = "drain"


class Part(NamedTuple):
    """What a rank carries out in one go."""

    phase: Phase
    left: int | None = None
    """Batches that come after this one; None for as many as it takes."""
    as_sent: Lefts = ()
    """For a call with the order of `as_sent`: what that takes; then the first call fills the pipeline, too."""

    def of(self, schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank."""
        if not self.as_sent:
            programs = schedule.programs
            return tuple(p.fill(self.left) if self.phase is Phase.FILL else p.call(self.left) for p in programs)
        return as_sent(schedule, self.as_sent) if self.phase is not Phase.FILL else ((),) * len(schedule.programs)


WHOLE = {phase: Part(phase, 0 if phase is Phase.DRAIN else None) for phase in Phase}
"""Each phase of a long run."""


class Span(NamedTuple):
    """One pass of every rank over a part of its Program."""

    part: Part
    call: int
    first: int
    """First batch since the pipeline was last empty: updates and reductions of earlier batches are done already."""

    @property
    def phase(self) -> Phase:
        return self.part.phase


def spans(runs: Iterable[int], ahead: int = 1, *, ordered: int = 0) -> tuple[Span, ...]:
    """The parts of consecutive runs, each of so many calls and ended by a drain.

    Args:
        runs: calls of each.
        ahead: batches by which forwards run ahead; further from its end than that, a run does not know how long it is.
        ordered: how many calls, from the first one on, have the order of `as_sent`.

    >>> for span in spans([2, 1]):
    ...     print(span.phase, span.part.left, span.call, span.first)
    fill None 0 0
    steady None 0 0
    drain 0 1 0
    fill 0 2 2
    drain 0 2 2
    """

    result: list[Span] = []
    first = 0
    for calls in runs:
        lefts: Lefts = ()
        for call in range(first, first + calls):
            left = first + calls - 1 - call
            lefts = followed(lefts, left, ahead)
            order = lefts if call < ordered else ()
            if call == first:
                result.append(Span(Part(Phase.FILL, lefts[-1], order), call, first))
            result.append(Span(Part(Phase.STEADY if left else Phase.DRAIN, lefts[-1], order), call, first))
        first += calls
    return tuple(result)


def walk_of(schedule: Schedule, runs: Iterable[int], *, from_start: bool = False) -> tuple[Span, ...]:
    """The spans of all ranks of ``schedule``.

    Args:
        schedule: lowered.
        runs: see `spans`.
        from_start: whether these are a job's first calls.
    """
    ordered = calls_as_sent(schedule) if from_start or schedule.late_receives else 0
    return spans(runs, schedule.ahead, ordered=ordered)


def lowered(schedule: Schedule) -> Schedule:
    """``schedule``, with default reductions and transfers added where it has only F, B and UPDATE."""
    if any(action.type not in WORK for program in schedule.programs for action in program.steady):
        return schedule
    return lower(schedule)


def groups(schedule: Schedule) -> dict[tuple[Reduction, int], tuple[int, ...]]:
    """By reduction and rank: the ranks of one pipeline that take part in what this rank starts."""
    ranks = range(len(schedule.programs))
    ends = {0, schedule.stages - 1}
    stages = [schedule.stages_of(rank) for rank in ranks]

    def members(kind: Reduction, rank: int) -> tuple[int, ...]:
        if kind is Reduction.NORM:
            return tuple(ranks)
        # Replicas of whole pipelines run the same Programs, and are not counted here.
        shared = ends if kind is Reduction.EMBEDDING else stages[rank]
        return tuple(other for other in ranks if not stages[other].isdisjoint(shared))

    return {(kind, rank): members(kind, rank) for kind in Reduction for rank in ranks}
