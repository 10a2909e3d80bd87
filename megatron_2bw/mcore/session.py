"""One training run under one of our schedules."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_timers
from megatron.training.utils import print_rank_0

from megatron_2bw.mcore import groups
from megatron_2bw.mcore.failure import end_at_once_on_errors
from megatron_2bw.mcore.optimizer import DelayedOptimizer
from megatron_2bw.mcore.stage import Call, DelayedStage, FlushedStage
from megatron_2bw.mcore.trace import write_trace
from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.links import Links
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.registry import build, canonical_name
from megatron_2bw.schedule.validate import validate


class Session:
    """Holds what lives longer than one call: the executor, its groups, the delayed optimizer.

    Args:
        name: the schedule, as typed.
    """

    current: Session | None = None
    """The run of this process; hooks find it here because Megatron calls them as bare functions."""

    def __init__(self, name: str) -> None:
        args = get_args()
        self.schedule_name = canonical_name(name)
        self.is_delayed = any(build(self.schedule_name, stages=2, microbatches=2).delay)
        """Whether updates come after the call of their batch."""
        self.optimizer: DelayedOptimizer | None = None
        self.recorder: Recorder | None = None
        self.executor: Executor | None = None
        self._stage: DelayedStage | FlushedStage | None = None
        self._transfers: groups.TransferGroups | None = None
        self._timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self._tied = False
        self._batch = 0
        self._undo = end_at_once_on_errors()

    def delay(self, inner: Any, model_chunks: list[Any]) -> Any:
        """Wrap Megatron's optimizer where the schedule delays updates."""
        if not self.is_delayed:
            return inner
        (model,) = model_chunks
        args = get_args()
        # The model decides, as in Megatron; the flag is only what scripts usually build it from.
        gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        self._tied = bool(getattr(gpt, "share_embeddings_and_output_weights", False))
        update_groups = groups.create_update_groups(self._timeout, tied_embeddings=self._tied)
        self.optimizer = DelayedOptimizer(
            inner, model, update_groups, check_for_nan=args.check_for_nan_in_loss_and_grad
        )
        return self.optimizer

    def forward_backward(self, stock: Callable[..., Any], **keywords: Any) -> list[Any]:
        """Megatron's forward-backward function: one batch, or evaluation by the stock schedule."""
        if keywords.get("forward_only"):
            return stock(**keywords)
        call = Call.of(keywords)
        if self.executor is None:
            self._start(call)
        if call.num_microbatches != self.executor.schedule.microbatches:
            raise RuntimeError(
                f"the number of microbatches changed from {self.executor.schedule.microbatches} to "
                f"{call.num_microbatches}; a run under --pipeline-schedule {self.schedule_name} keeps one number"
            )
        timers = self._stage.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=False)
        self._stage.begin(call)
        self.executor.run(self._batch, last=self._is_last_batch())
        self._batch += 1
        if timers is not None:
            timers("forward-backward").stop()
        return self._stage.losses

    def settle(self) -> None:
        """Before anything looks at the weights: finish the pending update, show the newest version."""
        if self.optimizer is not None:
            self.optimizer.settle()

    def close(self) -> None:
        """End of the run, planned or not: nothing pending, nothing in flight, trace written."""
        self.settle()
        if self.executor is not None:
            self.executor.abandon()
            path = get_args().pipeline_trace
            if path is not None:
                write_trace(path, self.executor.schedule, self.recorder, self._transfers)
            self._stage.config.batch_p2p_sync = self._batch_p2p_sync
        self.end_current()

    @classmethod
    def end_current(cls) -> None:
        """Forget the run of this process, if there is one."""
        if cls.current is not None:
            cls.current._undo()
        cls.current = None

    def _start(self, call: Call) -> None:
        args = get_args()
        # Without a barrier of all ranks around every log line; see `Timer.set_barrier_group`.
        get_timers()("interval-time", log_level=0).set_barrier_group(groups.create_lonely_group())
        config = get_model_config(call.model)
        self._batch_p2p_sync = config.batch_p2p_sync
        if self.is_delayed:
            if config.finalize_model_grads_func is not finalize_model_grads:
                raise RuntimeError(
                    "config.finalize_model_grads_func is not Megatron's own, and 2bw does not call it: it reduces a "
                    "captured copy; use --pipeline-schedule 1f1b-flush, or leave the function unset"
                )
            config.batch_p2p_sync = False
            if torch.cuda.is_available():
                print_rank_0(
                    f"megatron_2bw: batch_p2p_sync is off under --pipeline-schedule {self.schedule_name}: "
                    "a transfer of evaluation would wait for every stream of the device"
                )
        reductions = [Reduction.GRADIENTS, Reduction.NORM]
        if self._tied:
            reductions.insert(1, Reduction.EMBEDDING)
        schedule = lower(
            build(self.schedule_name, stages=args.pipeline_model_parallel_size, microbatches=call.num_microbatches),
            reductions,
        )
        validate(schedule)
        self._transfers = groups.create_transfer_groups(self._timeout)
        links = Links(
            forward_group=self._transfers.forward,
            backward_group=self._transfers.backward,
            ranks=self._transfers.ranks,
        )
        self._stage = FlushedStage(call) if self.optimizer is None else DelayedStage(call, self.optimizer)
        if args.pipeline_trace is not None:
            self.recorder = Recorder(self._stage.boundary.device)
        rank = self._transfers.ranks.index(args.rank)
        self.executor = Executor(schedule, rank, self._stage, links, self.recorder)

    @staticmethod
    def _is_last_batch() -> bool:
        # Exits by signal or duration are not known here; `close` drops what ran ahead then.
        args = get_args()
        done = args.curr_iteration + 1
        leaves = bool(args.exit_interval and done % args.exit_interval == 0)
        return leaves or done >= args.train_iters or done in (args.phase_transition_iterations or ())
