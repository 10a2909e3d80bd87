"""Which calls make up a run, and what every call asks of a Program."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from megatron_2bw.schedule.action import WORK, Action, Reduction
from megatron_2bw.schedule.first_calls import first_calls
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
    first_calls: tuple[int | None, ...] = ()
    """For a job's first calls: ``left`` of each call up to this one, of which the first also fills the pipeline."""

    def of(self, schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank."""
        if not self.first_calls:
            programs = schedule.programs
            return tuple(p.fill(self.left) if self.phase is Phase.FILL else p.call(self.left) for p in programs)
        return (
            first_calls(schedule, self.first_calls) if self.phase is not Phase.FILL else ((),) * len(schedule.programs)
        )


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


def spans(runs: Iterable[int], ahead: int = 1, *, first_calls: int = 0) -> tuple[Span, ...]:
    """The parts of consecutive runs, each of so many calls and ended by a drain.

    Args:
        runs: calls of each.
        ahead: batches by which forwards run ahead; further from its end than that, a run does not know how long it is.
        first_calls: how many calls of the first run are the first ones of a job.

    >>> for span in spans([2, 1]):
    ...     print(span.phase, span.part.left, span.call, span.first)
    fill None 0 0
    steady None 0 0
    drain 0 1 0
    fill 0 2 2
    drain 0 2 2
    """

    def part(phase: Phase, call: int, left: int) -> Part:
        lefts = [left + earlier for earlier in range(call, -1, -1)] if call < first_calls and first == 0 else []
        known, *before = (left if left < max(ahead, 1) else None for left in (left, *lefts))
        return Part(phase, known, tuple(before))

    result: list[Span] = []
    first = 0
    for calls in runs:
        last = first + calls - 1
        result.append(Span(part(Phase.FILL, first, calls - 1), first, first))
        result.extend(Span(part(Phase.STEADY, call, last - call), call, first) for call in range(first, last))
        result.append(Span(part(Phase.DRAIN, last, 0), last, first))
        first = last + 1
    return tuple(result)


def walk_of(schedule: Schedule, runs: Iterable[int], *, first_calls: int = 0) -> tuple[Span, ...]:
    """The spans of all ranks of ``schedule``."""
    return spans(runs, max(program.ahead for program in schedule.programs), first_calls=first_calls)


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
