"""A pipeline whose stages wait instead of computing: what the executor itself costs.

Everything else is real: processes, gloo transfers, captured gradients, the background chain of
reductions, two weight versions and delayed updates, on a stage of a few weights.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.gradients import CapturedGradients, whole_regions
from megatron_2bw.runtime.links import Boundary, Links
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.timeline import Event
from megatron_2bw.schedule.validate import validate

FILLING = 2
"""Batches at the start of a block that are not counted."""


class _Wait(torch.autograd.Function):
    """Identity times a weight that takes ``forward_s`` there and ``backward_s`` back."""

    @staticmethod
    def forward(ctx, value, weight, forward_s, backward_s):
        ctx.save_for_backward(value, weight)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return value * weight

    @staticmethod
    def backward(ctx, grad):
        value, weight = ctx.saved_tensors
        time.sleep(ctx.backward_s)
        return grad * weight, (grad * value).sum().reshape(1), None, None


class TimedStage:
    """One stage; synchronous schedules reduce and update when the pipeline is empty."""

    def __init__(self, rank: int, stages: int, forward_s: float, backward_s: float, *, delayed: bool) -> None:
        self.boundary = Boundary(shape=(64, 1, 64), dtype=torch.float32, device=torch.device("cpu"))
        self._stages, self._rank, self._durations = stages, rank, (forward_s, backward_s)
        self._weight = torch.nn.Parameter(torch.ones(1))
        buffer = torch.zeros(1)
        self._weight.main_grad = buffer
        self._weight.register_post_accumulate_grad_hook(self._accumulate)
        self._delayed = delayed
        self._versions = WeightVersions([self._weight])
        self._captured = captured = CapturedGradients(whole_regions([buffer]))
        ends = dist.new_group([0, stages - 1])
        everyone = dist.new_group(list(range(stages)))
        links = {
            Reduction.GRADIENTS: lambda: None,
            Reduction.EMBEDDING: lambda: dist.all_reduce(torch.zeros(1), group=ends),
            Reduction.NORM: lambda: dist.all_reduce(torch.cat([captured.kept[0] ** 2, torch.zeros(1)]), group=everyone),
        }
        self._pending = PendingUpdate(self._versions, captured, links)

    def _accumulate(self, weight: torch.nn.Parameter) -> None:
        weight.main_grad += weight.grad
        weight.grad = None

    def use_weights(self, version: int) -> None:
        if self._delayed:  # A flushed pipeline has one version, the newest.
            self._versions.use(version)
        else:
            self._versions.use_newest()

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        value = torch.ones(self.boundary.shape) if received is None else received
        output = _Wait.apply(value, self._weight, *self._durations)
        return output.mean() if self._rank == self._stages - 1 else output

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        torch.autograd.backward(output, grad)
        return None if received is None else received.grad

    def sent(self, output: torch.Tensor) -> None: ...

    def reduce_start(self, action: Action) -> None:
        self._pending.reduce_start(action.reduction, action.batch)

    def reduce_wait(self, action: Action) -> None:
        self._pending.reduce_wait(action.reduction, action.batch)

    def update(self, action: Action) -> None:
        if action.batch == self._pending.batch:
            with self._pending.apply(), torch.no_grad():
                self._weight -= 1e-6 * self._captured.kept[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to run: a schedule, its size and how long its stages take."""

    schedule: str
    stages: int
    microbatches: int
    batches: int
    """Of a block; the pipeline drains after each."""
    forward_s: float
    backward_s: float
    arms: tuple[tuple[Reduction, ...], ...] = (tuple(Reduction),)
    """What updates wait for: blocks take turns."""
    blocks: int = 1


def measure(run: Run) -> list[list[Event]]:
    """One process per stage; per rank, when each action ran."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (run, folder), nprocs=run.stages)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(run.stages)]


def _rank(rank: int, run: Run, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=run.stages)
    schedule = build(run.schedule, stages=run.stages, microbatches=run.microbatches)
    stage = TimedStage(rank, run.stages, run.forward_s, run.backward_s, delayed=any(schedule.delay))
    ranks = list(range(run.stages))
    links = Links(forward_group=dist.new_group(ranks), backward_group=dist.new_group(ranks), ranks=ranks)
    recorder = Recorder(stage.boundary.device)
    arms = [lower(schedule, reductions) for reductions in run.arms]
    for arm in arms:
        validate(arm)
    executors = [Executor(arm, rank, stage, links, recorder) for arm in arms]
    dist.barrier()
    for block in range(run.blocks):
        for batch in range(run.batches):
            last = batch == run.batches - 1
            executors[block % len(executors)].run(block * run.batches + batch, last=last)
    torch.save(recorder.events(), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def block_periods_s(events: list[list[Event]], run: Run) -> list[float]:
    """Median seconds per batch of each block, on the last stage, without the batches in which the pipeline fills."""
    ends = _batch_ends_s(events, run.microbatches)
    blocks = (ends[first : first + run.batches] for first in range(0, len(ends), run.batches))
    return [statistics.median(b - a for a, b in itertools.pairwise(block[FILLING:])) for block in blocks]


def steady_period_s(events: list[list[Event]], microbatches: int) -> float:
    """Seconds per batch in the middle half of the run, on the last stage."""
    ends = _batch_ends_s(events, microbatches)
    first, last = len(ends) // 4, len(ends) - 1 - len(ends) // 4
    return (ends[last] - ends[first]) / (last - first)


def _batch_ends_s(events: list[list[Event]], microbatches: int) -> list[float]:
    """When the last stage was through with each batch."""
    return [e.end_s for e in events[-1] if e.action.type == "B" and e.action.microbatch == microbatches - 1]
