"""GEMS: one microbatch at a time, in alternating directions."""

from __future__ import annotations

from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.systems.directions import Pass, bidirectional, check_even


def gems(stages: int, microbatches: int) -> Schedule:
    """Send microbatches down and up in turn; each begins while the backwards of the one before come to an end.

    Span ``m*(d*B + F) + (d-1)*F``; activations 1; two copies of the weights, of one version; no delay.

    Source: Jain et al., "GEMS", SC 2020, section 3 (as in MixPipe, DAC 2023, Table I).

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(gems(2, 2), batches=1))
    rank 0  a0 .  .  .  A0--- a1 A1--- .  . |
    rank 1  .  a0 A0--- a1 .  .  .  .  A1---|
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    check_even("gems", stages)
    order = [Pass(type_, i) for i in range(microbatches) for type_ in (ActionType.FORWARD, ActionType.BACKWARD)]
    return bidirectional("gems", stages, microbatches, [order] * stages, in_flight=(1,) * stages)
