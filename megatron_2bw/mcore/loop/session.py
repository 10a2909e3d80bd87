"""One run of Megatron's training loop under one of our schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.training import get_args, get_timers
from megatron.training.utils import print_rank_0

from megatron_2bw.mcore.loop.arguments import has_late_receives, options_of
from megatron_2bw.mcore.loop.batches import BatchSizes
from megatron_2bw.mcore.loop.exits import ExitRequests
from megatron_2bw.mcore.monitoring.clock import SharedClock
from megatron_2bw.mcore.monitoring.monitor import PipelineMonitor
from megatron_2bw.mcore.monitoring.trace import write_trace
from megatron_2bw.mcore.pipeline import Pipeline
from megatron_2bw.mcore.stages.stage import Call
from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer
from megatron_2bw.runtime.corrections import CORRECTIONS
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.registry import BIDIRECTIONAL

_KEPT, _KEPT_FOR_TRACE = 20_000, 200_000
"""How many of its newest actions a recorder keeps, for the log and for a trace."""


class Session:
    """A pipeline, and what Megatron's training loop does around its batches: flags, log, exits, checkpoints.

    Args:
        name: the schedule, as typed.
        inner: Megatron's optimizer.
        model_chunks: the model, as Megatron's training loop holds it.
        mirrored: this rank's second stage, in a bidirectional pipeline.
    """

    def __init__(self, name: str, inner: Any, model_chunks: list[Any], mirrored: Any = None) -> None:
        args = get_args()
        if name in BIDIRECTIONAL and mirrored is None:
            raise RuntimeError(
                f"--pipeline-schedule {name} needs a second stage on every rank, and this training script builds its "
                "model in a way of its own; build it with Megatron's get_model, or use --pipeline-schedule 1f1b-flush"
            )
        (model,) = model_chunks
        # Our groups get Megatron's timeout after initialization with its own; nothing here may give up before they do.
        self._timeout = max(
            timedelta(minutes=args.distributed_timeout_minutes),
            timedelta(seconds=args.distributed_timeout_seconds_after_init or 0),
        )
        self.pipeline = Pipeline(
            name,
            model,
            inner,
            mirrored=mirrored,
            **options_of(args),
            gradient_buffers=args.pipeline_gradient_buffers,
            late_receives=has_late_receives(args),
            correction=None if args.delay_correction == "none" else CORRECTIONS[args.delay_correction](args.delay_lead),
            timeout=self._timeout,
            logs_this_batch=self.reports_experts,
        )
        self.monitor: PipelineMonitor | None = None
        self.exits: ExitRequests | None = None
        """Where the schedule must not wait for early exits to be agreed on."""
        self._batch_sizes = BatchSizes.of_training(args)
        self._clock: SharedClock | None = None
        """Where a trace is to be written."""
        self.has_updated = False
        """Whether an update is known that was not skipped, of a delayed schedule."""
        self._foreseen = 0
        """1 if the log has counted the newest batch's update as skipped already, because its loss is not finite."""

    @property
    def is_delayed(self) -> bool:
        """Whether updates come after the call of their batch."""
        return self.pipeline.is_delayed

    @property
    def optimizer(self) -> DelayedOptimizer | None:
        """Ours; None where the schedule leaves updates to Megatron's."""
        return self.pipeline.optimizer if self.is_delayed else None

    @property
    def drained(self) -> bool:
        """Whether the newest batch has left the pipeline empty, on all ranks."""
        return not self.pipeline.executor.is_ahead

    def skipped_iterations(self, losses: Mapping[str, torch.Tensor]) -> int:
        """For the log of the newest batch, of a delayed schedule: updates that were found to be skipped.

        Where its loss is no number, a dynamic loss scale will have its own update skipped. That is counted now, as
        Megatron then leaves the loss out of the mean and counts it, too.

        Args:
            losses: of that batch, on the last stage.
        """
        self.has_updated |= self.optimizer.reported is not None and not self.optimizer.skipped
        found = max(self.optimizer.skipped - self._foreseen, 0)
        is_known = self.optimizer.reported == self.pipeline.batch - 1
        self._foreseen = 0
        if self.optimizer.scales.by_version and not is_known:  # Only then is waiting for the loss worth it.
            loss = next(iter(losses.values()), None)  # Others may be a mean over nothing, such as of one data set.
            self._foreseen = int(loss is not None and not torch.isfinite(loss).all())
        return found + self._foreseen

    def forward_backward(self, stock: Callable[..., Any], **keywords: Any) -> list[Any]:
        """Megatron's forward-backward function: one batch, or evaluation by the stock schedule."""
        if keywords.get("forward_only"):
            return stock(**keywords)
        if not self.pipeline.batches_run:
            self._start(Call.of(keywords, self.pipeline.schedule_name))
        timers = self.pipeline.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=False)
        with get_timers().inside_call():
            losses = self.pipeline.forward_backward(
                **keywords,
                left=self._batch_sizes.left(keywords["num_microbatches"], at_most=self.pipeline.stages),
                synchronous=get_args().curr_iteration < get_args().synchronous_warmup_iters,
            )
        if self.monitor is not None:
            self.monitor.after(self.pipeline.executor.schedule)
        if timers is not None:
            timers("forward-backward").stop()
        return losses

    def settle(self) -> None:
        """Before anything looks at the weights: finish the pending update, show the newest version."""
        self.pipeline.settle()

    @contextmanager
    def interrupted(self, function: str) -> Iterator[None]:
        """Around an evaluation or a save: settle before, and do not count its time as that of a batch.

        Args:
            function: Megatron's, for the message where it fails.
        """
        self.settle()
        if self.monitor is not None:
            self.monitor.interrupted = True
        self.pipeline.beside = function
        yield
        self.pipeline.beside = None  # Not after an error, whose message comes later.

    def logs_this_batch(self) -> bool:
        """Whether Megatron writes the batch that has just run to its log, or to Tensorboard."""
        args = get_args()
        done = args.curr_iteration + 1
        to_tensorboard = bool(args.tensorboard_dir) and done % args.tensorboard_log_interval == 0
        return self.pipeline.batches_run == 1 or done % args.log_interval == 0 or to_tensorboard

    def reports_experts(self) -> bool:
        """Whether Megatron reports the experts' losses of that batch: without Tensorboard, W&B gets all of them."""
        args = get_args()
        return self.logs_this_batch() or bool(args.wandb_project and not args.tensorboard_dir)

    def close(self) -> None:
        """End of the run, planned or not: nothing pending, nothing in flight, trace written."""
        self.settle()
        for gathering in (self.exits, self.monitor):
            if gathering is not None:
                gathering.close()
        pipeline, path = self.pipeline, get_args().pipeline_trace
        if path is not None and pipeline.executor is not None:
            pipeline.executor.abandon()  # The trace is gathered where its transfers would be.
            write_trace(path, pipeline.executor.schedule, pipeline.recorder, pipeline.transfers, self._clock)
        pipeline.close()

    def forget(self) -> None:
        """Give back what the run has taken; waits for nobody."""
        for gathering in (self.exits, self.monitor):
            if gathering is not None:
                gathering.forget()
        self.pipeline.forget()

    def _start(self, call: Call) -> None:
        args, pipeline = get_args(), self.pipeline
        if self.is_delayed and torch.cuda.is_available():
            print_rank_0(
                f"megatron_2bw: batch_p2p_sync is off under --pipeline-schedule {pipeline.schedule_name}: "
                "a transfer of evaluation would wait for every stream of the device"
            )
        for notice in notices(os.environ, late_receives=pipeline.late_receives) if torch.cuda.is_available() else ():
            print_rank_0(f"megatron_2bw: {notice}")
        pipeline.start(call)
        if args.pipeline_trace is not None or args.log_pipeline:
            pipeline.record(Recorder(pipeline.device, limit=_KEPT if args.pipeline_trace is None else _KEPT_FOR_TRACE))
            if args.pipeline_trace is not None:
                self._clock = SharedClock(pipeline.transfers)
            if args.log_pipeline:
                self.monitor = PipelineMonitor(pipeline.recorder, self._timeout)
        if self.is_delayed and (args.exit_signal_handler or args.exit_duration_in_mins):
            self.exits = ExitRequests(self._timeout)


def notices(environment: Mapping[str, str], *, late_receives: bool) -> Iterator[str]:
    """What to set so that nothing waits for the whole GPU, or for a peer, while receives are under way."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = [environment.get(name, "").replace(" ", "") for name in names]
    if not late_receives and not any("expandable_segments:True" in setting for setting in settings):
        yield (
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use --pipeline-receives late. Without either, an "
            "allocation that finds no free memory waits for everything on the GPU, also for receives that are posted "
            "early; neighbouring stages that do so at once wait for each other until the timeout"
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield (
            "leave CUDA_LAUNCH_BLOCKING out. With it, a rank that posts a receive over NCCL waits there for what the "
            "sender has yet to compute; neighbouring stages wait for each other until the timeout"
        )
