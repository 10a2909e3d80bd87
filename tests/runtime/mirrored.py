"""Two pipelines in opposite directions through the same processes, and the loop that they must equal."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.gradients import CapturedGradients, whole_regions
from megatron_2bw.runtime.links import Boundary, Links
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.calls import groups
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.validate import validate
from tests.runtime.toy import RATE, ROWS, WIDTH, accumulate, data, layers

REDUCTIONS = (Reduction.GRADIENTS, Reduction.NORM)


class Size(NamedTuple):
    """What to run."""

    name: str
    stages: int
    microbatches: int
    options: tuple[tuple[str, int], ...] = ()
    batches: int = 6
    jitter_s: float = 0.0

    def schedule(self) -> Schedule:
        schedule = build(self.name, stages=self.stages, microbatches=self.microbatches, **dict(self.options))
        lowered = lower(schedule, REDUCTIONS)
        validate(lowered)
        return lowered


class Trained(NamedTuple):
    """What became of it."""

    losses: list[dict[int, float]]
    """Per batch, by microbatch."""
    weights: dict[int, list[torch.Tensor]]
    """Per stage; of all ranks that have it, once."""
    in_flight: list[int]
    """Per rank: forwards without their backward, at most."""


def expected(size: Size) -> Trained:
    """Synchronous training in one process; gradients of each direction are summed on their own, as replicas do."""
    stages = [layers(stage) for stage in range(size.stages)]
    model = torch.nn.Sequential(*stages)
    losses: list[dict[int, float]] = []
    for batch in range(size.batches):
        losses.append({})
        directions = []
        for first in (0, 1):
            for microbatch in range(first, size.microbatches, 2):
                loss = model(data(batch, microbatch)).pow(2).mean()
                losses[-1][microbatch] = loss.item()
                loss.backward()
            directions.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        with torch.no_grad():
            for parameter, down, up in zip(model.parameters(), *directions, strict=True):
                parameter -= RATE * (down + up)
    weights = {stage: [p.detach() for p in module.parameters()] for stage, module in enumerate(stages)}
    return Trained(losses, weights, [])


class MirroredStage:
    """All stages of one rank, as the executor wants them; ``jitter_s`` adds random waits."""

    def __init__(self, schedule: Schedule, rank: int, jitter_s: float) -> None:
        self.boundary = Boundary(shape=(ROWS, WIDTH), dtype=torch.float32, device=torch.device("cpu"))
        self.models = {stage: layers(stage) for stage in sorted(schedule.stages_of(rank))}
        self.losses: list[dict[int, float]] = []
        self.in_flight = self.most_in_flight = 0
        self._last = schedule.stages - 1
        self._jitter_s, self._random = jitter_s, random.Random(rank)
        self._parameters = [parameter for model in self.models.values() for parameter in model.parameters()]
        buffer = torch.zeros(sum(parameter.numel() for parameter in self._parameters))
        grads = buffer.split([parameter.numel() for parameter in self._parameters])
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.main_grad = grad.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(accumulate)
        members = groups(schedule)
        made = {ranks: dist.new_group(ranks) for ranks in sorted(set(members.values()))}
        of_stage, everyone = made[members[Reduction.GRADIENTS, rank]], made[members[Reduction.NORM, rank]]
        captured = CapturedGradients(whole_regions([buffer]))
        links = {
            Reduction.GRADIENTS: lambda: dist.all_reduce(captured.kept[0], group=of_stage),
            Reduction.NORM: lambda: dist.all_reduce(captured.kept[0].norm() ** 2, group=everyone),
        }
        self._versions = WeightVersions(self._parameters, slots=1)
        self._pending = PendingUpdate(self._versions, captured, links)

    def use_weights(self, version: int) -> None:
        time.sleep(self._jitter_s * self._random.random())
        self._versions.use(version)

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        output = self.models[action.stage](data(action.batch, action.microbatch) if received is None else received)
        if action.stage < self._last:
            return output
        loss = output.pow(2).mean()
        while len(self.losses) <= action.batch:
            self.losses.append({})
        self.losses[action.batch][action.microbatch] = loss.item()
        return loss

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        self.in_flight -= 1
        torch.autograd.backward(output, grad)
        return None if received is None else received.grad

    def sent(self, output: torch.Tensor) -> None:
        time.sleep(self._jitter_s * self._random.random())

    def reduce_start(self, action: Action) -> None:
        self._pending.reduce_start(action)

    def reduce_wait(self, action: Action) -> None:
        self._pending.reduce_wait(action)

    def update(self, action: Action) -> None:
        """All stages at once: they end together."""
        if action.batch == self._pending.batch:
            with self._pending.apply(), torch.no_grad():
                for parameter in self._parameters:
                    parameter -= RATE * self._pending.captured.view_of(parameter.main_grad)


def train(sizes: list[Size]) -> list[Trained]:
    """The same, one size after the other, with one process per rank; all sizes have as many stages.

    Raises:
        AssertionError: two ranks differ in the weights of a stage that both have.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (sizes, folder), nprocs=sizes[0].stages)
        of_ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(sizes[0].stages)]
    return [_together(size, results) for size, results in zip(sizes, zip(*of_ranks, strict=True), strict=True)]


def _together(size: Size, results: tuple[dict, ...]) -> Trained:
    weights: dict[int, list[torch.Tensor]] = {}
    for result in results:
        for stage, mine in result["weights"].items():
            assert all(map(torch.equal, mine, weights.setdefault(stage, mine)))
    ends = [result["losses"] for result in results if result["losses"]]
    losses = [{i: loss for end in ends for i, loss in end[batch].items()} for batch in range(size.batches)]
    return Trained(losses, weights, [result["in_flight"] for result in results])


def _rank(rank: int, sizes: list[Size], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=sizes[0].stages)
    torch.save([_trained(rank, size) for size in sizes], Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _trained(rank: int, size: Size) -> dict:
    schedule = size.schedule()
    stage = MirroredStage(schedule, rank, size.jitter_s)
    ranks = list(range(size.stages))
    links = Links(forward_group=dist.new_group(ranks), backward_group=dist.new_group(ranks), ranks=ranks)
    executor = Executor(schedule, rank, stage, links)
    for batch in range(size.batches):
        executor.run(batch, left=size.batches - 1 - batch)
    weights = {number: [p.detach() for p in model.parameters()] for number, model in stage.models.items()}
    return {"losses": stage.losses, "weights": weights, "in_flight": stage.most_in_flight}
