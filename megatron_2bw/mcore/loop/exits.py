"""Early exits that all ranks agree on without waiting for each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import training

from megatron_2bw.mcore.groups import create_host_group
from megatron_2bw.runtime.background import Background
from megatron_2bw.runtime.errors import needs_peers, waiting_in


class ExitRequests:
    """What every rank wants after a batch, gathered in the background and known after the next one.

    Megatron asks all ranks after every batch whether one received a signal or ran out of time, which
    would stop the pipeline. Here the answer is one batch old, or of this batch where the pipeline has
    drained: the same on all ranks, and they leave after the same batch.

    Args:
        timeout: how long to wait for a rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group = create_host_group(dist.group.WORLD, timeout, "2bw exits")
        self._background = Background(torch.device("cpu"), "2bw exits", timeout.total_seconds())
        self._before: dict[str, Future] = {}

    def gather(self, what: str, wish: bool, *, drained: bool = False) -> list[int]:
        """What all ranks wished after the batch before this one; ``wish`` is this rank's after this one.

        Where the pipeline has drained, the same for all ranks, nothing stops: that of this one as well.
        """
        wishes = self._known(what) if what in self._before else [0]
        self._before[what] = self._background.submit(lambda: self._gathered(wish))
        return [*wishes, *self._known(what)] if drained else wishes

    def close(self) -> None:
        """Wait for what is under way, so that no rank ends in the middle of it."""
        for what in self._before:
            self._known(what)
        self.forget()

    def forget(self) -> None:
        """End the thread, whatever it gathers, without waiting for it."""
        self._background.close()

    @contextmanager
    def duration_checked_only_at_the_end(self, args: Any, *, drained: bool = False) -> Iterator[None]:
        """Inside, ``args.exit_duration_in_mins`` is set only if the time was up after the batch before.

        Megatron's own check, in which all ranks meet, then ends the run.
        """
        limit = args.exit_duration_in_mins
        if not limit:
            yield
            return
        is_up = (time.time() - training._TRAIN_START_TIME) / 60.0 > limit
        if not any(self.gather("duration", is_up, drained=drained)):
            args.exit_duration_in_mins = None
        try:
            yield
        finally:
            args.exit_duration_in_mins = limit

    def _known(self, what: str) -> list[int]:
        with waiting_in(f"asking all ranks whether to end training early ({what})"):
            return self._background.result(self._before[what])

    def _gathered(self, wish: bool) -> list[int]:
        wishes = [torch.zeros(1, dtype=torch.int32) for _ in range(self._group.size())]
        with needs_peers("gathering their answers"):
            dist.all_gather(wishes, torch.tensor([wish], dtype=torch.int32), group=self._group)
        return [int(value) for value in wishes]
