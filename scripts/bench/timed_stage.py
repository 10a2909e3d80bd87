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
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.gradients import CapturedGradients, Region
from megatron_2bw.runtime.links import ALL_LANES, Boundary, Links
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.calls import groups
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.timeline import Event
from megatron_2bw.schedule.validation.validate import validate

FORWARD_S, BACKWARD_S = 0.05, 0.1
"""How long a stage waits, in all benches."""
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
    """The stages of a rank, with one weight; synchronous schedules reduce and update when the pipeline is empty."""

    def __init__(self, schedule: Schedule, rank: int, forward_s: float, backward_s: float) -> None:
        self.boundary = Boundary(shape=(64, 1, 64), dtype=torch.float32, device=torch.device("cpu"))
        self._last, self._durations = schedule.stages - 1, (forward_s, backward_s)
        self._weight = torch.nn.Parameter(torch.ones(1))
        buffer = torch.zeros(1)
        self._weight.main_grad = buffer
        self._weight.register_post_accumulate_grad_hook(self._accumulate)
        self._delayed = any(schedule.delay)
        self.ends_s: list[float] = []
        """When the backward of each microbatch ended."""
        self._versions = WeightVersions([self._weight], max(schedule.weight_versions[rank], 2))
        self._captured = captured = CapturedGradients([Region(buffer, buffer)])
        members = groups(schedule)
        # Every rank makes all groups, in the same order.
        made = {ranks: dist.new_group(ranks) for ranks in sorted(set(members.values())) if len(ranks) > 1}
        replicas, ends, everyone = (made.get(members[kind, rank]) for kind in Reduction)
        links = {
            Reduction.GRADIENTS: lambda: replicas and dist.all_reduce(captured.kept[0], group=replicas),
            Reduction.EMBEDDING: lambda: dist.all_reduce(torch.zeros(1), group=ends),
            Reduction.NORM: lambda: dist.all_reduce(torch.cat([captured.kept[0] ** 2, torch.zeros(1)]), group=everyone),
        }
        self.pending = PendingUpdate(self._versions, captured, links)

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
        return output.mean() if action.stage == self._last else output

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        torch.autograd.backward(output, grad)
        self.ends_s.append(time.perf_counter())
        return None if received is None else received.grad

    def sent(self, output: torch.Tensor) -> None: ...

    def reduce_start(self, action: Action) -> None:
        self.pending.reduce_start(action)

    def reduce_wait(self, action: Action) -> None:
        self.pending.reduce_wait(action)

    def update(self, action: Action) -> None:
        if action.batch == self.pending.batch:
            with self.pending.apply(), torch.no_grad():
                self._weight -= 1e-6 * self._captured.kept[0]


class Arm(NamedTuple):
    """One of several ways to run the same schedule."""

    reductions: tuple[Reduction, ...] = tuple(Reduction)
    """What an update waits for."""
    recorded: bool = False
    """Whether the timeline is kept, as with ``--pipeline-trace``."""
    delayed_microbatches: int | None = None
    """Of 2bw; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to run: a schedule, its size and how long its stages take."""

    schedule: str
    stages: int
    microbatches: int
    options: tuple[tuple[str, int], ...] = ()
    """Of the schedule."""
    batches: int
    """Of a block; the pipeline drains after each."""
    forward_s: float
    backward_s: float
    arms: tuple[Arm, ...] = (Arm(),)
    """Blocks take turns."""
    blocks: int = 1


class Measured(NamedTuple):
    """By one rank."""

    ends_s: list[float]
    """When the last backward of each batch ended."""
    events: list[Event]
    """Of the recorded arms."""


def measure(run: Run) -> list[Measured]:
    """One process per stage."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (run, folder), nprocs=run.stages)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(run.stages)]


def _rank(rank: int, run: Run, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=run.stages)
    size = {"stages": run.stages, "microbatches": run.microbatches, **dict(run.options)}
    schedule = build(run.schedule, **size)
    stage = TimedStage(schedule, rank, run.forward_s, run.backward_s)
    ranks = list(range(run.stages))
    links = Links(groups={lane: dist.new_group(ranks) for lane in ALL_LANES}, ranks=ranks, device=stage.boundary.device)
    recorder = Recorder(stage.boundary.device)
    recorders = [recorder if arm.recorded else None for arm in run.arms]
    lowered = [
        lower(build(run.schedule, **size, delayed_microbatches=arm.delayed_microbatches), arm.reductions)
        for arm in run.arms
    ]
    for arm in lowered:
        validate(arm)
    executors = [Executor(arm, rank, stage, links, told) for arm, told in zip(lowered, recorders, strict=True)]
    dist.barrier()
    for block in range(run.blocks):
        turn = block % len(executors)
        stage.pending.recorder = recorders[turn]
        for batch in range(run.batches):
            executors[turn].run(block * run.batches + batch, left=run.batches - 1 - batch)
    measured = Measured(stage.ends_s[run.microbatches - 1 :: run.microbatches], recorder.events())
    torch.save(measured, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def block_periods_s(measured: list[Measured], run: Run) -> list[float]:
    """Median seconds per batch of each block, on the last stage, without the batches in which the pipeline fills."""
    ends_s = measured[-1].ends_s
    blocks = (ends_s[first : first + run.batches] for first in range(0, len(ends_s), run.batches))
    return [statistics.median(b - a for a, b in itertools.pairwise(block[FILLING:])) for block in blocks]


def steady_period_s(measured: list[Measured]) -> float:
    """Seconds per batch in the middle half of the run, on the last stage."""
    ends_s = measured[-1].ends_s
    first, last = len(ends_s) // 4, len(ends_s) - 1 - len(ends_s) // 4
    return (ends_s[last] - ends_s[first]) / (last - first)
