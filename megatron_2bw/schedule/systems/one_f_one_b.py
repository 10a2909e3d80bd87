"""1F1B with a flush at the end of every batch: PipeDream-Flush, also known as DAPPLE."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update


def one_f_one_b_flush(stages: int, microbatches: int) -> Schedule:
    """Fill the pipeline, alternate one forward and one backward, drain, update.

    Bubble ``(d-1)/(m+d-1)``; activations ``min(d-s, m)``; one weight version; no delay.

    Source: Narayanan et al., ICML 2021, section 3.2 (PipeDream-Flush); Fan et al., "DAPPLE", PPoPP 2021.

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(one_f_one_b_flush(2, 2), batches=2))
    rank 0  a0 a1 .  .  A0--- .  A1---|b0 b1 .  .  B0--- .  B1---|
    rank 1  .  a0 A0--- a1 A1--- .  . |.  b0 B0--- b1 B1--- .  . |
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    warmup = [min(stages - 1 - stage, microbatches) for stage in range(stages)]
    return Schedule(
        name="1f1b-flush",
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(_call(stage, warmup[stage], microbatches) for stage in range(stages)),
        delay=(0,) * stages,
        weight_versions=(1,) * stages,
        in_flight=tuple(min(stages - stage, microbatches) for stage in range(stages)),
    )


def _call(stage: int, warmup: int, microbatches: int) -> Iterator[Action]:
    for microbatch in range(warmup):
        yield forward(stage, microbatch)
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield forward(stage, warmup + microbatch)
        yield backward(stage, microbatch)
    yield update(stage)
