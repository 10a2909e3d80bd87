"""How much memory a training run takes: what torch's own allocator was asked for and gave back."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from . import stand_ins
from .case import Case
from .worker import install, pretrain, set_environment

FORWARD = "a forward begins"
SETTLING_FORWARDS = 8
"""Construction has its own peaks; a few batches later all that lives long is there."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one rank, in bytes."""

    peak: int
    """Most that was allocated at once by torch on the host, or on the GPU, after the start."""
    lasting: int
    """Least at the moments at which a forward begins: without what collectives and steps hold for a while."""
    weights: int
    """The stage's weights, in the precision of forward and backward."""
    gradients: int
    """One buffer of main gradients, or this rank's shard of it."""
    in_flight: int
    """Most forwards whose backward had not run yet."""


def measure(case: Case, rank: int, port: int, folder: Path) -> None:
    """Run ``case`` with every allocation traced, of the host or of the device it runs on."""
    set_environment(rank, case.ranks, port)
    install(case)
    from megatron.training.arguments import parse_and_validate_args

    sys.argv = ["pretrain_small_gpt.py", *case.arguments()]
    args = parse_and_validate_args()
    stand_ins.install(case, args)
    chunks, in_flight = _keep_model(), _count_in_flight()
    allocated = (_on_host if case.device == "cpu" else _on_device)(case, args)
    weights, gradients = _sizes(case, chunks[0])
    torch.save(Memory(*allocated, weights, gradients, max(in_flight)), folder / f"rank{rank}.pt")


def _on_host(case: Case, args: Any) -> tuple[int, int]:
    """Most, and the least at the beginnings of forwards, in bytes, beyond what the forkserver's imports took."""
    from .model import build_model, forward_step

    def marked(data_iterator: Any, model: Any) -> Any:
        with record_function(FORWARD):
            pass
        return forward_step(case.kind, data_iterator, model, [], [])

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        pretrain(case, args, marked, partial(build_model, case.kind))
    return _allocated(traced)


def _on_device(case: Case, args: Any) -> tuple[int, int]:
    """The same, of what torch has allocated on this rank's GPU."""
    from .model import build_model, forward_step

    at_forwards: list[int] = []

    def marked(data_iterator: Any, model: Any) -> Any:
        at_forwards.append(torch.cuda.memory_allocated())
        if len(at_forwards) == SETTLING_FORWARDS:
            torch.cuda.reset_peak_memory_stats()
        return forward_step(case.kind, data_iterator, model, [], [])

    pretrain(case, args, marked, partial(build_model, case.kind))
    return torch.cuda.max_memory_allocated(), min(at_forwards[SETTLING_FORWARDS:])


def _allocated(traced: profile) -> tuple[int, int]:
    events = sorted(traced.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live, forwards, totals, at_forwards = 0, 0, [], []
    for event in events:
        live += event.nbytes() if event.name() == "[memory]" else 0
        forwards += event.name() == FORWARD
        if forwards > SETTLING_FORWARDS:
            totals.append(live)
            if event.name() == FORWARD:
                at_forwards.append(live)
    return max(totals), min(at_forwards)


def _keep_model() -> list[Any]:
    """The model in Megatron's wrappers, once its optimizer is made."""
    training = importlib.import_module("megatron.training.training")
    original, chunks = training.get_megatron_optimizer, []

    def make(config: Any, model_chunks: list[Any], **keywords: Any) -> Any:
        chunks.extend(model_chunks)
        return original(config, model_chunks, **keywords)

    training.get_megatron_optimizer = make
    return chunks


def _count_in_flight() -> list[int]:
    """One number per forward of our executor."""
    from megatron_2bw.runtime.executor import Executor

    counted: list[int] = []
    forward = Executor._forward

    def counting(self: Any, action: Any) -> None:
        forward(self, action)
        counted.append(len(self._in_flight))

    Executor._forward = counting
    return counted


def _sizes(case: Case, model: Any) -> tuple[int, int]:
    """Bytes of the weights and of what an update needs of the gradients."""
    weights = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    gradients = sum(buffer.grad_data.nbytes for buffer in model.buffers)
    return weights, gradients // (case.replicas if case.distributed_optimizer else 1)
