"""A small pipeline of two-layer stages, one way or both, and the loop that it must equal."""

from __future__ import annotations

import functools
import os
import random
import tempfile
import time
import unittest.mock
from dataclasses import replace
from itertools import starmap
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.gradients import CapturedGradients, Region
from megatron_2bw.runtime.links import ALL_LANES, Boundary, Links
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.calls import groups
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import BIDIRECTIONAL, build
from megatron_2bw.schedule.validation.validate import validate

WIDTH, ROWS, RATE = 5, 3, 0.1
REDUCTIONS = (Reduction.GRADIENTS, Reduction.NORM)


def layers(stage: int) -> torch.nn.Module:
    """Two layers whose backward reads the weight in both of autograd's ways (saved view, attribute)."""
    generator = torch.Generator().manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Tanh())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def data(batch: int, microbatch: int) -> torch.Tensor:
    """Input of one microbatch, (ROWS, WIDTH)."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * batch + microbatch))


class Size(NamedTuple):
    """What to run."""

    name: str
    stages: int
    microbatches: int
    options: tuple[tuple[str, int], ...] = ()
    batches: int = 12
    drains: tuple[int, ...] = ()
    """Batches after which the pipeline drains, beside the last one."""
    jitter_s: float = 0.0
    late_receives: bool = False

    def schedule(self) -> Schedule:
        schedule = build(self.name, stages=self.stages, microbatches=self.microbatches, **dict(self.options))
        lowered = replace(lower(schedule, REDUCTIONS), late_receives=self.late_receives)
        validate(lowered)
        return lowered


class Trained(NamedTuple):
    """What became of it."""

    losses: dict[tuple[int, int], float]
    """By batch and microbatch."""
    weights: dict[int, list[torch.Tensor]]
    """Per stage; of all ranks that have it, once."""
    in_flight: list[int]
    """Per rank: forwards without their backward, at most."""


def expected(size: Size) -> Trained:
    """Training with the delay of each stage in one process.

    Gradients of each direction are summed on their own, as replicas do.
    """
    schedule, stages = size.schedule(), [layers(stage) for stage in range(size.stages)]
    model, directions = torch.nn.Sequential(*stages), 2 if size.name in BIDIRECTIONAL else 1
    parameters = list(model.parameters())
    delays = [delay for stage, delay in zip(stages, schedule.delay, strict=True) for _ in stage.parameters()]
    versions = [[parameter.detach().clone() for parameter in parameters]]
    losses: dict[tuple[int, int], float] = {}
    for batch in range(size.batches):
        older = [versions[max(batch - delay, 0)][i] for i, delay in enumerate(delays)]
        sums = []
        for first in range(directions):
            for microbatch in range(first, size.microbatches, directions):
                is_delayed = microbatch < (schedule.delayed_microbatches or size.microbatches)
                _load(parameters, older if is_delayed else versions[batch])
                loss = model(data(batch, microbatch)).pow(2).mean()
                losses[batch, microbatch] = loss.item()
                loss.backward()
            sums.append([parameter.grad for parameter in parameters])
            model.zero_grad()
        gradients = [sum(more, gradient) for gradient, *more in zip(*sums, strict=True)]
        versions.append([newest - RATE * g for newest, g in zip(versions[batch], gradients, strict=True)])
    _load(parameters, versions[-1])
    weights = {stage: [p.detach() for p in module.parameters()] for stage, module in enumerate(stages)}
    return Trained(losses, weights, list(schedule.in_flight))


def _load(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.clone()


class ToyStage:
    """All stages of one rank, as the executor wants them; ``jitter_s`` adds random waits around every action."""

    def __init__(self, schedule: Schedule, rank: int, jitter_s: float) -> None:
        self.boundary = Boundary(shape=(ROWS, WIDTH), dtype=torch.float32, device=torch.device("cpu"))
        self.models = {stage: layers(stage) for stage in sorted(schedule.stages_of(rank))}
        self.losses: dict[tuple[int, int], float] = {}
        """By batch and microbatch."""
        self.in_flight = self.most_in_flight = 0
        self._last = schedule.stages - 1
        self._jitter_s, self._random = jitter_s, random.Random(rank)
        self._parameters = [parameter for model in self.models.values() for parameter in model.parameters()]
        buffer = torch.zeros(sum(parameter.numel() for parameter in self._parameters))
        grads = buffer.split([parameter.numel() for parameter in self._parameters])
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.main_grad = grad.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(_accumulate)
        members = groups(schedule)
        made = {ranks: dist.new_group(ranks) for ranks in sorted(set(members.values()))}
        of_stage, everyone = made[members[Reduction.GRADIENTS, rank]], made[members[Reduction.NORM, rank]]
        self.versions = WeightVersions(self._parameters, slots=schedule.weight_versions[rank])
        captured = CapturedGradients([Region(buffer, buffer)])

        def sum_gradients() -> None:
            self._wait()
            dist.all_reduce(captured.kept[0], group=of_stage)

        links = {
            Reduction.GRADIENTS: sum_gradients,
            Reduction.NORM: lambda: dist.all_reduce(captured.kept[0].norm() ** 2, group=everyone),
        }
        self.pending = PendingUpdate(self.versions, captured, links)

    def weights(self) -> dict[int, list[torch.Tensor]]:
        """By stage."""
        return {stage: [p.detach() for p in model.parameters()] for stage, model in self.models.items()}

    def _wait(self) -> None:
        time.sleep(self._jitter_s * self._random.random())

    def use_weights(self, version: int) -> None:
        self._wait()
        self.versions.use(version)

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        output = self.models[action.stage](data(action.batch, action.microbatch) if received is None else received)
        if action.stage < self._last:
            return output
        loss = output.pow(2).mean()
        self.losses[action.batch, action.microbatch] = loss.item()
        return loss

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        self.in_flight -= 1
        torch.autograd.backward(output, grad)
        return None if received is None else received.grad

    def sent(self, output: torch.Tensor) -> None:
        self._wait()

    def reduce_start(self, action: Action) -> None:
        self.pending.reduce_start(action)

    def reduce_wait(self, action: Action) -> None:
        self.pending.reduce_wait(action)

    def update(self, action: Action) -> None:
        """All stages at once: they end together."""
        if action.batch == self.pending.batch:
            with self.pending.apply(), torch.no_grad():
                for parameter in self._parameters:
                    parameter -= RATE * self.pending.captured.view_of(parameter.main_grad)


def _accumulate(parameter: torch.nn.Parameter) -> None:
    """Add a fresh gradient to ``main_grad``, as Megatron's hook does."""
    parameter.main_grad += parameter.grad
    parameter.grad = None


def train(size: Size) -> Trained:
    """The same with one process per rank.

    Raises:
        AssertionError: two ranks differ in the weights of a stage that both have.
    """
    server = _server()
    with (
        tempfile.TemporaryDirectory() as folder,
        unittest.mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        mp.start_processes(_rank, (size, folder), nprocs=size.stages, start_method="forkserver")
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size.stages)]
    weights: dict[int, list[torch.Tensor]] = {}
    for result in results:
        for stage, mine in result["weights"].items():
            assert all(starmap(torch.equal, zip(mine, weights.setdefault(stage, mine), strict=True)))
    losses = {key: loss for result in results for key, loss in result["losses"].items()}
    return Trained(losses, weights, [result["in_flight"] for result in results])


@functools.cache
def _server() -> forkserver.ForkServer:
    """A process that has imported torch, which takes seconds, and forks ranks; Python's own may run without."""
    server = forkserver.ForkServer()
    # The latter takes a second and is imported by the first backward.
    server.set_forkserver_preload([__name__, "torch.fx.experimental.symbolic_shapes"])
    with unittest.mock.patch.dict(os.environ, {"PYTHONPATH": str(Path(__file__).parents[2])}):
        server.ensure_running()
    return server


def _rank(rank: int, size: Size, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size.stages)
    torch.save(_trained(rank, size), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _trained(rank: int, size: Size) -> dict:
    schedule, ranks = size.schedule(), list(range(size.stages))
    stage = ToyStage(schedule, rank, size.jitter_s)
    links = Links(groups={lane: dist.new_group(ranks) for lane in ALL_LANES}, ranks=ranks, device=stage.boundary.device)
    executor = Executor(schedule, rank, stage, links)
    for batch in range(size.batches):
        executor.run(batch, left=min(last for last in (*size.drains, size.batches - 1) if last >= batch) - batch)
    return {"losses": stage.losses, "weights": stage.weights(), "in_flight": stage.most_in_flight}
