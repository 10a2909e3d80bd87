"""Ranks that are killed, or slow, while they compute or save."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import worker
from .case import Case
from .faults import before, in_call, kill_process


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL for one rank."""

    rank: int
    place: str
    """forward: before the forward of that number; save: with half of the file of that number written."""
    call: int
    """Counted from 0 on that rank."""


def killed(case: Case, rank: int, port: int, folder: Path, *, kill: Kill) -> None:
    """Run ``case``; one rank does not survive."""
    _offer_more_samples()
    if rank == kill.rank:
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        from megatron_2bw.mcore.stages.stage import MegatronStage

        strike = in_call(kill.call, kill_process)
        if kill.place == "forward":
            MegatronStage.forward = before(MegatronStage.forward, strike)
        else:
            torch.save = _half(torch.save, lambda _, path, **__: path, strike)
            write = FileSystemWriterAsync.write_preloaded_data
            path_of = lambda *_, write_bucket, **__: write_bucket[0]  # noqa: E731
            FileSystemWriterAsync.write_preloaded_data = staticmethod(_half(write, path_of, strike))
    worker.main(case, rank, port, folder)


def slow_to_write(case: Case, rank: int, port: int, folder: Path, *, seconds: float) -> None:
    """Run ``case``; a torch_dist checkpoint is written so much later than it is taken."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data
    FileSystemWriterAsync.write_preloaded_data = staticmethod(before(write, lambda: time.sleep(seconds)))
    worker.main(case, rank, port, folder)


def _offer_more_samples() -> None:
    """Than the run needs, as data sets do: a run that has come to its end can be started again."""
    from . import model

    exact = model.training_samples
    model.training_samples = lambda kind, count: exact(kind, count + 1)


def _half(write: Callable[..., Any], path_of: Callable[..., Any], strike: Callable[[], None]) -> Callable[..., Any]:
    """``write``; the file that would be complete with the strike is cut in half before it."""

    @functools.wraps(write)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        result = write(*args, **keywords)
        path = path_of(*args, **keywords)
        if isinstance(path, str | os.PathLike):  # Megatron pickles into memory, too.
            whole = Path(path).read_bytes()
            os.truncate(path, len(whole) // 2)
            strike()
            Path(path).write_bytes(whole)
        return result

    return wrapper
