"""Megatron's interleaved 1F1B, for chunks that differ: the order, and the most that it keeps."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache

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
    sizes = {"ranks": ranks, "microbatches": min(microbatches, _GROUPS * ranks), "chunks": len(kept)}
    return max(sum(map(operator.mul, counts, kept)) for counts in _most_in_flight(rank, **sizes))


@lru_cache(maxsize=4096)
def _most_in_flight(rank: int, *, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Forwards in flight of each chunk, at the moments of which one has most, whatever each of them keeps.

    After the first forwards, one backward comes before every other one: the same number is in flight again.

    >>> sorted(_most_in_flight(0, ranks=2, microbatches=4, chunks=2))
    [(3, 2), (4, 1)]
    """
    now, moments, was_forward = [0] * chunks, set(), False
    for forward, chunk, _ in order(rank, ranks=ranks, microbatches=microbatches, chunks=chunks):
        if was_forward and not forward:
            moments.add(tuple(now))
        now[chunk] += 1 if forward else -1
        was_forward = forward
    return tuple(moments)
