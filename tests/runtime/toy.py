"""A small pipeline of two-layer stages with delayed updates, and the loop that it must equal."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.gradients import CapturedGradients, whole_regions
from megatron_2bw.runtime.links import Boundary, Links
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build

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


def expected(
    stages: int, microbatches: int, batches: int, schedule: str = "2bw"
) -> tuple[list[float], list[torch.Tensor]]:
    """Training with the delay of each stage in one process: losses in order, and the final weights."""
    model = torch.nn.Sequential(*(layers(stage) for stage in range(stages)))
    parameters = list(model.parameters())
    of_stages = build(schedule, stages=stages, microbatches=microbatches).delay
    delays = [delay for stage, delay in zip(model, of_stages, strict=True) for _ in stage.parameters()]
    versions = [[parameter.detach().clone() for parameter in parameters]]
    losses = []
    for batch in range(batches):
        _load(parameters, [versions[max(batch - delay, 0)][i] for i, delay in enumerate(delays)])
        for microbatch in range(microbatches):
            loss = model(data(batch, microbatch)).pow(2).mean()
            losses.append(loss.item())
            loss.backward()
        versions.append([newest - RATE * p.grad for newest, p in zip(versions[batch], parameters, strict=True)])
        model.zero_grad()
    return losses, versions[-1]


def _load(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.clone()


class ToyStage:
    """A stage as the executor wants it; ``jitter_s`` adds random waits around every action."""

    def __init__(self, rank: int, stages: int, jitter_s: float, weight_versions: int) -> None:
        self.boundary = Boundary(shape=(ROWS, WIDTH), dtype=torch.float32, device=torch.device("cpu"))
        self.model = layers(rank)
        self.losses: list[float] = []
        self._is_last = rank == stages - 1
        self._jitter_s, self._random = jitter_s, random.Random(rank)
        parameters = list(self.model.parameters())
        self._buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
        grads = self._buffer.split([parameter.numel() for parameter in parameters])
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.main_grad = grad.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(accumulate)
        everyone = dist.new_group(list(range(stages)))
        self.versions = WeightVersions(parameters, slots=weight_versions)
        captured = CapturedGradients(whole_regions([self._buffer]))
        links = {
            Reduction.GRADIENTS: lambda: self._wait(),
            Reduction.NORM: lambda: dist.all_reduce(captured.kept[0].norm() ** 2, group=everyone),
        }
        self.pending = PendingUpdate(self.versions, captured, links)

    def _wait(self) -> None:
        time.sleep(self._jitter_s * self._random.random())

    def use_weights(self, version: int) -> None:
        self._wait()
        self.versions.use(version)

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        output = self.model(data(action.batch, action.microbatch) if received is None else received)
        if not self._is_last:
            return output
        loss = output.pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        torch.autograd.backward(output, grad)
        return None if received is None else received.grad

    def sent(self, output: torch.Tensor) -> None:
        self._wait()

    def reduce_start(self, action: Action) -> None:
        self.pending.reduce_start(action)

    def reduce_wait(self, action: Action) -> None:
        self.pending.reduce_wait(action)

    def update(self, action: Action) -> None:
        if action.batch == self.pending.batch:
            with self.pending.apply(), torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= RATE * self.pending.captured.view_of(parameter.main_grad)


def accumulate(parameter: torch.nn.Parameter) -> None:
    """Add a fresh gradient to ``main_grad``, as Megatron's hook does."""
    parameter.main_grad += parameter.grad
    parameter.grad = None


def train(
    stages: int,
    microbatches: int,
    batches: int,
    schedule: str = "2bw",
    *,
    drains: tuple[int, ...] = (),
    jitter_s: float = 0.0,
) -> tuple[list[float], list[torch.Tensor]]:
    """The same with one process per stage, draining after the batches in ``drains`` as well."""
    built = lower(build(schedule, stages=stages, microbatches=microbatches), REDUCTIONS)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (built, batches, (*drains, batches - 1), jitter_s, folder), nprocs=stages)
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(stages)]
    return results[-1]["losses"], [weight for result in results for weight in result["weights"]]


def _rank(rank: int, schedule: Schedule, batches: int, drains: tuple[int, ...], jitter_s: float, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=schedule.stages)
    stage = ToyStage(rank, schedule.stages, jitter_s, schedule.weight_versions[rank])
    ranks = list(range(schedule.stages))
    links = Links(forward_group=dist.new_group(ranks), backward_group=dist.new_group(ranks), ranks=ranks)
    executor = Executor(schedule, rank, stage, links)
    for batch in range(batches):
        executor.run(batch, left=min(last for last in drains if last >= batch) - batch)
    weights = [parameter.detach() for parameter in stage.model.parameters()]
    torch.save({"losses": stage.losses, "weights": weights}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
