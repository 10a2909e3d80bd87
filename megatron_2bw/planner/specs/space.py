"""What the search chooses from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.cluster import Gpu
from megatron_2bw.planner.specs.kernels import fp8_precision_problem, fuses_attention, gpu_problem, optimizer_problem
from megatron_2bw.planner.specs.layout import (
    Dispatcher,
    Fp8,
    Optimizer,
    Precision,
    Receives,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
)

_FIELDS = {
    "schedules": "schedule",
    "pipelines": "pipeline",
    "widths": "data",
    "tensors": "tensor",
    "contexts": "context",
    "experts": "expert",
    "expert_tensors": "expert_tensor",
    "microbatches": "microbatch",
    "recomputes": "recompute",
    "recompute_methods": "recompute_method",
}


LEAST_TOKENS = 4096
"""Of a sequence, on each rank that shares it by default. Shorter ones mostly fit unshared, on more replicas."""


def field_of(dimension: str) -> str:
    """The field of a Layout that has one of the values of ``dimension``."""
    return _FIELDS.get(dimension, dimension)


FIXED = ("optimizer", "adam_state", "precision", "fp8", "fused_attention")
"""What all layouts of a space have from it as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values that each dimension may take; None: all that make sense."""

    schedules: tuple[str, ...] | None = None
    pipelines: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None
    tensors: tuple[int, ...] | None = None
    """None: what divides the model and stays within a node."""
    contexts: tuple[int, ...] | None = None
    """None: what leaves every rank ``LEAST_TOKENS`` of a sequence."""
    experts: tuple[int, ...] | None = None
    """Ranks that share the experts; None: what divides them."""
    expert_tensors: tuple[int, ...] | None = None
    """Ranks that split an expert; None: as many as ``tensors``, and 1 where several share the experts."""
    microbatches: tuple[int, ...] | None = None
    """Sizes b."""
    chunks: tuple[int, ...] | None = None
    first_stage_layers: tuple[int, ...] | None = None
    """0: as many as the other stages. None: that, or fewer where the depth does not divide the layers; and those with
    which embedding and loss slow no stage down more than need be, if they are faster."""
    last_stage_layers: tuple[int, ...] | None = None
    pipeline_layout: tuple[str, ...] | None = None
    """What every stage holds. None: as above, and where chunks interleave, as much in each with embedding and loss
    counted as layers."""
    recomputes: tuple[Recompute, ...] | None = None
    recompute_methods: tuple[RecomputeMethod, ...] | None = None
    recompute_layers: tuple[int, ...] | None = None
    recompute_modules: tuple[tuple[RecomputeModule, ...], ...] | None = None
    """Of selective recomputation. None: all sets that save memory."""
    sequence_parallel: tuple[bool, ...] | None = None
    distributed_optimizer: tuple[bool, ...] | None = None
    extra_in_flight: tuple[int, ...] | None = None
    """Of 2bw."""
    delayed_microbatches: tuple[int, ...] | None = None
    """Of 2bw. None: all, or as few as hide an update where the progress with some of them is asked for; with late
    receives another number may take a few transfers less."""
    mixpipe_k: tuple[int, ...] | None = None
    mixpipe_gamma: tuple[int, ...] | None = None
    gradient_buffers: tuple[int, ...] | None = None
    """Of 2bw."""
    precision: Precision | None = None
    """None: bf16 where the GPU has it, else fp16."""
    fp8: Fp8 = Fp8.NONE
    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    """Of experts that several ranks share."""
    optimizer: Optimizer = Optimizer.ADAM
    adam_state: AdamState | None = None
    """Of the precision-aware optimizer, which is a distributed one."""
    fused_attention: bool | None = None
    """None: where the GPU has such kernels in that precision."""
    receives: Receives = Receives.DEFAULT
    """Of our schedules."""
    settings: tuple[tuple[str, bool], ...] = ()
    """Fields that no search decides on, and what those layouts have there that can: of `flags.accepted.SETTINGS`."""
    tight: bool = False
    """Let 2bw run with its least m, d-1, in place of d."""

    @property
    def has_ends(self) -> bool:
        """Whether the layers of the first or of the last stage are given."""
        given = self.first_stage_layers, self.last_stage_layers, self.pipeline_layout
        return any(limit is not None for limit in given)

    def on(self, gpu: Gpu) -> Space:
        """With the precision and the attention that ``gpu`` has, where there are no limits.

        Raises:
            PlanError: it does not have those of the limits.
        """
        precision = self.precision or (Precision.BF16 if gpu.has_bf16 else Precision.FP16)
        fused = fuses_attention(gpu, precision) if self.fused_attention is None else self.fused_attention
        modules = {module for modules in self.recompute_modules or () for module in modules}
        used = {"fp8": self.fp8, "dispatcher": self.dispatcher, "modules": modules}
        refused = gpu_problem(gpu, precision, fused_attention=fused, **used)
        refused = refused or fp8_precision_problem(self.fp8, precision) or optimizer_problem(self.optimizer, precision)
        if refused:
            raise PlanError(refused)
        return replace(self, precision=precision, fused_attention=fused)

    def allows[Value](self, dimension: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """``values`` in their order, without those that ``dimension`` rules out.

        >>> Space(tensors=(2, 4)).allows("tensors", (1, 2, 4, 8))
        (2, 4)
        """
        allowed = getattr(self, dimension)
        return values if allowed is None else tuple(value for value in values if value in allowed)
