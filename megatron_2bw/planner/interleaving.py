"""Megatron's interleaved 1F1B step by step, for chunks that differ: the order of a rank, and what is in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_2bw.schedule.action import Action
    from megatron_2bw.schedule.program import Schedule

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


def programs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Those of the simulator; chunk c of rank r is stage ``c*ranks + r``."""
    from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update

    def of(rank: int) -> Iterator[Action]:
        for is_forward, chunk, microbatch in order(rank, ranks=ranks, microbatches=microbatches, chunks=chunks):
            yield (forward if is_forward else backward)(chunk * ranks + rank, microbatch)
        for chunk in range(chunks):
            yield update(chunk * ranks + rank)

    stages = ranks * chunks
    return Schedule(
        name="interleaved",
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(of(rank) for rank in range(ranks)),
        delay=(0,) * stages,
        weight_versions=(1,) * ranks,
        in_flight=(chunks * microbatches,) * ranks,
        per_boundary=microbatches,
    )
