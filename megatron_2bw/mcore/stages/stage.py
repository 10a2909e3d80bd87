"""One pipeline stage: Megatron's forward and backward steps behind the executor's interface."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as AuxiliaryLoss
from megatron.core.utils import get_model_config

from megatron_2bw.mcore.stages.moe_metrics import MoEMetrics
from megatron_2bw.mcore.stages.random_state import RandomState
from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer
from megatron_2bw.runtime.links import Boundary
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.registry import DELAYED
from megatron_2bw.schedule.timeline import DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What Megatron's training loop passes to its forward-backward function, as far as we use it."""

    forward_step_func: Any
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    force_all_reduce: bool = False

    @classmethod
    def of(cls, keywords: dict[str, Any], schedule: str) -> Call:
        """Pick our fields.

        Raises:
            RuntimeError: a keyword asks for what our schedules do not do.
            TypeError: Megatron's functions do not have it.
        """
        if unknown := keywords.keys() - _KEYWORDS:
            raise TypeError(f"forward_backward() got an unexpected keyword argument {min(unknown)!r}")
        for name in ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"):
            if keywords.get(name) is not None:
                raise RuntimeError(
                    f"the training loop passes {name} to its schedule, and --pipeline-schedule {schedule} has no "
                    "use for it: distillation, multi-module models and custom groups need --pipeline-schedule megatron"
                )
        if keywords.get("force_all_reduce") and schedule in DELAYED:
            raise RuntimeError(
                f"the training loop passes force_all_reduce to its schedule, and {schedule} reduces a captured copy of "
                "the gradients as their optimizer needs them: leave it out, or use 1f1b-flush"
            )
        call = {name: keywords[name] for name in cls.__slots__ if name in keywords}
        for name in ("model", "data_iterator"):
            if isinstance(call[name], list):
                (call[name],) = call[name]
        return cls(**call)


_KEYWORDS = inspect.signature(schedules.forward_backward_pipelining_without_interleaving).parameters.keys()
_OF_SHAPE = ("seq_length", "micro_batch_size", "decoder_seq_length")
"""Fields of a call that transfers depend on."""


class TimedData:
    """An iterator that tells a recorder how long each microbatch took to come.

    Args:
        data: Megatron's.
        recorder: to be told.
        action: the forward that reads.
    """

    def __init__(self, data: Any, recorder: Recorder, action: Action) -> None:
        self._data = data
        self._read = recorder.timed(DATA, action, partial(next, data))

    def __iter__(self) -> TimedData:
        return self

    def __next__(self) -> Any:
        return self._read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


class MegatronStage:
    """Forward and backward; the subclasses add what an update means.

    Args:
        call: the first one's arguments.
        schedule: its name, for messages.
    """

    def __init__(self, call: Call, schedule: str) -> None:
        self.config = get_model_config(call.model)
        self.call: Call | None = None
        """While it runs."""
        self._shape_of_call = {name: getattr(call, name) for name in _OF_SHAPE}
        self.losses: list[dict[str, torch.Tensor]]
        """One per microbatch of the current batch, on the last stage."""
        self.recorder: Recorder | None = None
        """Told how long data took to come."""
        self.num_tokens: torch.Tensor
        """Of that batch, on this rank; as the losses, from the first call on."""
        self._last = parallel_state.get_pipeline_model_parallel_world_size() - 1
        self._context_parallel = parallel_state.get_context_parallel_world_size()
        if self.config.variable_seq_lengths:
            raise RuntimeError(
                f"variable_seq_lengths is set in the model's config, and --pipeline-schedule {schedule} transfers "
                "tensors of one shape: pad all sequences to one length, or use --pipeline-schedule megatron"
            )
        (shape,) = schedules.get_tensor_shapes(
            seq_length=call.seq_length,
            micro_batch_size=call.micro_batch_size,
            decoder_seq_length=call.decoder_seq_length,
            config=self.config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
        )
        device = next(call.model.parameters()).device
        self.boundary = Boundary(shape=shape, dtype=self.config.pipeline_dtype, device=device)

    def begin(self, call: Call) -> None:
        """Take over the arguments of the next call.

        Raises:
            RuntimeError: tensors of another shape than in the call before.
        """
        for name, before in self._shape_of_call.items():
            now = getattr(call, name)
            if now != before:
                raise RuntimeError(f"{name} was {before} and is {now}: transfers keep the shape of the first batch")
        self.call = call
        self.losses = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=self.boundary.device)

    def end(self) -> None:
        """Let go of the call's data: its loader's workers end when nobody holds it, and the process waits for them."""
        self.call = None

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        return self._forward(action, received, self.call.model, self.call.data_iterator)

    def _forward(self, action: Action, received: torch.Tensor | None, model: Any, data: Any) -> torch.Tensor:
        output, num_tokens = schedules.forward_step(
            self.call.forward_step_func,
            data if self.recorder is None or data is None else TimedData(data, self.recorder, action),
            model,
            self.call.num_microbatches,
            received,
            self.losses,
            self.config,
            self._context_parallel,
            is_first_microbatch=action.microbatch == self._first_of(action.stage),
            current_microbatch=action.microbatch,
            is_last_stage=action.stage == self._last,
        )
        self.num_tokens += num_tokens
        if torch.is_grad_enabled() and not output.requires_grad:
            self._refuse_to_train_nothing(model)
        return output

    def _refuse_to_train_nothing(self, model: torch.nn.Module) -> None:
        """A forward's output needs no gradient, as it should only be where no weight is trained.

        Raises:
            RuntimeError: weights are trained; Megatron's own schedule would leave them as they are without a word.
        """
        if self.config.recompute_granularity == "full" and any(weight.requires_grad for weight in model.parameters()):
            raise RuntimeError(
                "with --recompute-granularity full no layer of the first stage would be trained, as its embedding is "
                "frozen: Megatron's checkpoints pass gradients on only where their input needs one; leave the flag "
                "out, or train the embedding"
            )

    def _first_of(self, stage: int) -> int:
        """The first microbatch that ``stage`` computes here."""
        return 0

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        if action.stage == self._last:
            schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        return schedules.backward_step(received, output, grad, self.config)

    def sent(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)


class DelayedStage(MegatronStage):
    """A stage of 2BW or PipeDream: several weight versions, updates that come late.

    Args:
        call: the first one's arguments.
        schedule: its name, for messages.
        optimizer: holds the weight versions.
        moe_metrics: of a model with experts.
    """

    def __init__(self, call: Call, schedule: str, optimizer: DelayedOptimizer, moe_metrics: MoEMetrics | None) -> None:
        super().__init__(call, schedule)
        self._optimizer = optimizer
        self._moe_metrics = moe_metrics
        self.random_states: dict[int, RandomState] = {}
        """By batch whose forwards ran ahead: the random state before the first of them."""
        self._auxiliary_scales: dict[tuple[int, int | None], torch.Tensor] = {}
        """Factor of the experts' auxiliary loss, per microbatch in flight."""

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        if action.microbatch == 0:
            self.random_states[action.batch] = RandomState.present()
        if self._moe_metrics is not None:
            self._moe_metrics.use(action.batch)
        with self._optimizer.computing(action.batch):
            output = super().forward(action, received)
        if self._moe_metrics is not None:
            self._auxiliary_scales[action.batch, action.microbatch] = AuxiliaryLoss.main_loss_backward_scale.clone()
        return output

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        self.random_states.pop(action.batch, None)
        if self._moe_metrics is not None:
            self._moe_metrics.use(action.batch)
            # A forward of the next batch, under another loss scale, may have set the one of the process.
            AuxiliaryLoss.set_loss_scale(self._auxiliary_scales.pop((action.batch, action.microbatch)))
        with self._optimizer.computing(action.batch):
            return super().backward(action, received, output, grad)

    def use_weights(self, version: int) -> None:
        self._optimizer.weights.use(version)

    def reduce_start(self, action: Action) -> None:
        if action.reduction is Reduction.GRADIENTS:
            replicas = parallel_state.get_data_parallel_world_size()
            self._optimizer.begin(
                action.batch,
                samples=self.call.num_microbatches * self.call.micro_batch_size * replicas,
                num_tokens=self.num_tokens.clone() if self.config.calculate_per_token_loss else None,
            )
        self._optimizer.pending.reduce_start(action)

    def reduce_wait(self, action: Action) -> None:
        self._optimizer.pending.reduce_wait(action)

    def update(self, action: Action) -> None:
        self._optimizer.finish(action.batch)


class FlushedStage(MegatronStage):
    """A stage of a synchronous schedule: Megatron reduces and updates when the pipeline is empty.

    Args:
        call: the first one's arguments.
        schedule: its name, for messages.
    """

    def __init__(self, call: Call, schedule: str) -> None:
        super().__init__(call, schedule)
        self._no_sync = contextlib.ExitStack()

    def begin(self, call: Call) -> None:
        super().begin(call)
        # Gradients are reduced once, during the last backward, not after every microbatch.
        if self.config.no_sync_func is not None:
            self._no_sync.enter_context(self.config.no_sync_func())

    def end(self) -> None:
        super().end()
        self._no_sync.close()  # Still open where the batch failed.

    def use_weights(self, version: int) -> None:
        """There is one version."""

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self._reduces_in(action):
            self._no_sync.close()
        return super().backward(action, received, output, grad)

    def _reduces_in(self, action: Action) -> bool:
        """Whether gradients are reduced during this backward; else in ``update``."""
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        return action.microbatch == self.call.num_microbatches - 1 and (self.config.grad_sync_func is None or is_first)

    def reduce_start(self, action: Action) -> None:
        """Megatron reduces in one step, in ``update``."""

    def reduce_wait(self, action: Action) -> None:
        """Megatron reduces in one step, in ``update``."""

    def update(self, action: Action) -> None:
        """Reduce; the training loop calls ``optimizer.step`` right after this call."""
        self._no_sync.close()
        if self.config.grad_sync_func is not None and not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            self.config.grad_sync_func(self.call.model.parameters())
        if self.config.finalize_model_grads_func is not None:
            self.config.finalize_model_grads_func(
                [self.call.model],
                self.num_tokens if self.config.calculate_per_token_loss else None,
                force_all_reduce=self.call.force_all_reduce,
            )
