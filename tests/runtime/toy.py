"""A small pipeline of two-layer stages, and the loop with delayed updates that it must equal."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

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
    stages: int, microbatches: int, batches: int, schedule: str = "2bw", *, delayed: int | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    """Training with the delay of each stage in one process: losses in order, and the final weights."""
    model = torch.nn.Sequential(*(layers(stage) for stage in range(stages)))
    parameters = list(model.parameters())
    of_stages = build(schedule, stages=stages, microbatches=microbatches).delay
    delays = [delay for stage, delay in zip(model, of_stages, strict=True) for _ in stage.parameters()]
    versions = [[parameter.detach().clone() for parameter in parameters]]
    losses = []
    for batch in range(batches):
        older = [versions[max(batch - delay, 0)][i] for i, delay in enumerate(delays)]
        for microbatch in range(microbatches):
            _load(parameters, older if delayed is None or microbatch < delayed else versions[batch])
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
    """All stages of one rank, as the executor wants them; ``jitter_s`` adds random waits around every action."""

    def __init__(self, schedule: Schedule, rank: int, jitter_s: float) -> None:
        self.boundary = Boundary(shape=(ROWS, WIDTH), dtype=torch.float32, device=torch.device("cpu"))
        self.models = {stage: layers(stage) for stage in sorted(schedule.stages_of(rank))}
        self.losses: dict[tuple[int, int], float] = {}
        """By batch and microbatch, in the order in which they ran."""
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


def train(
    stages: int,
    microbatches: int,
    batches: int,
    schedule: str = "2bw",
    *,
    delayed: int | None = None,
    drains: tuple[int, ...] = (),
    jitter_s: float = 0.0,
) -> tuple[list[float], list[torch.Tensor]]:
    """The same with one process per stage, draining after the batches in ``drains`` as well."""
    built = lower(build(schedule, stages=stages, microbatches=microbatches, delayed_microbatches=delayed), REDUCTIONS)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (built, batches, drains, jitter_s, folder), nprocs=stages, start_method="forkserver")
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(stages)]
    weights = [weight for result in results for of_stage in result["weights"].values() for weight in of_stage]
    return list(results[-1]["losses"].values()), weights


def _rank(rank: int, schedule: Schedule, batches: int, drains: tuple[int, ...], jitter_s: float, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=schedule.stages)
    stage = run_rank(schedule, rank, batches, drains=drains, jitter_s=jitter_s)
    torch.save({"losses": stage.losses, "weights": stage.weights()}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_rank(
    schedule: Schedule, rank: int, batches: int, *, drains: tuple[int, ...] = (), jitter_s: float = 0.0
) -> ToyStage:
    """Train in this process, one of the group's; the pipeline drains after the batches in ``drains`` and the last."""
    stage = ToyStage(schedule, rank, jitter_s)
    ranks = list(range(schedule.stages))
    links = Links(groups={lane: dist.new_group(ranks) for lane in ALL_LANES}, ranks=ranks, device=stage.boundary.device)
    executor = Executor(schedule, rank, stage, links)
    for batch in range(batches):
        executor.run(batch, left=min(last for last in (*drains, batches - 1) if last >= batch) - batch)
    return stage
