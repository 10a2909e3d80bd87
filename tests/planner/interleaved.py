"""Megatron's interleaved 1F1B as Programs, for the simulator alone."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Chunk c of rank r is stage ``c*ranks + r``; the order is that of ``get_schedule_table`` and
    ``get_pp_rank_microbatches`` in ``megatron/core/pipeline_parallel/schedules.py``.
    """
    stages = ranks * chunks
    return Schedule(
        name="interleaved",
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(_call(rank, ranks, microbatches, chunks) for rank in range(ranks)),
        delay=(0,) * stages,
        weight_versions=(1,) * ranks,
        in_flight=(chunks * microbatches,) * ranks,
        per_boundary=microbatches,
    )


def _call(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    table = [
        (group * ranks + index, chunk)
        for group in range(microbatches // ranks)
        for chunk in range(chunks)
        for index in range(ranks)
    ]
    forwards = [forward(chunk * ranks + rank, index) for index, chunk in table]
    backwards = [backward((chunks - 1 - chunk) * ranks + rank, index) for index, chunk in table]
    warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(forwards))
    yield from forwards[:warmup]
    for index, action in enumerate(backwards):
        if warmup + index < len(forwards):
            yield forwards[warmup + index]
        yield action
    for chunk in range(chunks):
        yield update(chunk * ranks + rank)
