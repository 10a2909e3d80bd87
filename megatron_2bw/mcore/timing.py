"""Times what the ranks of a machine repeat, while all of them are busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

WARM, LEAST, ENOUGH_S = 2, 5, 1.0
"""Repetitions before the clock counts, counted at least, and seconds to fill with them."""
TRIMMED = 10
"""One in so many repetitions is left out at either end, by the clock."""


class Took(NamedTuple):
    """Seconds by the clock, and of processors: of all threads of this process."""

    wall_s: float
    processor_s: float


def timed[Result](run: Callable[[], Result]) -> tuple[Took, Result]:
    """How long ``run`` took, and what it returned; a GPU finishes what was launched before, and then this."""
    _synchronize()
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    result = run()
    _synchronize()
    return Took(time.perf_counter() - start_s, time.process_time() - start_processor_s), result


@cache
def processors() -> int:
    """Those of this node that its ranks may run on, all together; 0 where each rank has a GPU.

    A limit on processors' time, which containers have beside one on processors, is not known here.
    """
    if torch.cuda.is_available():
        return 0
    allowed: list[set[int]] = [set()] * dist.get_world_size()
    dist.all_gather_object(allowed, os.sched_getaffinity(0))
    return len(set().union(*allowed))


def repeated(once: Callable[[], tuple[Took, ...]], *, waits: bool) -> tuple[float, ...]:
    """Mean seconds of what ``once`` times, over repetitions and ranks.

    All ranks repeat it equally often, and those of other pipelines do not wait for each other. Where ranks share
    processors, the clock says which of them happened to run: over seconds, one rank has been seen to get three times as
    much as another. What counts there is the processors' time, and that each rank has its share of them; when
    tensor-parallel ranks wait for each other, others run.

    Args:
        once: what to repeat, in parts.
        waits: whether all ranks wait for each other in it, so that nobody runs meanwhile: the clock counts.
    """
    for _ in range(WARM):
        once()
    device = torch.cuda.current_device()
    once_s = sum(took.wall_s for took in once())
    count = torch.tensor(max(LEAST, round(ENOUGH_S / max(once_s, 1e-6))), device=device)
    dist.broadcast(count, src=0)
    dist.barrier()
    columns = zip(*(once() for _ in range(int(count))), strict=True)
    ranks = dist.get_world_size()
    if waits or not 0 < processors() < ranks:
        means = [_trimmed_mean(took.wall_s for took in column) for column in columns]
    else:
        means = [ranks / processors() * fmean(took.processor_s for took in column) for column in columns]
    sums = torch.tensor(means, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return tuple((sums / ranks).tolist())


def _trimmed_mean(values: Iterable[float]) -> float:
    ordered = sorted(values)
    ends = len(ordered) // TRIMMED
    return fmean(ordered[ends : len(ordered) - ends])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
