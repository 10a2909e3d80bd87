"""Chimera: two 1F1B pipelines in opposite directions, each filling the other's bubbles."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.systems.directions import Pass, bidirectional, check_even, stage_of


def chimera(stages: int, microbatches: int) -> Schedule:
    """Merge pipelines down and up; each takes half of every d microbatches.

    Bubble ``(d-2)/(2m+d-2)`` where a backward takes as long as a forward, ``(d-2)/(3m/2+d-2)`` where it takes
    twice as long and m = d; activations ``d/2+1`` to d; two copies of the weights, of one version; no delay.
    More than d microbatches are units of d, one begun after the other.

    Args:
        stages: d, even.
        microbatches: a multiple of d.

    Raises:
        ScheduleError: other numbers.

    Source: Li and Hoefler, "Chimera", SC 2021, sections 3.1 and 3.5 (direct concatenation).

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(chimera(2, 2), batches=1))
    rank 0  a0 a1 A1--- A0---|
    rank 1  a1 a0 A0--- A1---|
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    check_even("chimera", stages)
    if microbatches % stages:
        raise ScheduleError(
            f"chimera runs units of as many microbatches as stages, {stages}, and got {microbatches}: use a multiple"
        )
    passes = [[one for _, one in sorted(slots(rank, stages, microbatches))] for rank in range(stages)]
    in_flight = tuple(min(stages // 2, stages - rank) + min(stages // 2, rank + 1) for rank in range(stages))
    return bidirectional("chimera", stages, microbatches, passes, in_flight)


def slots(rank: int, stages: int, microbatches: int) -> Iterator[tuple[int, Pass]]:
    """The slot of each forward and backward of ``rank``; no two have the same."""
    for microbatch in range(microbatches):
        unit, within = divmod(microbatch, stages)
        stage, start = stage_of(rank, microbatch, stages), 2 * stages * unit + 2 * (within // 2)
        yield start + stage, Pass(ActionType.FORWARD, microbatch)
        yield start + stages + (stages - 1 - stage), Pass(ActionType.BACKWARD, microbatch)
