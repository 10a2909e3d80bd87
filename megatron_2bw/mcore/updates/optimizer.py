"""Delayed updates: Megatron's optimizer in two phases."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.utils import get_model_config

from megatron_2bw.mcore.groups import create_update_groups
from megatron_2bw.mcore.symbols import replace
from megatron_2bw.mcore.updates.attention import AttentionLogits
from megatron_2bw.mcore.updates.driven_scheduler import DrivenScheduler
from megatron_2bw.mcore.updates.gradient_check import GradientCheck, LargeGradients
from megatron_2bw.mcore.updates.loss_scales import LossScales
from megatron_2bw.mcore.updates.reductions import (
    GradientReductions,
    Part,
    Statistics,
    replicated_gradients,
    sources_of,
)
from megatron_2bw.mcore.updates.routers import Routers
from megatron_2bw.mcore.updates.stock_optimizer import (
    Accumulated,
    accumulated,
    buffers_of,
    forget_shards_of_weights,
    gradient_name,
    hyperparameters_of,
    is_layer_wise,
    leaf_optimizers,
    norm_groups,
    scaler_of,
    statistics_group,
    versions_of,
)
from megatron_2bw.runtime.corrections import Correction, UpdateLead
from megatron_2bw.runtime.gradients import CapturedGradients
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.schedule.action import Reduction


class UpdateOutcome(NamedTuple):
    """What became of the update of one batch."""

    batch: int
    successful: bool
    grad_norm: float | None
    num_zeros: int | None


class DelayedOptimizer:
    """Megatron's optimizer, with ``W(t+1) = W(t) - lr(t) * u(grad f(W(t-delay)))``.

    Where only some microbatches of a batch are delayed, the gradients of the others are those at W(t).

    Phase one, at the end of a batch: its gradients are captured, and their reductions start in the
    background. Phase two, ``finish``, waits for them, clips by the exact global norm and runs
    Megatron's own step on a copy of the newest weights. ``step``, which Megatron's training loop
    calls between batches, waits for nothing. All else is the wrapped optimizer's.

    Learning rate and weight decay of batch t are those of the schedule after all updates before t
    that were not skipped, as in Megatron. The schedule moves on when a batch is captured, and back
    again when its update turns out to be skipped, which is before the next batch is captured.

    The loss scale of batch t, one for all its microbatches, is the scaler's after the batches whose updates W(t-1)
    contains, so every stage knows it without asking: ``scales``.

    Where batches were computed without a delay until W(n), W(max(t-delay, n)) is used after them; see ``synchronous``.

    Stages whose delays differ, as PipeDream's do, never have the gradients of one batch at one time: no norm, no
    clipping, no loss scale and no tied weight spans them.

    Source: Narayanan et al., ICML 2021, section 3.1 (delay 1), and SOSP 2019, section 3.3 (d-1-s); clipping,
    overflow checks and tied embeddings are ours.

    Args:
        inner: Megatron's optimizer (a ChainedOptimizer).
        model: this rank's stage, wrapped in DistributedDataParallel.
        timeout: of every reduction.
        versions: of the weights, alive at once.
        has_norm: whether the gradients of all stages have a global norm.
        tied_embeddings: whether the first and the last stage share a weight.
        second_buffer: keep finished gradients (with the distributed optimizer: this rank's shard)
            apart from those of the next batch.
        check_for_nan: stop with an error when the norm is not finite; without one, when a gradient of this stage
            was not, one update later.
        correction: of updates for their delay; None for the paper's exact rule.
    """

    def __init__(
        self,
        inner: Any,
        model: torch.nn.Module,
        *,
        timeout: timedelta,
        versions: int,
        has_norm: bool,
        tied_embeddings: bool,
        second_buffer: bool,
        check_for_nan: bool,
        correction: Correction | None = None,
    ) -> None:
        updating = [part for part in leaf_optimizers(inner) if not part.is_stub_optimizer]
        for part in updating if correction is not None else ():
            _check_correction(correction, part)
        self._inner = inner
        self._model = model
        self._correction = correction
        sources = sources_of(model)
        self._captured = CapturedGradients(
            (source.region for source in sources),
            device=_device_of(model),
            second_buffer=second_buffer,
        )
        self._routers = Routers(model)
        self._logits = AttentionLogits(model)
        self.weights = versions_of(inner, model, self._routers, self._logits, versions)
        self._main_gradients: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._norm_groups = norm_groups(inner)
        parts = list(map(self._part, inner.chained_optimizers, accumulated(inner, model, self._norm_groups)))
        replicated = replicated_gradients(model, self._captured)
        config, by_layers = get_model_config(model), any(map(is_layer_wise, inner.chained_optimizers))
        groups = create_update_groups(
            timeout,
            tied_embeddings=tied_embeddings,
            sums_over_tensor_ranks=bool(replicated),
            counts_tokens=config.calculate_per_token_loss,
            counts_experts_tokens=config.moe_router_enable_expert_bias,
            gradients=[*(group for source in sources for group in source.groups), *self._logits.groups],
            statistics=[part.group for part in parts],
            weights=[source.group for source in sources if source.region.is_sharded or by_layers],
        )
        self._reductions = GradientReductions(
            model,
            self._captured,
            sources,
            parts,
            replicated,
            groups,
            self._routers,
            self._logits,
            at_once=inner.grads_states_parallel_group_is_shared(),
            count_zeros=inner.config.log_num_zeros_in_grad,
        )
        self.pending = PendingUpdate(self.weights, self._captured, self._reductions.links, timeout.total_seconds())
        """Of the batch whose gradients are being reduced."""
        scaler = next((scaler for scaler in map(scaler_of, inner.chained_optimizers) if scaler), None)
        self.scales = LossScales(scaler, self.weights)
        if has_norm:
            warm_up = functools.partial(
                self._reductions.warm_up, scaled=scaler is not None, per_token=config.calculate_per_token_loss
            )
            self.pending.run_beside(warm_up)
        self._check = GradientCheck() if check_for_nan else None  # Megatron has none where the loss scale is dynamic.
        self._large = LargeGradients(model) if model.ddp_config.check_for_large_grads else None
        self._hyperparameters: list[dict[str, float]] = []
        self._has_norm = has_norm
        self._statistics = Statistics(tuple(0.0 for _ in self._norm_groups), False, None)
        self._scheduler: Any = None
        self.samples = 0
        """Of the batch captured last, over all replicas."""
        self._outcomes: list[UpdateOutcome] = []
        self.outcome: UpdateOutcome | None = None
        """Of the newest finished update."""
        self.skipped = 0
        """Of the updates that ``step`` reported last: how many were skipped. After a drain it reports two."""
        self.reported: int | None = None
        """The newest of the batches whose updates ``step`` reported in its last call; None if it reported none."""
        self._is_released = False
        self._taken_over = ExitStack()
        self._take_over()
        for part in updating if correction is not None else ():
            self._correct(part, correction)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Ours, and not set yet.
            raise AttributeError(name)
        return getattr(self._inner, name)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Report the updates finished since the last call: usually that of the batch before."""
        if self._is_released:
            return self._inner.step()
        outcomes, self._outcomes = self._outcomes, []
        self.skipped = sum(not outcome.successful for outcome in outcomes)
        self.reported = outcomes[-1].batch if outcomes else None
        if not outcomes:
            return True, None, None
        return self.skipped == 0, outcomes[-1].grad_norm, outcomes[-1].num_zeros

    @property
    def largest_attention_logit(self) -> float:
        """On this stage, in the batch updated last; 0 before, and where the config asks for none."""
        return self._logits.largest

    def get_loss_scale(self) -> torch.Tensor:
        """Of the newest weights, one element on the host.

        Megatron's training loop reads it after every call, and from the device would have it when all is computed.
        """
        return self._inner.get_loss_scale() if self._is_released else self.scales.newest_on_host()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale of the batch that is computed, or else of the weights in use."""
        is_ours = self.scales.by_version and not self._is_released
        return self.scales.scaled(loss) if is_ours else self._inner.scale_loss(loss)

    @contextmanager
    def computing(self, batch: int) -> Iterator[None]:
        """Inside, ``scale_loss`` takes the loss scale of ``batch``; routers count, and attention records, for it."""
        self._routers.use(batch)
        with self.scales.computing(batch), self._logits.computing(batch):
            yield

    def drive(self, scheduler: Any) -> DrivenScheduler:
        """Take over Megatron's learning-rate schedule; returns what its training loop may hold."""
        self._scheduler = scheduler
        return DrivenScheduler(scheduler, lambda: None if self._is_released else self.samples)

    @contextmanager
    def synchronous(self) -> Iterator[None]:
        """Inside, a batch is computed with the newest weights and updated; after it, the delay begins anew."""
        self.weights.forget_older()
        if self._correction is not None:
            self._correction.delayed = False
        try:
            yield
        finally:
            if self._correction is not None:
                self._correction.delayed = True
        self.weights.forget_older()

    def begin(self, batch: int, *, samples: int, num_tokens: torch.Tensor | None) -> None:
        """Keep what the update of ``batch`` depends on, right before its gradients are captured.

        Args:
            batch: whose gradients have been accumulated.
            samples: in the batch, over all replicas; what the learning-rate schedule counts.
            num_tokens: on this rank, where the loss is a mean over tokens.
        """
        self._hyperparameters = [hyperparameters_of(group) for group in self._inner.param_groups]
        self.samples = samples
        if self._check is not None:
            self._check.begin(batch)
        if self._large is not None:
            self._large.ask()
        self._routers.capture(batch)
        self._logits.capture(batch)
        self._reductions.num_tokens = num_tokens
        scale = self.scales.of(batch)
        if scale is not None:
            self._reductions.inverse_scale = scale.double().reciprocal().float()
        if self._scheduler is not None:
            self._scheduler.step(increment=samples)

    def finish(self, batch: int) -> UpdateOutcome | None:
        """Update with the gradients of ``batch``, unless that is done already.

        Raises:
            RuntimeError: a gradient is not finite and Megatron was asked to check; noted where Megatron notes it.
        """
        if batch != self.pending.batch:
            return self.outcome
        with self.pending.apply() as results, self._hyperparameters_of_batch():
            if self._has_norm:
                self._statistics = results[Reduction.NORM]
            if self._check is not None:
                norms = self._statistics.norms if self._has_norm else None
                self._check.require(batch, norms=norms, gradients=self._captured.kept)
            forget_shards_of_weights(self._model)
            successful, norm, zeros = self._step_of_megatron()
            # Megatron asks only ranks with weights that are trained, and all of them for the answer.
            successful = successful and not (norm or 0.0) > self._inner.config.grad_norm_skip_threshold
            self._routers.update()
            self._logits.update()
            self.outcome = UpdateOutcome(batch, successful, norm if self._has_norm else None, zeros)
        self._inner.zero_grad()
        self._outcomes.append(self.outcome)
        self.scales.updated()
        if not self.outcome.successful and self._scheduler is not None:
            self._scheduler.step(increment=-self.samples)
        return self.outcome

    def settle(self) -> None:
        """Finish what is pending and point the model at the newest weights."""
        if self.pending.batch is not None:
            self.finish(self.pending.batch)
        if self._check is not None:
            self._check.settle()
        if self._large is not None:
            self._large.answer()
        self.weights.use_newest()

    def release(self) -> None:
        """Give Megatron's optimizer and gradient buffers their own methods back, as after `settle`; the last call.

        After an error, too, the model is left with the newest weights: those that all stages have, or one more.
        """
        self._is_released = True
        self._taken_over.close()
        self.weights.use_newest()
        self._routers.release()
        self._logits.release()
        self.pending.close()

    def _part(self, optimizer: Any, found: Accumulated) -> Part:
        """The captured counterparts of the gradients of ``optimizer``, which stay where they are."""
        pairs = [(parameter, self._captured.view_of(gradient)) for parameter, gradient in found.gradients]
        self._main_gradients[optimizer] = pairs
        for_norms = [list(map(self._captured.view_of, gradients)) for gradients in found.for_norms]
        return Part([gradient for _, gradient in pairs], for_norms, statistics_group(optimizer))

    def _take_over(self) -> None:
        """Give Megatron's step what the chain has found out, where it would ask all ranks."""
        inner = self._inner
        self._step_of_megatron = inner.step
        self._replace(inner, "step", _refuse_to_step)
        for optimizer in inner.chained_optimizers:
            self._replace(optimizer, "prepare_grads", functools.partial(self._prepare_grads, optimizer))
        self._replace(inner, "get_grad_norm", lambda: self._norm_of(None))
        if len(self._norm_groups) > 1:
            self._replace(inner, "_get_grad_norm_for_group", self._norm_of)
        self._replace(inner, "count_zeros", lambda: self._statistics.zeros)
        # Captured gradients are zeroed when they are captured; before, a reduction may still read them.
        for buffer in buffers_of(self._model):
            self._replace(buffer, "reset", lambda: None)

    def _norm_of(self, group: str | None) -> float:
        return self._statistics.norms[self._norm_groups.index(group)]

    def _correct(self, part: Any, correction: Correction) -> None:
        """Let one of Megatron's optimizers correct the delay."""
        self._taken_over.callback(correction.attach(part.optimizer))
        if isinstance(correction, UpdateLead):
            copy = functools.partial(_copy_ahead, correction, part.optimizer, part._copy_main_params_to_model_params)
            self._replace(part, "_copy_main_params_to_model_params", copy)

    def _replace(self, target: object, name: str, value: object) -> None:
        self._taken_over.enter_context(replace(target, name, value))

    def _prepare_grads(self, optimizer: Any) -> bool:
        """In place of Megatron's; the chain has removed the loss scale and looked for overflows."""
        name = gradient_name(optimizer)
        for parameter, gradient in self._main_gradients[optimizer]:
            setattr(parameter, name, gradient.float() if name == "grad" else gradient)
        scaler = scaler_of(optimizer)
        if scaler is None:
            return False
        scaler.update(self._statistics.found_inf)
        return self._statistics.found_inf

    @contextmanager
    def _hyperparameters_of_batch(self) -> Iterator[None]:
        present = [hyperparameters_of(group) for group in self._inner.param_groups]
        self._set(self._hyperparameters)
        try:
            yield
        finally:
            self._set(present)

    def _set(self, hyperparameters: list[dict[str, float]]) -> None:
        for group, values in zip(self._inner.param_groups, hyperparameters, strict=True):
            group.update(values)


def _device_of(model: torch.nn.Module) -> torch.device:
    """Where the weights are, trained or not.

    Raises:
        ValueError: there are none.
    """
    weight = next(model.parameters(), None)
    if weight is None:
        raise ValueError("this stage has no weights: give it some, or use Megatron's schedule")
    return weight.device


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Megatron's optimizer, also where a loop goes on with that of a pipeline that it has closed.

    Raises:
        ValueError: a pipeline uses it.
    """
    inner = _inner_of(optimizer)
    if inner.step is _refuse_to_step:
        raise ValueError("the optimizer belongs to a pipeline that is in use: close() that one first")
    return inner


def is_scale_of(inner: Any, function: Any) -> bool:
    """Whether ``function`` is ``scale_loss`` of Megatron's optimizer ``inner``, or of a closed pipeline's around it."""
    owner = getattr(function, "__self__", None)
    return owner is not None and _inner_of(owner) is inner and function == owner.scale_loss


def _inner_of(optimizer: Any) -> Any:
    return optimizer._inner if isinstance(optimizer, DelayedOptimizer) else optimizer


def _refuse_to_step() -> None:
    """In place of the step of an optimizer that a pipeline uses."""
    raise RuntimeError("a pipeline updates with this optimizer by itself: call step() of pipeline.optimizer")


def _check_correction(correction: Correction, optimizer: Any) -> None:
    """Whether one of Megatron's optimizers can be corrected.

    Raises:
        ValueError: with the reason and the remedy.
    """
    if gradient_name(optimizer) != "grad":
        raise ValueError("a precision-aware optimizer keeps moments and main weights to itself: correct nothing")
    correction.check(optimizer.optimizer)
    if isinstance(correction, UpdateLead):
        in_place = [getattr(optimizer, name, []) for name in ("fp32_from_fp32_groups", "shard_fp32_groups")]
        if not isinstance(optimizer, megatron_optimizer.MixedPrecisionOptimizer) or any(map(any, in_place)):
            raise ValueError(
                "a lead of whole updates needs main weights beside the model's: use bf16 or fp16 for all weights, or "
                "correct with a lead of the moment"
            )


def _copy_ahead(correction: UpdateLead, optimizer: torch.optim.Optimizer, copy: Any) -> None:
    """Megatron's copy of main weights into the model, with those ahead of time."""
    with correction.shown(optimizer):
        copy()
