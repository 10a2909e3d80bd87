"""PipeDream-2BW: 1F1B that never flushes, on two weight versions."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update

DELAY = 1
MOST_EXTRA_IN_FLIGHT = 3
"""With more, receives and sends of neighbours wait for each other in one hardware queue at most sizes."""


def two_bw(
    stages: int, microbatches: int, *, extra_in_flight: int = 0, delayed_microbatches: int | None = None
) -> Schedule:
    """Never drain the pipeline; compute batch t with ``W(max(t - 1, 0))`` at every stage.

    ``W(t+1) = W(t) - lr * grad f(W(t-1))``. A call runs the backward passes of its own batch and
    forward passes that reach ``d-1-s`` microbatches into the next one. The update of a batch may
    happen any time before its weights are first used, by default two batches later. Steady bubble 0;
    activations ``d-s``; weight versions 2.

    Of a batch, only the first ``(1 + extra_in_flight) * (d-1)`` microbatches have to enter the pipeline before the
    update of the batch before it is done. With ``delayed_microbatches`` the others are computed with ``W(t)``, and the
    delay costs less progress; for it, that update has to be done as many microbatches earlier.

    With exactly ``d-s`` activations every transfer, and every moment in which one stage is slower
    than its neighbour, delays both. Stages that run further ahead hide them.

    Args:
        stages: d.
        microbatches: m per batch; at least ``(1 + extra_in_flight) * (d-1)``.
        extra_in_flight: how many more activations to keep per stage boundary between this stage and
            the last.
        delayed_microbatches: how many microbatches of a batch, the first ones, are computed with the older weights; at
            least as many as the first stage runs ahead, one more for the time that the update takes. None for all.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1;
    ``extra_in_flight`` and ``delayed_microbatches`` are ours.

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(two_bw(2, 2), batches=3))
    rank 0  a0 a1 .  .  A0--- b0 A1--- b1 B0---|c0 B1--- c1 C0---|.  C1---|
    rank 1  .  a0 A0--- a1 A1--- b0 B0--- b1 B1---|c0 C0--- c1 C1---|.  . |
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    per_boundary = 1 + extra_in_flight
    delayed = microbatches if delayed_microbatches is None else min(delayed_microbatches, microbatches)
    ahead = [per_boundary * (stages - 1 - stage) for stage in range(stages)]
    return Schedule(
        name="2bw",
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(_call(stage, ahead[stage], microbatches, delayed) for stage in range(stages)),
        delay=(DELAY,) * stages,
        delayed_microbatches=delayed,
        weight_versions=(2,) * stages,
        in_flight=tuple(1 + count for count in ahead),
        per_boundary=per_boundary,
    )


def _call(stage: int, ahead: int, microbatches: int, delayed: int) -> Iterator[Action]:
    def delay_of(microbatch: int) -> int:
        return DELAY if microbatch < delayed else 0

    for index in range(microbatches):
        batch, microbatch = divmod(ahead + index, microbatches)
        if microbatch == delayed:  # This forward is the first to need W(batch).
            yield update(stage, batch=batch - 1)
        elif microbatch == 0 and batch > 0 and delayed == microbatches:  # The first to need W(batch - 1).
            yield update(stage, batch=batch - 1 - DELAY)
        yield forward(stage, microbatch, batch=batch, delay=delay_of(microbatch))
        yield backward(stage, index, delay=delay_of(index))
    if ahead == 0 and delayed == microbatches:
        # The next call's first forward needs W(0); its gradients need the capture buffer.
        yield update(stage, batch=-DELAY)
