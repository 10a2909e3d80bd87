"""Delay-1 updates: Megatron's optimizer in two phases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import optimizer as megatron_optimizer

from megatron_2bw.mcore.groups import UpdateGroups
from megatron_2bw.mcore.reductions import GradientReductions
from megatron_2bw.runtime.gradients import CapturedGradients
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Reduction


class UpdateOutcome(NamedTuple):
    """What became of the update of one batch."""

    batch: int
    successful: bool
    grad_norm: float | None
    num_zeros: int | None


class DelayedOptimizer:
    """Megatron's optimizer, with ``W(t+1) = W(t) - lr(t) * u(grad f(W(t-1)))``.

    Phase one, at the end of a batch: its gradients are captured, and their reductions start in the
    background. Phase two, ``finish``, waits for them, clips by the exact global norm and runs
    Megatron's own step on a copy of the newest weights. ``step``, which Megatron's training loop
    calls between batches, waits for nothing. All else is the wrapped optimizer's.

    Learning rate and weight decay are those that ``step`` would have used: they are taken when the
    batch is captured, before the scheduler moves on.

    Source: Narayanan et al., ICML 2021, section 3.1; clipping and tied embeddings are ours.

    Args:
        inner: Megatron's optimizer (a ChainedOptimizer).
        model: this rank's stage, wrapped in DistributedDataParallel.
        groups: who takes part in the reductions.
        check_for_nan: stop with an error when the norm is not finite.
    """

    def __init__(self, inner: Any, model: torch.nn.Module, groups: UpdateGroups, *, check_for_nan: bool) -> None:
        self._inner = inner
        self._check_for_nan = check_for_nan
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._captured = CapturedGradients([buffer.grad_data for buffer in model.buffers], parameters)
        self.weights = WeightVersions(parameters)
        reductions = GradientReductions(model, self._captured, self._gradients_for_norm(), groups)
        self._pending = PendingUpdate(self.weights, self._captured, reductions.links)
        self._hyperparameters: list[dict[str, float]] = []
        self._norm = 0.0
        self.outcome: UpdateOutcome | None = None
        """Of the newest finished update."""
        # Both ask all ranks. The norm is known when Megatron's step wants it; the groups with a
        # norm of their own (multi-token prediction) never change and are asked for once, here.
        inner.get_grad_norm = lambda: self._norm
        for name in megatron_optimizer.SEPARATE_GRAD_NORM_GROUPS:
            inner.has_grad_norm_group(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Ours, and not set yet.
            raise AttributeError(name)
        return getattr(self._inner, name)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Report the newest finished update: that of the batch before, except after a drain."""
        if self.outcome is None:
            return True, None, None
        return self.outcome.successful, self.outcome.grad_norm, self.outcome.num_zeros

    def reduce_start(self, reduction: Reduction, batch: int) -> None:
        """Start one reduction of ``batch``, the first one with the capture of its gradients."""
        if reduction is Reduction.GRADIENTS:
            self._hyperparameters = [_hyperparameters_of(group) for group in self._inner.param_groups]
        self._pending.reduce_start(reduction, batch)

    def reduce_wait(self, reduction: Reduction, batch: int) -> None:
        """Block until the reduction is complete; returns at once for a batch that is finished."""
        self._pending.reduce_wait(reduction, batch)

    def finish(self, batch: int) -> UpdateOutcome | None:
        """Update with the gradients of ``batch``, unless that is done already.

        Raises:
            RuntimeError: a gradient is not finite and Megatron was asked to check.
        """
        if batch != self._pending.batch:
            return self.outcome
        with self._pending.apply() as results, self._hyperparameters_of_batch():
            self._norm = results[Reduction.NORM]
            if self._check_for_nan and not math.isfinite(self._norm):
                raise RuntimeError(
                    f"the gradient of batch {batch} (counted from the start of the run) has norm {self._norm}"
                )
            self.outcome = UpdateOutcome(batch, *self._inner.step())
        # Gradients of the next backward must not be added to the captured ones.
        self._inner.zero_grad()
        return self.outcome

    def settle(self) -> None:
        """Finish what is pending and point the model at the newest weights."""
        if self._pending.batch is not None:
            self.finish(self._pending.batch)
        self.weights.use_newest()

    def _gradients_for_norm(self) -> list[torch.Tensor]:
        # Megatron's own filter picks them (shared and replicated weights count once); the captured
        # views stay where they are, so asking once is enough.
        with self._captured.as_main_grad():
            self._inner.prepare_grads()
            gradients = [
                gradient for part in self._inner.chained_optimizers for gradient in part.get_grads_for_grad_norm()
            ]
            self._inner.zero_grad()
        return gradients

    @contextmanager
    def _hyperparameters_of_batch(self) -> Iterator[None]:
        present = [_hyperparameters_of(group) for group in self._inner.param_groups]
        self._set(self._hyperparameters)
        try:
            yield
        finally:
            self._set(present)

    def _set(self, hyperparameters: list[dict[str, float]]) -> None:
        for group, values in zip(self._inner.param_groups, hyperparameters, strict=True):
            group.update(values)


def _hyperparameters_of(group: dict[str, Any]) -> dict[str, float]:
    """What Megatron's scheduler changes from batch to batch."""
    return {name: group[name] for name in ("lr", "weight_decay")}
