"""Delayed training in one process, on one undivided model, without pipeline, DDP or Megatron's optimizer.

Shares no code with ``megatron_2bw``; only the CPU backend is loaded, as Megatron needs it to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .case import EVALUATION_ITERATIONS, MICRO_BATCH_SIZE, Case
from .harness import Results, collect, merge
from .record import RankRecord, record_rates, weights


def oracle(case: Case, *, delay: int, evaluate_every: int = 0, delayed_batches: int | None = None) -> Results:
    """What ``case`` must compute; its schedule, stages, flags and faults do not matter.

    Args:
        delay: 0 for ordinary training, 1 for 2BW.
        evaluate_every: batches between evaluations, with one at the end; 0 for none.
        delayed_batches: from this batch on, training is ordinary.
    """
    plain = replace(case, schedule=None, stages=1, flags=(), faults=(), record_actions=False)
    return _oracle(plain, delay, evaluate_every, delayed_batches)


@functools.cache
def _oracle(case: Case, delay: int, evaluate_every: int, delayed_batches: int | None) -> Results:
    target = partial(main, delay=delay, evaluate_every=evaluate_every, delayed_batches=delayed_batches)
    (record,) = collect(target, case, ranks=1)
    losses = torch.stack(record.losses).view(case.batches, case.replicas, case.microbatches).transpose(0, 1)
    return replace(merge([record], case.stages, case.microbatches), losses=losses)


@dataclass(slots=True)
class Training:
    """Delayed training of one model.

    Batch t is computed with ``W(V)``, ``V = max(t - delay, 0)``, and
    ``W(t+1) = W(t) - lr(t) * u(grad f(W(V)))`` with u the optimizer's rule.
    """

    case: Case
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    data: Any
    record: RankRecord

    def run(self, delay_of: Callable[[int], int], after_update: Callable[[int], None]) -> None:
        versions = [self.parameters()]
        for batch in range(self.case.batches):
            self.load(versions[max(batch - delay_of(batch), 0)])
            self.compute_gradient(batch)
            self.load(versions[batch])
            self.record.norms.append(self.clip())
            self.optimizer.step()
            self.scheduler.step(increment=self.case.global_batch_size)
            versions.append(self.parameters())
            after_update(batch)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def load(self, version: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.model.parameters(), version, strict=True):
            parameter.data.copy_(value)

    def compute_gradient(self, batch: int) -> None:
        """Mean over microbatches, each a mean over its tokens; then mean over replicas."""
        case, total = self.case, None
        for replica in range(case.replicas):
            self.optimizer.zero_grad()
            for microbatch in range(case.microbatches):
                position = (batch * case.microbatches + microbatch) * case.replicas + replica
                loss = loss_of(self.model, self.data, position)
                self.record.losses.append(loss.detach())
                (loss / case.microbatches).backward()
            part = [parameter.grad / case.replicas for parameter in self.model.parameters()]
            total = part if total is None else [a + b for a, b in zip(total, part, strict=True)]
        for parameter, grad in zip(self.model.parameters(), total, strict=True):
            parameter.grad = grad

    def clip(self) -> float:
        """Scale the gradient down to the norm ``case.clip``; returns its norm before."""
        grads = [parameter.grad for parameter in self.model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])).item()
        coefficient = self.case.clip / (norm + 1.0e-6)
        if 0.0 < coefficient < 1.0:
            for grad in grads:
                grad.mul_(coefficient)
        return norm


def loss_of(model: torch.nn.Module, data: Any, position: int) -> torch.Tensor:
    """Mean loss per token of the microbatch at ``position`` in the order of the samples."""
    from .model import masked_sum, run_model

    indices = range(position * MICRO_BATCH_SIZE, (position + 1) * MICRO_BATCH_SIZE)
    batch = torch.utils.data.default_collate([data[index] for index in indices])
    total, num_tokens = masked_sum(run_model(model, batch), batch["loss_mask"])
    return total / num_tokens


def main(
    case: Case,
    rank: int,
    port: int,
    folder: Path,
    *,
    delay: int,
    evaluate_every: int,
    delayed_batches: int | None,
) -> None:
    """Train in this process and write the record, as a rank of the harness does."""
    from .worker import initialize_alone

    args = initialize_alone(case, rank, port)
    training = _training(case, args)
    record = training.record
    record.initial = weights(training.model)
    record_rates(record)

    def delay_of(batch: int) -> int:
        return delay if delayed_batches is None or batch < delayed_batches else 0

    def after_update(batch: int) -> None:
        if evaluate_every and ((batch + 1) % evaluate_every == 0 or batch + 1 == case.batches):
            _evaluate(training)

    training.run(delay_of, after_update)
    record.final = weights(training.model)
    torch.save(record, folder / f"rank{rank}.pt")


def _evaluate(training: Training) -> None:
    from .model import validation_samples

    record = training.record
    done = len(record.validation_losses)
    count = EVALUATION_ITERATIONS * training.case.microbatches
    data = validation_samples((done + count) * MICRO_BATCH_SIZE)
    with torch.no_grad():
        record.validation_losses += [loss_of(training.model, data, done + index) for index in range(count)]


def _training(case: Case, args: Any) -> Training:
    """Model, AdamW, parameter groups and schedule as Megatron configures them."""
    from megatron.core.optimizer import _get_param_groups
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.training import get_megatron_optimizer_config, get_optimizer_param_scheduler

    from .model import build_model, training_samples

    model = build_model(pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    config, overrides = get_megatron_optimizer_config(args)
    optimizer = torch.optim.AdamW(
        _get_param_groups([model], config, overrides),
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    scheduler = get_optimizer_param_scheduler(optimizer)
    data = training_samples(case.batches * case.global_batch_size)
    return Training(case, model, optimizer, scheduler, data, RankRecord())
