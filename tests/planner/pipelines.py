"""Small pipelines of all kinds, for comparing with the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.schedule.durations import Durations

EVEN = (0, 0), (0, 0)
MORE_ON_FIRST_AND_LAST = [EVEN, ((0, 0), (1, 2)), ((1, 1), (3, 3)), ((0, 2), (5, 0))]
"""Forward and backward of embedding and loss, beyond the layers."""
MORE_ON_FIRST = [((1, 1), (0, 0)), ((0, 2), (1, 0)), ((2, 0), (0, 1))]
"""With a small vocabulary the embedding, for which a sum is sent, takes longer than the loss."""
SENDS = (0, Fraction(1, 4), Fraction(1, 2))
SLOW_SENDS = (Fraction(1, 4), 2, 7)
"""From shorter than a forward to longer than a forward and a backward."""


def pipelines(
    sizes: list[tuple[int, int]],
    ends: Sequence[tuple[tuple[int, int], ...]] = MORE_ON_FIRST_AND_LAST,
    sends: Sequence[int | Fraction] = SENDS,
    **more: int,
) -> Iterator[Pipeline]:
    """Small pipelines of all kinds; times are integers and fractions, so that results are exact."""
    for (stages, microbatches), (f, b), (first, last), send_s in itertools.product(
        sizes, [(1, 2), (3, 1)], ends, sends
    ):
        yield Pipeline(
            stages=stages,
            microbatches=microbatches,
            first=Stage(f + first[0], b + first[1]),
            middle=Stage(f, b),
            last=Stage(f + last[0], b + last[1]),
            send_s=send_s,
            **more,
        )


def durations(p: Pipeline) -> Durations:
    stages = p.in_order
    return Durations(
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        update_s=p.update_s,
        send_s=p.sends_s or p.send_s,
        gradients_s=p.gradients_s,
        norm_s=p.norm_s,
    )


def uneven(
    sizes: list[tuple[int, int]], ends: tuple[int, ...], sends: Sequence[int | Fraction] = SENDS, **more: int
) -> Iterator[Pipeline]:
    """Pipelines whose first and last stages have layers of their own, and the others 8."""
    for (stages, microbatches), first, last, send_s in itertools.product(sizes, ends, ends, sends):
        first, middle, last = (Stage(layers, 2 * layers) for layers in (first, 8, last))
        yield Pipeline(
            stages=stages, microbatches=microbatches, first=first, middle=middle, last=last, send_s=send_s, **more
        )


def of_each(
    each: Sequence[Stage], sends_s: tuple[int | Fraction, ...], microbatches: int, chunks: int = 1, **more: int | bool
) -> Pipeline:
    """Of stages, or chunks of them, and links that may all differ."""
    return Pipeline(
        stages=len(each) // chunks,
        microbatches=microbatches,
        first=each[0],
        middle=max(each[1:-1], key=lambda stage: stage.pair_s, default=each[-1]),
        last=each[-1],
        send_s=min(sends_s),
        each=tuple(each),
        sends_s=sends_s,
        **more,
    )
