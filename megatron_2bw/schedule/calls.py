"""Which calls make up a run, and what every call asks of a Program."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from megatron_2bw.schedule.action import COMPUTE, Action, ActionType, Reduction
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Program, Schedule


class Phase(StrEnum):
    """The part of a Program that a call runs."""

    FILL = "fill"
    STEADY = "steady"
    DRAIN = "drain"


class Span(NamedTuple):
    """One pass of every rank over its ``fill``, ``steady`` or ``drain``."""

    phase: Phase
    call: int
    first: int
    """First batch since the pipeline was last empty: updates and reductions of earlier batches are done already."""


def spans(runs: Iterable[int]) -> tuple[Span, ...]:
    """The phases of consecutive runs, each of so many calls and ended by a drain.

    >>> for span in spans([2, 1]):
    ...     print(span.phase, span.call, span.first)
    fill 0 0
    steady 0 0
    drain 1 0
    fill 2 2
    drain 2 2
    """
    result: list[Span] = []
    first = 0
    for calls in runs:
        last = first + calls - 1
        result.append(Span(Phase.FILL, first, first))
        result.extend(Span(Phase.STEADY, call, first) for call in range(first, last))
        result.append(Span(Phase.DRAIN, last, first))
        first = last + 1
    return tuple(result)


def phases_of(program: Program) -> dict[Phase, tuple[Action, ...]]:
    """The actions of each phase."""
    return {Phase.FILL: program.fill, Phase.STEADY: program.steady, Phase.DRAIN: program.drain}


def lowered(schedule: Schedule) -> Schedule:
    """``schedule``, with default reductions and transfers added where it has only F, B and UPDATE."""
    authored = COMPUTE | {ActionType.UPDATE}
    if any(action.type not in authored for program in schedule.programs for action in program.steady):
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
