"""PipeDream: 1F1B without a flush and an update after every microbatch, on stashed weights."""

from __future__ import annotations

from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update


def pipedream(stages: int, microbatches: int = 1) -> Schedule:
    """Update after every microbatch, with gradients of the weights that its forward used: d-1-s versions old.

    Stage s computes batch t with ``W(max(t - (d-1-s), 0))``: later stages are less late, so no version of
    the whole model is ever used. Steady bubble 0; activations and weight versions ``d-s``; delay ``d-1-s``.
    An update waits for replicas of its stage alone: a sum over all stages would drain the pipeline.

    Args:
        stages: d.
        microbatches: 1; a batch is what an update uses.

    Raises:
        ScheduleError: more microbatches.

    Source: Narayanan et al., "PipeDream", SOSP 2019, section 3.3 (weight stashing).

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(pipedream(2), batches=4))
    rank 0  a0 b0 .  .  A0---|c0 B0---|d0 C0---|.  D0---|
    rank 1  .  a0 A0---|b0 B0---|c0 C0---|d0 D0---|
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    if microbatches != 1:
        raise ScheduleError(
            f"pipedream updates after every microbatch, so its batches have 1, not {microbatches}: make the global "
            "batch size micro-batch size x replicas"
        )
    delay = tuple(stages - 1 - stage for stage in range(stages))
    return Schedule(
        name="pipedream",
        stages=stages,
        microbatches=1,
        programs=programs_of(
            [
                forward(stage, 0, batch=delay[stage], delay=delay[stage]),
                backward(stage, 0, delay=delay[stage]),
                update(stage),
            ]
            for stage in range(stages)
        ),
        delay=delay,
        weight_versions=tuple(late + 1 for late in delay),
        in_flight=tuple(late + 1 for late in delay),
        reductions=(Reduction.GRADIENTS,),
    )
