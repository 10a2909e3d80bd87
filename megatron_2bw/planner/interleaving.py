"""Megatron's interleaved 1F1B step by step, for chunks that differ: the order, what it keeps and how long it takes."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

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


def followed_s(pipeline: Pipeline) -> float:
    """Seconds of a batch without what follows its last backward, from action to action.

    An action begins when the one before it on its rank has ended and what it needs is there; what a rank sends forwards
    or backwards goes in order.
    """
    p, count = pipeline, len(pipeline.each)
    sizes = {"ranks": p.stages, "microbatches": p.microbatches, "chunks": count // p.stages}
    forwards_s, backwards_s = {i: deque() for i in range(1, count)}, {i: deque() for i in range(count - 1)}
    # When what a stage needs arrives, in the order of microbatches. The first forward and backward need nothing.

    def step(forward: bool, stage: int) -> _Step:
        target, arrivals_s = (stage + 1, forwards_s) if forward else (stage - 1, backwards_s)
        link_s = p.links_s[min(stage, target)] if target in arrivals_s else 0.0
        return _Step(arrivals_s.get(stage), arrivals_s.get(target), p.each[stage][not forward], link_s, forward)

    steps = {key: step(*key) for key in itertools.product((True, False), range(count))}
    waiting = [
        deque(steps[forward, chunk * p.stages + rank] for forward, chunk, _ in order(rank, **sizes))
        for rank in range(p.stages)
    ]
    ends_s, sent_s = [0.0] * p.stages, [[0.0, 0.0] for _ in range(p.stages)]
    while any(waiting):
        for rank, actions in enumerate(waiting):
            end_s, of_rank_s = ends_s[rank], sent_s[rank]
            while actions:
                arrived_s, arriving_s, takes_s, link_s, forward = actions[0]
                if arrived_s is not None:
                    if not arrived_s:
                        break
                    end_s = max(end_s, arrived_s.popleft())
                end_s += takes_s
                if arriving_s is not None:
                    of_rank_s[forward] = max(end_s, of_rank_s[forward]) + link_s
                    arriving_s.append(of_rank_s[forward])
                actions.popleft()
            ends_s[rank] = end_s
    return max(ends_s)


class _Step(NamedTuple):
    """A forward or backward of one stage, of any microbatch."""

    arrived_s: deque[float] | None
    """What it needs, of its next microbatches."""
    arriving_s: deque[float] | None
    """What the next one on its way needs."""
    takes_s: float
    link_s: float
    forward: bool
