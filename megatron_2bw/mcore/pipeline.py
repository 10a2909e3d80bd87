"""A schedule on one rank, batch after batch: needs Megatron-Core, and no training loop of Megatron's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_2bw.mcore import groups
from megatron_2bw.mcore.configs import check_configs
from megatron_2bw.mcore.failure import end_at_once_on_errors, end_at_once_where_nccl_fails
from megatron_2bw.mcore.receives import are_late
from megatron_2bw.mcore.stages.mirror import Mirror
from megatron_2bw.mcore.stages.mirrored_stage import MirroredStage
from megatron_2bw.mcore.stages.moe_metrics import MoEMetrics
from megatron_2bw.mcore.stages.random_state import RandomState
from megatron_2bw.mcore.stages.stage import Call, DelayedStage, FlushedStage
from megatron_2bw.mcore.symbols import replace
from megatron_2bw.mcore.updates.driven_scheduler import DrivenScheduler
from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer, is_scale_of, unwrapped_optimizer
from megatron_2bw.runtime.corrections import Correction
from megatron_2bw.runtime.errors import place_of, waiting_in
from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.gloo_workers import finish_at_exit
from megatron_2bw.runtime.links import ALL_LANES, LANES, Links
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.registry import (
    BIDIRECTIONAL,
    DELAYED,
    PER_MICROBATCH,
    TWO_BW,
    WITHOUT_DELAY,
    build,
    canonical_name,
    check_options,
)
from megatron_2bw.schedule.validation.feasible import chain_of, lowered_as, refusal
from megatron_2bw.schedule.validation.validate import validate


class Pipeline:
    """Trains one stage of a model under one of our schedules.

    Collective over all ranks, which create it and run every batch together.

    Args:
        name: of the schedule, for example ``"2bw"``.
        model: this rank's stage, in Megatron-Core's DistributedDataParallel.
        optimizer: what Megatron-Core's ``get_megatron_optimizer`` returned for it.
        mirrored: gems, chimera and mixpipe: this rank's stage of the pipeline that goes the other way, likewise in
            DistributedDataParallel; see `megatron_2bw.build_mirrored`.
        extra_in_flight: 2bw: activations kept per stage boundary beyond d-s.
        delayed_microbatches: 2bw: how many of a batch are computed with the older weights; None for all.
        k, gamma: of `schedule.systems.mixpipe.mixpipe`.
        gradient_buffers: 2bw: 2 keeps finished gradients apart from those of the next batch, 1 does not.
        late_receives: see `Schedule`; None: on a GPU. Without them ranks may wait for each other for ever where
            something waits for the whole GPU, as some norms of Transformer Engine do, and kernels that are first used
            late. Always so with experts, whose kernels depend on the data.
        correction: 2bw: of updates for their delay; None for the paper's exact rule.
        timeout: of every transfer and every reduction.
        logs_this_batch: whether the losses of experts are reported for the batch that has just ended.

    Raises:
        ValueError: an unknown schedule, or a config that it does not work with, with the remedy.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        mirrored: torch.nn.Module | None = None,
        extra_in_flight: int = 0,
        delayed_microbatches: int | None = None,
        k: int | None = None,
        gamma: int | None = None,
        gradient_buffers: int = 2,
        late_receives: bool | None = None,
        correction: Correction | None = None,
        timeout: timedelta = timedelta(minutes=10),
        logs_this_batch: Callable[[], bool] = lambda: True,
    ) -> None:
        optimizer = unwrapped_optimizer(optimizer)
        self.schedule_name = canonical_name(name)
        self.is_delayed = self.schedule_name in DELAYED
        """Whether updates come after the call of their batch."""
        check_configs(self.schedule_name, model, optimizer)
        self._options = {
            "extra_in_flight": extra_in_flight,
            "delayed_microbatches": delayed_microbatches,
            "k": k,
            "gamma": gamma,
        }
        check_options(self.schedule_name, self._options)
        _check_keywords(self.schedule_name, mirrored, correction, gradient_buffers)
        self.stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.batch = 0
        """The next one; counted from the start of the run."""
        self.batches_run = 0
        self.executor: Executor | None = None
        """Of the present number of microbatches and their order; the next one begins when this one has drained."""
        self.recorder: Recorder | None = None
        """Told what this rank does, if it is there before the first batch."""
        self.transfers: groups.TransferGroups | None = None
        """From the first batch on."""
        self.config = get_model_config(model)
        has_experts = self.config.num_moe_experts is not None
        self.late_receives = are_late(late_receives, kernels_depend_on_data=has_experts)
        """Whether an action may wait for the whole device."""
        self._model, self._mirrored, self._timeout = model, mirrored, timeout
        self._logs_this_batch = logs_this_batch
        self._stage_index = parallel_state.get_pipeline_model_parallel_rank()
        self._stage: DelayedStage | FlushedStage | None = None
        self._links: Links | None = None
        self._moe_metrics: MoEMetrics | None = None
        """Of a model with experts, where forwards run ahead of the report of their batch."""
        self._inner = self.optimizer = optimizer
        self._tied = False
        if self.is_delayed:
            # Neither versions nor reductions depend on the number of microbatches, which comes with the first batch.
            promised = build(self.schedule_name, stages=self.stages, microbatches=1)
            # The model decides, as in Megatron; a flag is only what scripts usually build it from.
            gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
            # Multi-token prediction reads the embedding on the last stage, too. What it keeps in the process for its
            # loss and the log needs no care: there, no forward runs ahead of a backward.
            self._tied = bool(getattr(gpt, "share_embeddings_and_output_weights", False) or self.config.mtp_num_layers)
            self.optimizer = DelayedOptimizer(
                optimizer,
                model,
                timeout=timeout,
                versions=promised.weight_versions[self._stage_index],
                has_norm=Reduction.NORM in promised.reductions,
                tied_embeddings=self._tied,
                second_buffer=gradient_buffers == 2 and self.schedule_name not in PER_MICROBATCH,
                check_for_nan=model.ddp_config.check_for_nan_in_grad,
                correction=correction,
            )
        self.beside: str | None = None
        """Megatron's function, between calls, that is evaluating or saving."""
        self._is_closed = False
        finish_at_exit()
        self._undo = contextlib.ExitStack()
        if self.config.mtp_num_layers:
            self._undo.enter_context(_keeping_gradients_of_lookups(model))
        alive = weakref.WeakMethod(self.where)  # Of a loop that lets go of this after an error, nothing may stay.
        self._undo.callback(end_at_once_on_errors(lambda: where() if (where := alive()) else "after a pipeline's end"))
        if self.is_delayed:
            self._undo.callback(self.optimizer.release)
            self._undo.callback(self._put_back_scale, self.config.grad_scale_func)

    def drive(self, scheduler: Any) -> Any:
        """Take over Megatron's ``OptimizerParamScheduler``, which must count samples.

        Returns:
            what the training loop steps in its place, by the samples of a batch.
        """
        inner = scheduler.inner if isinstance(scheduler, DrivenScheduler) else scheduler
        return self.optimizer.drive(inner) if self.is_delayed else inner

    def forward_backward(
        self, *, left: int | None = None, synchronous: bool = False, **keywords: Any
    ) -> list[dict[str, torch.Tensor]]:
        """Run one batch; what Megatron-Core's forward-backward functions take and return.

        Under a delay, forwards of the next batch may run as well, with data from the same iterator.

        Args:
            left: batches after this one that may run ahead, as the end of training, or another number of
                microbatches, comes after them; with 0, the pipeline is empty afterwards. None for as many as it takes.
                Forwards of pipedream run d-1 batches ahead, so the end has to be known so long before.
            synchronous: 2bw: this batch without a delay, as 1f1b-flush runs it. For the first batches of a training:
                the delay costs most while the loss falls fast. After others, the pipeline must be empty. Its update
                is done when the call returns, and ``step`` after the next delayed batch has none to report.
            **keywords: ``forward_step_func``, ``data_iterator``, ``model``, ``num_microbatches``,
                ``seq_length``, ``micro_batch_size``.

        Returns:
            On the last stage, what ``forward_step_func`` reported of each microbatch.

        Raises:
            ValueError: evaluation, which is left to Megatron-Core's own function; ``synchronous`` without a delay of
                one batch; or a ``left`` that the call before did not announce.
            TypeError: a keyword that Megatron-Core's functions do not have.
            RuntimeError: the pipeline is closed, or the call before failed in the middle of its batch.
        """
        for name in ("forward_only", "collect_non_loss_data"):
            if keywords.get(name):
                raise ValueError(
                    f"{name} is set: evaluate with Megatron-Core's get_forward_backward_func(), after settle(), which "
                    "shows it the newest weights"
                )
        if synchronous and self.schedule_name not in TWO_BW:
            raise ValueError(
                f"{self.schedule_name} has no delay of one batch to leave out: use 2bw, or not synchronous"
            )
        if left is not None and left < 0:
            raise ValueError(
                f"left {left}: the batch before this one was announced as the last; give 0 or more, or None"
            )
        if self._is_closed:
            raise RuntimeError("the pipeline is closed: make another one")
        if self.executor is not None and self.executor.at is not None:
            raise RuntimeError(
                f"the call before failed {self.where()}, in the middle of its batch, so no other can follow: end the "
                "job, and go on from a checkpoint"
            )
        call = Call.of(keywords, self.schedule_name)
        if self._stage is None:
            self.start(call)
        self._use_executor_of(call.num_microbatches, WITHOUT_DELAY if synchronous else self.schedule_name)
        try:
            self._stage.begin(call)
            with self.optimizer.synchronous() if synchronous else contextlib.nullcontext():
                self.executor.run(self.batch, left=0 if synchronous else left)
        finally:
            self._stage.end()
        if self._moe_metrics is not None:
            self._moe_metrics.end(self.batch)
        self.batch += 1
        self.batches_run += 1
        return self._stage.losses

    def settle(self) -> None:
        """Before anything looks at the weights: finish the pending update, show the newest version."""
        if self.is_delayed:
            with waiting_in(f"stage {self._stage_index}: the update that is pending after batch {self.batch - 1}"):
                self.optimizer.settle()

    def close(self) -> None:
        """End of the run, early or not: nothing pending, nothing in flight.

        Waits for the other stages, so it is no way to clean up after an error; that is `forget`.
        """
        self.settle()
        if self.executor is not None:
            self.executor.abandon()
        self.forget()

    def forget(self) -> None:
        """Give process, config and optimizer back what they had before; waits for nobody."""
        self._is_closed = True
        self._undo.close()

    def _put_back_scale(self, function: Callable[..., Any] | None) -> None:
        """The function from before ours, which we or the loop may have set."""
        if self.config.grad_scale_func == self.optimizer.scale_loss:
            self.config.grad_scale_func = function

    def random_state(self) -> RandomState | None:
        """The random state before the next batch, if forwards of that batch have run; None if it is the present."""
        return self._stage.random_states.get(self.batch) if isinstance(self._stage, DelayedStage) else None

    def where(self) -> str:
        """What this rank is doing, for the message of a failure."""
        at = None if self.executor is None else self.executor.at
        if at is not None:
            return f"at {place_of(at)}"
        if not self.batches_run:
            return f"stage {self._stage_index}: before its first batch"
        # In the training loop, which adds up losses of replicas.
        beside = "" if self.beside is None else f", in {self.beside}"
        return f"stage {self._stage_index}: between the calls of batches {self.batch - 1} and {self.batch}{beside}"

    def _waiting(self, failed: dist.ProcessGroup) -> str:
        """What this rank waits for where NCCL's group ``failed`` did."""
        receive = None
        with contextlib.suppress(RuntimeError):  # A device on which something else has failed says nothing.
            receive = self._links.waiting(failed)
        return receive or self.where().removeprefix("at ")

    def start(self, call: Call) -> None:
        """Before the first batch, whose arguments ``call`` holds."""
        self._check_functions()
        self.transfers = groups.create_transfer_groups(self._timeout, LANES if self._mirrored is None else ALL_LANES)
        self._links = Links(
            groups=self.transfers.lanes,
            ranks=self.transfers.ranks,
            device=next(call.model.parameters()).device,
            per_boundary=1 + self._options["extra_in_flight"],
        )
        self._undo.callback(end_at_once_where_nccl_fails(weakref.WeakMethod(self._waiting)))
        if self._mirrored is not None:
            mirror = Mirror(self._model, self._mirrored, self._timeout)
            self._stage = MirroredStage(call, self.schedule_name, mirror)
            return
        if not self.is_delayed:
            self._stage = FlushedStage(call, self.schedule_name)
            return
        # A transfer of evaluation would wait for every stream of the device.
        self._undo.enter_context(replace(self.config, "batch_p2p_sync", False))
        if self.config.num_moe_experts is not None:
            self._moe_metrics = MoEMetrics(self._logs_this_batch)
            self._undo.callback(self._moe_metrics.close)
        self._stage = DelayedStage(call, self.schedule_name, self.optimizer, self._moe_metrics)
        self.optimizer.scales.know()  # A loop may have loaded it.
        self.batch = self.optimizer.weights.newest  # 1 where a checkpoint brought the version before, too.

    def record(self, recorder: Recorder) -> None:
        """From the next batch on, tell ``recorder`` what this rank does. After ``start``, before the first batch."""
        self.recorder = self._stage.recorder = recorder
        if self.is_delayed:
            self.optimizer.pending.recorder = recorder

    @property
    def device(self) -> torch.device:
        """Where activations live."""
        return self._stage.boundary.device

    def _check_functions(self) -> None:
        """The config's functions, which training loops set after the optimizer is there."""
        if not self.is_delayed:
            return
        if self.config.finalize_model_grads_func not in (None, finalize_model_grads):
            raise RuntimeError(
                f"config.finalize_model_grads_func is not Megatron's own, and {self.schedule_name} does not call it: "
                "it reduces a captured copy; use 1f1b-flush, or leave the function unset"
            )
        if is_scale_of(self._inner, self.config.grad_scale_func):
            self.config.grad_scale_func = self.optimizer.scale_loss
        if self.optimizer.scales.by_version and self.config.grad_scale_func is None:
            raise RuntimeError(
                "the optimizer scales losses, and config.grad_scale_func is not set: set it to optimizer.scale_loss"
            )
        for name in ("moe_grad_scale_func", "mtp_grad_scale_func"):  # Megatron 0.18 has none.
            if self.optimizer.scales.by_version and getattr(self.config, name, None) is not None:
                raise RuntimeError(
                    f"config.{name} is set: it knows the loss scale of the newest weights, and a batch has that of the "
                    "version it is computed with; leave it unset, and grad_scale_func scales those losses, too"
                )

    def _use_executor_of(self, microbatches: int, name: str) -> None:
        """Go on with this number of microbatches in this order; the pipeline must be empty when either changes."""
        if self.executor is not None:
            present = self.executor.schedule
            if (microbatches, name) == (present.microbatches, present.name):
                return
            if self.executor.is_ahead:
                raise RuntimeError(
                    f"batch {self.batch} (counted from the start of the run) has {microbatches} microbatches under "
                    f"{name}, but forwards ran ahead into it as into one of {present.microbatches} under "
                    f"{present.name}: the batch before it was not announced as the last of its kind"
                )
        how = self._lowering(microbatches, name)
        schedule = lowered_as(name, **how)
        if refusal(name, **how):
            validate(schedule)  # Says where.
        self.executor = Executor(schedule, self._stage_index, self._stage, self._links, self.recorder)

    def _lowering(self, microbatches: int, name: str) -> dict[str, Any]:
        """What `lowered_as` takes; ``checks.lowering_of`` foretells it."""
        return {
            "stages": self.stages,
            "microbatches": microbatches,
            "copy": self.optimizer.pending.captured.copy if self.is_delayed else None,
            "reductions": chain_of(tied=self._tied),
            "late_receives": self.late_receives,
            **(self._options if name == self.schedule_name else {}),
        }


def _check_keywords(
    schedule: str,
    mirrored: torch.nn.Module | None,
    correction: Correction | None,
    gradient_buffers: int,
) -> None:
    if isinstance(correction, str):
        raise ValueError(
            f"correction {correction!r}: give MomentLead(steps), or UpdateLead, of megatron_2bw.runtime.corrections"
        )
    if correction and schedule not in TWO_BW:
        raise ValueError(f"{schedule} has no delay of one batch to correct: leave correction out, or use 2bw")
    if (mirrored is None) is (schedule in BIDIRECTIONAL):
        raise ValueError(
            f"{schedule} needs a mirrored stage: pass mirrored=megatron_2bw.build_mirrored(...)"
            if mirrored is None
            else f"{schedule} has no mirrored stage: leave mirrored out"
        )
    if gradient_buffers not in (1, 2):
        raise ValueError(f"gradient_buffers {gradient_buffers}: use 1 or 2")
    if gradient_buffers == 1 and schedule not in TWO_BW:
        raise ValueError(f"{schedule} keeps no finished gradients: leave gradient_buffers out, or use 2bw")


@contextlib.contextmanager
def _keeping_gradients_of_lookups(model: torch.nn.Module) -> Iterator[None]:
    """Inside, a tied weight that multi-token prediction also looks up gets both gradients under accumulation fusion.

    The fused product adds that of the output to ``main_grad``, whereupon Megatron's hook drops what autograd found for
    the lookups, unless the weight is marked; ``setup_embeddings_and_output_layer`` marks it without pipelining alone.
    """
    gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    is_tied = getattr(gpt, "mtp_process", False) and getattr(gpt, "share_embeddings_and_output_weights", False)
    weight = gpt.shared_embedding_or_output_weight() if is_tied else None
    if weight is None or getattr(weight, "zero_out_wgrad", False):
        yield
        return
    weight.zero_out_wgrad = True
    try:
        yield
    finally:
        del weight.zero_out_wgrad
