"""One training run under one of our schedules."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_timers
from megatron.training.utils import print_rank_0

from megatron_2bw.mcore import groups
from megatron_2bw.mcore.batches import BatchSizes
from megatron_2bw.mcore.checkpoint import Checkpoints
from megatron_2bw.mcore.clock import SharedClock
from megatron_2bw.mcore.exits import ExitRequests
from megatron_2bw.mcore.failure import end_at_once_on_errors
from megatron_2bw.mcore.moe_metrics import MoEMetrics
from megatron_2bw.mcore.monitor import PipelineMonitor
from megatron_2bw.mcore.optimizer import DelayedOptimizer
from megatron_2bw.mcore.random_state import RandomState
from megatron_2bw.mcore.stage import Call, DelayedStage, FlushedStage
from megatron_2bw.mcore.trace import write_trace
from megatron_2bw.runtime.errors import place_of, waiting_in
from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.links import Links
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.lowering import lower, with_gradient_copy
from megatron_2bw.schedule.registry import build, canonical_name
from megatron_2bw.schedule.validate import validate

_KEPT, _KEPT_FOR_TRACE = 20_000, 200_000
"""Actions, the newest ones."""


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
        self.monitor: PipelineMonitor | None = None
        self.executor: Executor | None = None
        """Of the present number of microbatches; the next one begins when this one has drained."""
        self.exits: ExitRequests | None = None
        """Where the schedule must not wait for early exits to be agreed on."""
        self._stage: DelayedStage | FlushedStage | None = None
        self._moe_metrics: MoEMetrics | None = None
        """Of a model with experts, where forwards run ahead of Megatron's report."""
        self._transfers: groups.TransferGroups | None = None
        self._timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self._tied = False
        self._batch = 0
        self._calls = 0
        self._stage_index = parallel_state.get_pipeline_model_parallel_rank()
        self._batch_sizes = BatchSizes(args)
        self._links: Links | None = None
        self._clock: SharedClock | None = None
        """Where a trace is to be written."""
        self._undo = end_at_once_on_errors(self._where)

    def delay(self, inner: Any, model_chunks: list[Any]) -> Any:
        """Wrap Megatron's optimizer where the schedule delays updates."""
        if not self.is_delayed:
            return inner
        (model,) = model_chunks
        args = get_args()
        # The model decides, as in Megatron; the flag is only what scripts usually build it from.
        gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        self._tied = bool(getattr(gpt, "share_embeddings_and_output_weights", False))
        self.optimizer = DelayedOptimizer(
            inner,
            model,
            timeout=self._timeout,
            tied_embeddings=self._tied,
            second_buffer=args.pipeline_gradient_buffers == 2,
            check_for_nan=args.check_for_nan_in_loss_and_grad,
        )
        Checkpoints.current = Checkpoints()
        return self.optimizer

    def forward_backward(self, stock: Callable[..., Any], **keywords: Any) -> list[Any]:
        """Megatron's forward-backward function: one batch, or evaluation by the stock schedule."""
        if keywords.get("forward_only"):
            return stock(**keywords)
        call = Call.of(keywords)
        if self._stage is None:
            self._start(call)
        self._use_executor_of(call.num_microbatches)
        timers = self._stage.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=False)
        self._stage.begin(call)
        with get_timers().inside_call():
            self.executor.run(self._batch, last=self._batch_sizes.ends_with(call.num_microbatches))
        if self._moe_metrics is not None:
            self._moe_metrics.end(self._batch)
        if self.monitor is not None:
            self.monitor.after(self.executor.schedule)
        self._batch += 1
        self._calls += 1
        if timers is not None:
            timers("forward-backward").stop()
        return self._stage.losses

    def settle(self) -> None:
        """Before anything looks at the weights: finish the pending update, show the newest version."""
        if self.optimizer is not None:
            with waiting_in(f"stage {self._stage_index}: the update that is pending after batch {self._batch - 1}"):
                self.optimizer.settle()

    def interrupt(self) -> None:
        """Before an evaluation or a save: settle, and do not count its time as that of a batch."""
        self.settle()
        if self.monitor is not None:
            self.monitor.interrupted = True

    def logs_this_batch(self) -> bool:
        """Whether Megatron writes the batch that has just run to its log, or to Tensorboard."""
        args = get_args()
        done = args.curr_iteration + 1
        to_tensorboard = bool(args.tensorboard_dir) and done % args.tensorboard_log_interval == 0
        return self._calls == 1 or done % args.log_interval == 0 or to_tensorboard

    def random_state(self) -> RandomState | None:
        """The random state before the next batch, if forwards of that batch have run; None if it is the present."""
        ahead = self._stage.random_state if isinstance(self._stage, DelayedStage) else None
        return ahead[1] if ahead is not None and ahead[0] == self._batch else None

    def close(self) -> None:
        """End of the run, planned or not: nothing pending, nothing in flight, trace written."""
        self.settle()
        for gathering in (self.exits, self.monitor):
            if gathering is not None:
                gathering.close()
        if self.executor is not None:
            self.executor.abandon()
            path = get_args().pipeline_trace
            if path is not None:
                write_trace(path, self.executor.schedule, self.recorder, self._transfers, self._clock)
            self._stage.config.batch_p2p_sync = self._batch_p2p_sync
        self.end_current()

    @classmethod
    def end_current(cls) -> None:
        """Forget the run of this process, if there is one."""
        if cls.current is not None:
            cls.current._undo()
            if cls.current._moe_metrics is not None:
                cls.current._moe_metrics.close()
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
        self._transfers = groups.create_transfer_groups(self._timeout)
        self._links = Links(
            forward_group=self._transfers.forward,
            backward_group=self._transfers.backward,
            ranks=self._transfers.ranks,
            per_boundary=1 + args.pipeline_extra_in_flight,
        )
        if self.optimizer is None:
            self._stage = FlushedStage(call)
        else:
            if config.num_moe_experts is not None:
                self._moe_metrics = MoEMetrics(self.logs_this_batch)
            self._stage = DelayedStage(call, self.optimizer, self._moe_metrics)
            self._batch = self.optimizer.weights.newest  # 1 where a checkpoint brought the version before, too.
        if args.pipeline_trace is not None or args.log_pipeline:
            self.recorder = self._stage.recorder = Recorder(
                self._stage.boundary.device, limit=_KEPT if args.pipeline_trace is None else _KEPT_FOR_TRACE
            )
            if args.pipeline_trace is not None:
                self._clock = SharedClock(self._transfers)
            if args.log_pipeline:
                self.monitor = PipelineMonitor(self.recorder, self._timeout)
            if self.optimizer is not None:
                self.optimizer.record(self.recorder)
        if self.is_delayed and (args.exit_signal_handler or args.exit_duration_in_mins):
            self.exits = ExitRequests(self._timeout)

    def _use_executor_of(self, microbatches: int) -> None:
        """Go on with this number of microbatches; the pipeline must be empty when it changes."""
        if self.executor is not None:
            present = self.executor.schedule.microbatches
            if microbatches == present:
                return
            if self.executor.is_ahead:
                raise RuntimeError(
                    f"batch {self._batch} (counted from the start of the run) has {microbatches} microbatches, but "
                    f"forwards ran ahead into it as into one of {present}: nothing that Megatron's calculator of "
                    "microbatches says announced it"
                )
        reductions = [Reduction.GRADIENTS, Reduction.NORM]
        if self._tied:
            reductions.insert(1, Reduction.EMBEDDING)
        stages = get_args().pipeline_model_parallel_size
        schedule = build(
            self.schedule_name,
            stages=stages,
            microbatches=microbatches,
            extra_in_flight=get_args().pipeline_extra_in_flight,
        )
        if self.optimizer is not None:
            schedule = with_gradient_copy(schedule, self.optimizer.gradient_copy)
        schedule = lower(schedule, reductions)
        validate(schedule)
        self.executor = Executor(schedule, self._stage_index, self._stage, self._links, self.recorder)

    def _where(self) -> str:
        """What this rank is doing, for the message of a failure."""
        at = None if self.executor is None else self.executor.at
        if at is not None:
            return f"at {place_of(at)}"
        if not self._calls:
            return f"stage {self._stage_index}: before its first batch"
        # In Megatron's training loop, which adds up losses of replicas, or in evaluation, or saving.
        return f"stage {self._stage_index}: between the calls of batches {self._batch - 1} and {self._batch}"
