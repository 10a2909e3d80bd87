"""Two pipelines in opposite directions through the same processes, and the loop that they must equal."""

from __future__ import annotations

import tempfile
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.validate import validate
from tests.runtime.toy import RATE, REDUCTIONS, data, layers, run_rank


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

    losses: dict[tuple[int, int], float]
    """By batch and microbatch."""
    weights: dict[int, list[torch.Tensor]]
    """Per stage; of all ranks that have it, once."""
    in_flight: list[int]
    """Per rank: forwards without their backward, at most."""


def expected(size: Size) -> Trained:
    """Synchronous training in one process; gradients of each direction are summed on their own, as replicas do."""
    stages = [layers(stage) for stage in range(size.stages)]
    model = torch.nn.Sequential(*stages)
    losses: dict[tuple[int, int], float] = {}
    for batch in range(size.batches):
        directions = []
        for first in (0, 1):
            for microbatch in range(first, size.microbatches, 2):
                loss = model(data(batch, microbatch)).pow(2).mean()
                losses[batch, microbatch] = loss.item()
                loss.backward()
            directions.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        with torch.no_grad():
            for parameter, down, up in zip(model.parameters(), *directions, strict=True):
                parameter -= RATE * (down + up)
    weights = {stage: [p.detach() for p in module.parameters()] for stage, module in enumerate(stages)}
    return Trained(losses, weights, [])


def train(sizes: list[Size]) -> list[Trained]:
    """The same, one size after the other, with one process per rank; all sizes have as many stages.

    Raises:
        AssertionError: two ranks differ in the weights of a stage that both have.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (sizes, folder), nprocs=sizes[0].stages, start_method="forkserver")
        of_ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(sizes[0].stages)]
    return [_together(size, results) for size, results in zip(sizes, zip(*of_ranks, strict=True), strict=True)]


def _together(size: Size, results: tuple[dict, ...]) -> Trained:
    weights: dict[int, list[torch.Tensor]] = {}
    for result in results:
        for stage, mine in result["weights"].items():
            assert all(starmap(torch.equal, zip(mine, weights.setdefault(stage, mine), strict=True)))
    losses = {key: loss for result in results for key, loss in result["losses"].items()}
    return Trained(losses, weights, [result["in_flight"] for result in results])


def _rank(rank: int, sizes: list[Size], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=sizes[0].stages)
    torch.save([_trained(rank, size) for size in sizes], Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _trained(rank: int, size: Size) -> dict:
    stage = run_rank(size.schedule(), rank, size.batches, jitter_s=size.jitter_s)
    return {"losses": stage.losses, "weights": stage.weights(), "in_flight": stage.most_in_flight}
