"""Runs whose batches grow or are skipped, and the loop that they must equal."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .case import MICRO_BATCH_SIZE, SEQUENCE_LENGTH, Case
from .harness import Results, collect, merge

_REPLACED = ("--global-batch-size", "--train-iters", "--lr-warmup-iters", "--lr-decay-iters")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingCase(Case):
    """A case that trains for a number of samples; ``microbatches`` and ``batches`` of ``Case`` do not count."""

    steps: tuple[tuple[int, int], ...]
    """(batches, microbatches per batch and replica) of every phase."""
    skipped: tuple[int, ...] = ()
    """Batches left out with ``--iterations-to-skip``, from 0."""

    def sizes(self) -> list[int]:
        """Microbatches of every batch, per replica."""
        return [microbatches for batches, microbatches in self.steps for _ in range(batches)]

    def samples(self, microbatches: int) -> int:
        """Of so many microbatches on all replicas."""
        return microbatches * MICRO_BATCH_SIZE * self.replicas

    def arguments(self) -> list[str]:
        words = Case.arguments(self)
        for flag in _REPLACED:
            at = words.index(flag)
            del words[at : at + 2]
        starts, consumed = [], 0
        for batches, microbatches in self.steps:
            starts.append(f"{consumed * SEQUENCE_LENGTH}:{self.samples(microbatches)}")  # Megatron wants tokens.
            consumed += self.samples(batches * microbatches)
        sized = ["--step-batch-size-schedule", " ".join(starts)]
        if len(starts) == 1:
            sized = ["--global-batch-size", str(self.samples(self.steps[0][1]))]
        skipping = ["--iterations-to-skip", *(str(batch + 1) for batch in self.skipped)] if self.skipped else []
        return [
            *words,
            *sized,
            *f"--train-samples {consumed} --lr-warmup-samples {consumed // 5} --lr-decay-samples {consumed}".split(),
            *skipping,
        ]


@functools.cache
def grown(case: GrowingCase) -> Results:
    """What a run of ``case`` computes; losses have the shape (replicas, all microbatches, 1)."""
    from .worker import main

    return merge(collect(main, case, case.ranks), case.stages, microbatches=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the loop computes, as far as it is compared."""

    losses: torch.Tensor
    norms: torch.Tensor
    final: dict[str, torch.Tensor]


@functools.cache
def grown_oracle(case: GrowingCase, *, delay: int, from_batch: int = 0) -> Expected:
    """What ``case`` must compute, by a loop in one process on the undivided model.

    The t-th batch that is not skipped is computed with ``W(max(t - delay, from_batch))``, those before
    ``from_batch`` with the newest weights.
    """
    (expected,) = collect(
        partial(_loop, delay=delay, from_batch=from_batch), replace(case, schedule=None, stages=1, flags=()), ranks=1
    )
    return expected


def _loop(case: GrowingCase, rank: int, port: int, folder: Path, *, delay: int, from_batch: int) -> None:
    from .worker import initialize

    initialize(case, rank, 1, port)
    from megatron.core.optimizer import _get_param_groups
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args
    from megatron.training.training import get_megatron_optimizer_config, get_optimizer_param_scheduler

    from .model import build_model, global_parameters, training_samples

    model = build_model(case.kind, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    config, overrides = get_megatron_optimizer_config(get_args())
    groups = _get_param_groups([model], config, overrides)
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay
    )
    scheduler = get_optimizer_param_scheduler(optimizer)
    parameters = list(model.parameters())
    data = training_samples(case.kind, case.samples(sum(case.sizes())))
    versions, losses, norms, first = [_copy(parameters)], [[] for _ in range(case.replicas)], [], 0
    for batch, microbatches in enumerate(case.sizes()):
        if batch not in case.skipped:
            done = len(versions) - 1
            older = versions[done if done < from_batch else max(done - delay, from_batch)]
            _accumulate(case, model, data, first, microbatches, losses, older, versions[done])
            _load(parameters, versions[done])
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, case.clip or torch.inf).item())
            optimizer.step()
            scheduler.step(increment=case.samples(microbatches))
            versions.append(_copy(parameters))
        first += microbatches * case.replicas
    expected = Expected(
        losses=torch.stack([torch.stack(of_replica) for of_replica in losses]).unsqueeze(-1),
        norms=torch.tensor(norms, dtype=torch.float64),
        final={name: parameter.detach().clone() for name, parameter in global_parameters(model)},
    )
    torch.save(expected, folder / f"rank{rank}.pt")


def _accumulate(
    case: GrowingCase,
    model: Any,
    data: Any,
    first: int,
    microbatches: int,
    losses: list[list[torch.Tensor]],
    older: list[torch.Tensor],
    newest: list[torch.Tensor],
) -> None:
    """The mean gradient over microbatches, then over replicas; replicas read in turn."""
    from .delayed import loss_of

    total: list[torch.Tensor] | None = None
    for replica in range(case.replicas):
        model.zero_grad()
        for microbatch in range(microbatches):
            _load(list(model.parameters()), older if microbatch < (case.delayed or microbatches) else newest)
            total_loss, num_tokens = loss_of(case.kind, model, data, first + microbatch * case.replicas + replica)
            loss = total_loss / num_tokens
            losses[replica].append(loss.detach())
            (loss / microbatches).backward()
        part = [parameter.grad / case.replicas for parameter in model.parameters()]
        total = part if total is None else [a + b for a, b in zip(total, part, strict=True)]
    for parameter, grad in zip(model.parameters(), total or [], strict=True):
        parameter.grad = grad


def _copy(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _load(parameters: list[torch.nn.Parameter], version: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, version, strict=True):
        parameter.data.copy_(value)
