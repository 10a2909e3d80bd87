"""How busy the pipeline is, for Megatron's log line, Tensorboard and Weights & Biases."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_2bw.mcore.groups import create_host_group
from megatron_2bw.runtime.background import Background
from megatron_2bw.runtime.errors import needs_peers, waiting_in
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import ActionType, Reduction
from megatron_2bw.schedule.pictures.measured import batches_of, spent_s, work_of
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.timeline import Event

logger = logging.getLogger(__name__)
_EVENTS, _MORE_EVENTS = 8, 64
"""Per microbatch and beside them, at most, in the two calls that a whole batch is in: F, B and what each receives;
waits for reductions, updates, and F and B of the batches before and after."""
_BATCHES = 4
"""Whose reductions are looked at."""
BUBBLE, IMBALANCE, SLACK = "pipeline bubble", "stage imbalance", "update slack (s)"


class Busy(NamedTuple):
    """Of one stage, during one batch; seconds."""

    work_s: float
    period_s: float
    slack_s: float
    """From the end of the reductions to the moment an update asks for them; 0 where it has to wait."""


class PipelineMonitor:
    """Gathers, beside the next batch, what every stage did during the last one.

    No stage waits: a thread of its own adds the stages up, and what is read is the newest batch that is known.

    Args:
        recorder: of this rank's actions.
        timeout: of a gathering. Collective over all ranks.
    """

    def __init__(self, recorder: Recorder, timeout: timedelta) -> None:
        self._recorder = recorder
        self._group = create_host_group(parallel_state.get_pipeline_model_parallel_group(), timeout, "2bw monitor")
        self._background = Background(torch.device("cpu"), "2bw monitor", timeout.total_seconds())
        self._gathering: deque[Future] = deque()
        self._schedule: Schedule | None = None
        self._newest: dict[str, float] = {}
        self.interrupted = False
        """An evaluation or a save came after the last batch: how long the next one takes tells nothing."""

    def after(self, schedule: Schedule) -> None:
        """A call has ended.

        Raises:
            Exception: what went wrong when the stages of an earlier one were added up.
        """
        while self._gathering and self._gathering[0].done():
            self._wait()
        take = self._recorder.newest(_EVENTS * schedule.microbatches + _MORE_EVENTS, len(Reduction) * _BATCHES)
        # The first batch after a change begins in one that ran in another order.
        interrupted, self.interrupted = self.interrupted or schedule is not self._schedule, False
        self._schedule = schedule
        gathering = self._background.submit(lambda: self._gather(take, schedule, interrupted=interrupted))
        self._gathering.append(gathering)

    def close(self) -> None:
        """Wait for what is under way, so that no rank ends in the middle of it."""
        while self._gathering:
            self._wait()
        self.forget()

    def _wait(self) -> None:
        with waiting_in("gathering how busy the stages were"):
            self._background.result(self._gathering.popleft())

    def forget(self) -> None:
        """End the thread, whatever it gathers, without waiting for it."""
        self._background.close()

    def add_to(self, losses: dict[str, torch.Tensor], totals: dict[str, Any], advanced: int) -> None:
        """Put the newest numbers among the losses of an iteration, which Megatron averages between log lines.

        Args:
            losses: of this iteration.
            totals: since the last log line.
            advanced: how many iterations these are the sums of.
        """
        for name, value in self._newest.items():
            losses[name] = torch.full((), value, device=torch.cuda.current_device())  # No copy that the host waits for.
            if name not in totals:  # Iterations went by in which nothing was known yet.
                totals[name] = advanced * losses[name].reshape(1)

    def _gather(
        self, take: Callable[[], tuple[list[Event], list[Event]]], schedule: Schedule, *, interrupted: bool
    ) -> None:
        mine = torch.zeros(3, dtype=torch.float64)
        try:
            mine += torch.tensor(busy(*take(), schedule) or Busy(0.0, 0.0, 0.0), dtype=torch.float64)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # This rank ends, and its peers say so.
            raise
        except RuntimeError as error:  # All stages have to meet all the same.
            logger.warning("--log-pipeline: this stage does not know what it did: %s", error)
        stages = [torch.empty_like(mine) for _ in range(schedule.stages)]
        with needs_peers("gathering their times"):
            dist.all_gather(stages, mine, group=self._group)
        if not interrupted and all(stage[0] > 0 for stage in stages):
            self._newest = numbers([Busy(*stage.tolist()) for stage in stages], delayed=any(schedule.delay))


def busy(events: list[Event], reductions: list[Event], schedule: Schedule) -> Busy | None:
    """During the last batch of ``events``; None if they do not hold a whole one."""
    *_, batch = [None, *batches_of(events, schedule.microbatches - 1)]
    if batch is None:
        return None
    slack_s = min(_slacks_s(batch.events, reductions, schedule), default=0.0)
    return Busy(spent_s(batch.events, work_of(schedule)), batch.period_s, slack_s)


def numbers(stages: list[Busy], *, delayed: bool) -> dict[str, float]:
    """For the log.

    >>> numbers([Busy(3.0, 4.0, 0.5), Busy(2.0, 4.0, 0.25)], delayed=True)
    {'pipeline bubble': 0.375, 'stage imbalance': 0.5, 'update slack (s)': 0.25}
    """
    work_s = [stage.work_s for stage in stages]
    found = {
        BUBBLE: 1 - sum(stage.work_s / stage.period_s for stage in stages) / len(stages),
        IMBALANCE: max(work_s) / min(work_s) - 1,
    }
    return found | ({SLACK: min(stage.slack_s for stage in stages)} if delayed else {})


def _slacks_s(events: list[Event], reductions: list[Event], schedule: Schedule) -> Iterator[float]:
    last = schedule.reductions[-1]
    complete_s = {e.action.batch: e.end_s for e in reductions if e.action.reduction is last}
    for event in events:
        if event.action.type is ActionType.REDUCE_WAIT and event.action.batch in complete_s:
            yield max(event.start_s - complete_s[event.action.batch], 0.0)
