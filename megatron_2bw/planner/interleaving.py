"""Megatron's interleaved 1F1B step by step, for chunks that differ: the order, what it keeps and how long it takes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from megatron_2bw.planner.periods import Pipeline

_GROUPS = 4
"""Of as many microbatches as ranks: what a rank has in flight rises during the first two, and then repeats."""


def order(rank: int, *, ranks: int, microbatches: int, chunks: int) -> Iterator[tuple[bool, int, int]]:
    """(forward, chunk, microbatch) of all that ``rank`` runs; ``ranks`` divides ``microbatches``.

    ``get_schedule_table`` and ``get_pp_rank_microbatches`` in ``megatron/core/pipeline_parallel/schedules.py``.

    >>> steps = order(1, ranks=2, microbatches=2, chunks=2)
    >>> " ".join(f"{'BF'[forward]}{chunk}.{microbatch}" for forward, chunk, microbatch in steps)
    'F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1'
    """
    table = [
        (chunk, first + index)
        for first in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for index in range(ranks)
    ]
    warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(table))
    for chunk, microbatch in table[:warmup]:
        yield True, chunk, microbatch
    for index, (chunk, microbatch) in enumerate(table):
        if warmup + index < len(table):
            yield True, *table[warmup + index]
        yield False, chunks - 1 - chunk, microbatch


def most_kept(rank: int, kept: Sequence[float], *, ranks: int, microbatches: int) -> float:
    """The most of what forwards keep until their backward has run, all chunks of ``rank`` together.

    Args:
        rank: of ``ranks``.
        kept: by one forward of each chunk.
        microbatches: of a batch.
    """
    most = now = 0.0
    for forward, chunk, _ in order(
        rank, ranks=ranks, microbatches=min(microbatches, _GROUPS * ranks), chunks=len(kept)
    ):
        now += kept[chunk] if forward else -kept[chunk]
        most = max(most, now)
    return most


def followed_s(pipeline: Pipeline) -> float:
    """Seconds of a batch without what follows its last backward, from action to action.

    An action begins when the one before it on its rank has ended and what it needs is there; what a rank sends forwards
    or backwards goes in order.
    """
    p, count = pipeline, len(pipeline.each)
    sizes = {"ranks": p.stages, "microbatches": p.microbatches, "chunks": count // p.stages}
    waiting = [deque(order(rank, **sizes)) for rank in range(p.stages)]
    ends_s, arrivals_s = [0.0] * p.stages, {}
    sent_s = dict.fromkeys(itertools.product(range(p.stages), (True, False)), 0.0)
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions:
                forward, chunk, microbatch = actions[0]
                stage = chunk * p.stages + rank
                source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                needs = forward, stage, microbatch
                if 0 <= source < count and needs not in arrivals_s:
                    break
                actions.popleft()
                ends_s[rank] = max(ends_s[rank], arrivals_s.pop(needs, 0.0)) + p.each[stage][not forward]
                if 0 <= target < count:
                    begin_s = max(ends_s[rank], sent_s[rank, forward])
                    sent_s[rank, forward] = begin_s + p.links_s[min(stage, target)]
                    arrivals_s[forward, target, microbatch] = sent_s[rank, forward]
    return max(ends_s)
