"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Run every forward of the batch, then every backward, then the update.

    Bubble ``(d-1)/(m+d-1)``; activations ``m``; one weight version; no delay. Backwards run in the
    order of the forwards, so that gradients are added in the order of 1F1B.

    Source: Huang et al., "GPipe", NeurIPS 2019.

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(gpipe(2, 2), batches=2))
    rank 0  a0 a1 .  .  .  A0--- A1---|b0 b1 .  .  .  B0--- B1---|
    rank 1  .  a0 a1 A0--- A1--- .  . |.  b0 b1 B0--- B1--- .  . |
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    indices = range(microbatches)
    return Schedule(
        name="gpipe",
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(
            [*(forward(stage, i) for i in indices), *(backward(stage, i) for i in indices), update(stage)]
            for stage in range(stages)
        ),
        delay=(0,) * stages,
        weight_versions=(1,) * stages,
        in_flight=(microbatches,) * stages,
    )
