"""Delay-1 updates: Megatron's optimizer in two phases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import optimizer as megatron_optimizer

from megatron_2bw.mcore.groups import UpdateGroups
from megatron_2bw.mcore.reductions import GradientReductions
from megatron_2bw.runtime.background import Background
from megatron_2bw.runtime.gradients import CapturedGradients
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
        self.weights = WeightVersions(parameters)
        self._captured = CapturedGradients([buffer.grad_data for buffer in model.buffers], parameters)
        self._reductions = GradientReductions(model, self._captured, self._gradients_for_norm(), groups)
        self._background = Background(model.buffers[0].grad_data.device, "2bw reductions")
        self._chain: dict[Reduction, Future] = {}
        self._pending: int | None = None
        self._hyperparameters: list[dict[str, float]] = []
        self.outcome: UpdateOutcome | None = None
        """Of the newest finished update."""
        # Both ask all ranks. The norm is known when Megatron's step wants it; the groups with a
        # norm of their own (multi-token prediction) never change and are asked for once, here.
        inner.get_grad_norm = self._known_norm
        for name in getattr(megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()):
            inner.has_grad_norm_group(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Report the newest finished update: that of the batch before, except after a drain."""
        if self.outcome is None:
            return True, None, None
        return self.outcome.successful, self.outcome.grad_norm, self.outcome.num_zeros

    def reduce_start(self, reduction: Reduction, batch: int) -> None:
        """Capture the gradients of ``batch`` if this is the first link, and queue the link."""
        if reduction is Reduction.GRADIENTS:
            self._captured.capture()
            self._pending = batch
            self._hyperparameters = [_hyperparameters_of(group) for group in self._inner.param_groups]
        self._chain[reduction] = self._background.submit(self._reductions.links[reduction])

    def reduce_wait(self, reduction: Reduction, batch: int) -> None:
        """Block until the link is complete; returns at once for a batch that is finished."""
        if batch == self._pending:
            self._background.result(self._chain[reduction])

    def finish(self, batch: int) -> UpdateOutcome | None:
        """Update with the gradients of ``batch``, unless that is done already.

        Raises:
            RuntimeError: a gradient is not finite and Megatron was asked to check.
        """
        if batch != self._pending:
            return self.outcome
        for future in self._chain.values():
            self._background.result(future)
        norm = self._known_norm()
        if self._check_for_nan and not math.isfinite(norm):
            raise RuntimeError(f"the gradient of batch {batch} (counted from the start of the run) has norm {norm}")
        with self.weights.update(), self._captured.as_main_grad(), self._hyperparameters_of_batch():
            outcome = UpdateOutcome(batch, *self._inner.step())
        # Gradients of the next backward must not be added to the captured ones.
        self._inner.zero_grad()
        self.outcome, self._pending = outcome, None
        return outcome

    def settle(self) -> None:
        """Finish what is pending and point the model at the newest weights."""
        if self._pending is not None:
            self.finish(self._pending)
        self.weights.use_newest()

    def _known_norm(self) -> float:
        return self._chain[Reduction.NORM].result()

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
