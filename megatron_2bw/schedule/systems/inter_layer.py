"""Inter-layer model parallelism: a model cut into stages, and no pipelining."""

from __future__ import annotations

from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update


def inter_layer(stages: int, microbatches: int) -> Schedule:
    """One microbatch at a time: its forwards through all stages, its backwards, then the next one's.

    Bubble ``1 - 1/d``; activations 1; one weight version; no delay.

    Source: the model parallelism that Narayanan et al., ICML 2021, section 5.2, compare with.

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(inter_layer(2, 2), batches=1))
    rank 0  a0 .  .  .  A0--- a1 .  .  .  A1---|
    rank 1  .  a0 A0--- .  .  .  a1 A1--- .  . |
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    return Schedule(
        name="inter-layer",
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(
            [*(act(stage, i) for i in range(microbatches) for act in (forward, backward)), update(stage)]
            for stage in range(stages)
        ),
        delay=(0,) * stages,
        weight_versions=(1,) * stages,
        in_flight=(1,) * stages,
    )
