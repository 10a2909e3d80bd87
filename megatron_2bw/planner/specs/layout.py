"""How a model is spread over GPUs and a batch over time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_2bw.planner.errors import MOST, PlanError, Problem, wrong_count
from megatron_2bw.planner.multiples import nearest_multiple
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.pipeline_layout import chunks_of
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED

FP8_BYTES, FP32_BYTES = 1, 4
"""Per number."""


class Recompute(StrEnum):
    """What the backward computes again: ``--recompute-granularity``."""

    NONE = "none"
    SELECTIVE = "selective"
    """Parts of layers: ``Layout.recompute_modules`` says which."""
    FULL = "full"
    """Whole layers; ``Layout.recompute_method`` and ``recompute_layers`` say which."""


class RecomputeModule(StrEnum):
    """What ``Recompute.SELECTIVE`` computes again: ``--recompute-modules``."""

    CORE_ATTN = "core_attn"
    """Scores, softmax and dropout, or the kernel that fuses them."""
    LAYERNORM = "layernorm"
    """Norms before experts and before latent vectors; others are part of the product that reads them."""
    MLA_UP_PROJ = "mla_up_proj"
    """Queries, keys and values out of latent vectors, turned by their positions."""
    MLP = "mlp"
    """In layers without experts, its norm included."""
    MOE = "moe"
    """Router, experts and shared experts."""
    MOE_ACT = "moe_act"
    """The experts' activation function."""
    SHARED_EXPERTS = "shared_experts"


class RecomputeMethod(StrEnum):
    """Which layers ``Recompute.FULL`` computes again: ``--recompute-method``."""

    UNIFORM = "uniform"
    """All: the input of every ``recompute_layers``-th layer is kept."""
    BLOCK = "block"
    """The first ``recompute_layers`` of every (virtual) stage, each by itself; the others keep everything."""


class Precision(StrEnum):
    """Of forward and backward; main weights are in fp32, gradients as `Layout.gradient_width` says."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def width(self) -> int:
        """Bytes per number."""
        return 4 if self is Precision.FP32 else 2


class Fp8(StrEnum):
    """How numbers are scaled to 8 bits for the matrix products of layers: ``--fp8-recipe``."""

    NONE = "none"
    """Products are in ``Layout.precision``."""
    DELAYED = "delayed"
    """By the largest numbers of the batches before."""
    TENSORWISE = "tensorwise"
    """By the largest number of the tensor itself, which is looked for first."""
    BLOCKWISE = "blockwise"
    """Of 128 numbers, or of 128 x 128 weights."""
    MXFP8 = "mxfp8"
    """Of 32 numbers."""


class Dispatcher(StrEnum):
    """Of tokens to other ranks' experts: ``--moe-token-dispatcher-type``, ``--moe-flex-dispatcher-backend``."""

    ALLTOALL = "alltoall"
    """A copy for every expert."""
    DEEPEP = "deepep"
    """A copy for every node and for every rank that has some of a token's experts."""
    HYBRIDEP = "hybridep"
    """The same; it pads, too."""

    @property
    def is_flexible(self) -> bool:
        """Whether Megatron calls it ``flex``."""
        return self is not Dispatcher.ALLTOALL


class Optimizer(StrEnum):
    """Of those that Megatron trains with, the ones with a state that is known: ``--optimizer``."""

    ADAM = "adam"
    SGD = "sgd"
    """With a momentum."""
    LION = "lion"
    MUON = "muon"

    @property
    def moments(self) -> int:
        """fp32 numbers per weight, beside the weight."""
        return 2 if self is Optimizer.ADAM else 1

    @property
    def is_of_matrices(self) -> bool:
        """Whether word embeddings, output layer, biases and norms are left to Adam.

        ``_is_nonlinear_or_embedding`` and ``EmergingOptimizerEntry`` in
        ``megatron/core/optimizer/emerging_optimizers.py``.
        """
        return self in (Optimizer.LION, Optimizer.MUON)


class Receives(StrEnum):
    """When receives are posted; DEFAULT: late on GPUs and of experts, otherwise early."""

    DEFAULT = "default"
    LATE = "late"
    EARLY = "early"


WITHOUT_OVERLAP = BIDIRECTIONAL | DELAYED
"""Schedules that switch ``--overlap-grad-reduce`` and ``--overlap-param-gather`` off."""
_COUNTS = {
    "pipeline": 1,
    "data": 1,
    "tensor": 1,
    "context": 1,
    "expert": 1,
    "expert_tensor": 1,
    "microbatch": 1,
    "global_batch": 1,
    "recompute_layers": 1,
    "chunks": 1,
    "gradient_buffers": 1,
    "optimizer_instances": 1,
    "extra_in_flight": 0,
    "delayed_microbatches": 0,
    "mixpipe_k": 0,
    "mixpipe_gamma": 0,
    "first_stage_layers": 0,
    "last_stage_layers": 0,
}
"""The least value of every whole number in a Layout."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One configuration; names are those of the papers (d, w, b) and of Megatron's flags.

    >>> layout = Layout(schedule="2bw", pipeline=4, data=2, tensor=8, microbatch=2, global_batch=64)
    >>> layout.gpus, layout.microbatches
    (64, 16)

    Raises:
        PlanError: a count below its least value, a batch that does not split into microbatches, or a
            ``pipeline_layout`` that is malformed or beside what says the same.
    """

    schedule: str
    """As typed after ``--pipeline-schedule``; ``megatron`` with ``chunks`` above 1 is the interleaved schedule."""
    pipeline: int
    """Depth d."""
    data: int
    """Width w: replicas."""
    tensor: int = 1
    context: int = 1
    """Ranks that share every sequence: ``--context-parallel-size``."""
    expert: int = 1
    """Ranks that share the experts of a layer, of all that hold the same stage: ``--expert-model-parallel-size``."""
    expert_tensor: int = 0
    """Ranks that share one expert: ``--expert-tensor-parallel-size``; 0: as many as ``tensor``."""
    microbatch: int = 1
    """Samples b."""
    global_batch: int
    """Samples B = b * w * m."""
    recompute: Recompute = Recompute.NONE
    recompute_modules: tuple[RecomputeModule, ...] = (RecomputeModule.CORE_ATTN,)
    """Of ``Recompute.SELECTIVE``."""
    recompute_method: RecomputeMethod = RecomputeMethod.UNIFORM
    """Of ``Recompute.FULL``."""
    recompute_layers: int = 1
    """Of ``Recompute.FULL``: ``--recompute-num-layers``."""
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    optimizer_instances: int = 1
    """``--num-distributed-optimizer-instances``: groups of neighbouring replicas, each with all of its state."""
    overlap_gradients: bool = False
    """``--overlap-grad-reduce``: replicas sum gradients during the last backward; 2bw always overlaps."""
    overlap_parameters: bool = False
    """``--overlap-param-gather``: replicas gather their shards of the weights during the first forwards."""
    split_transfers: bool = False
    """Tensor-parallel ranks send a share each over the pipeline and gather it, as Megatron-LM before Core did."""
    keeps_main_gradients: bool = False
    """fp16: the update's gradients in fp32 stay until the next one, as in Megatron-LM before Core."""
    gradients_in_fp32: bool = False
    """fp16: ``--accumulate-allreduce-grads-in-fp32``, which 2bw does by itself."""
    gradients_in_bf16: bool = False
    """bf16: ``--grad-reduce-in-bf16``."""
    chunks: int = 1
    """Virtual stages per rank."""
    overlap_transfers: bool = True
    """Those of chunks, beside computations; not with ``--no-overlap-p2p-communication``, nor before June 2023."""
    waits_for_sends: bool = True
    """Of what forwards of chunks send, though it overlaps, as megatron-core does from 0.18 on."""
    optimizer: Optimizer = Optimizer.ADAM
    adam_state: AdamState | None = None
    """``--use-precision-aware-optimizer``; None: main weights and moments in fp32."""
    precision: Precision = Precision.BF16
    fp8: Fp8 = Fp8.NONE
    """Of the products of layers; attention, logits and all else stay in ``precision``."""
    fp8_parameters: bool = False
    """``--fp8-param-gather``: the optimizer writes weights in 8 bits, and replicas gather those."""
    fused_attention: bool = True
    """Attention that never stores its scores."""
    fused_swiglu: bool = True
    """SwiGLU in one kernel, which computes its SiLU again in the backward; off with ``--no-bias-swiglu-fusion``."""
    fused_loss: bool = False
    """Softmax and loss in Transformer Engine's kernels: ``--cross-entropy-fusion-impl te``."""
    overlap_tensor: bool = False
    """``--tp-comm-overlap``: collectives of tensor-parallel ranks in parts, during the products beside them."""
    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    overlap_exchanges: bool = False
    """``--overlap-moe-expert-parallel-comm``: tokens go to their experts while another microbatch is computed."""
    extra_in_flight: int = 0
    delayed_microbatches: int = 0
    """Of 2bw: ``--pipeline-delayed-microbatches``; 0: all."""
    mixpipe_k: int = 0
    """``--mixpipe-k``: forwards that a rank starts with; 0: as many as stages."""
    mixpipe_gamma: int = 0
    """``--mixpipe-gamma``: so many more are let in later."""
    gradient_buffers: int = 2
    """Of 2bw: ``--pipeline-gradient-buffers``."""
    receives: Receives = Receives.DEFAULT
    """Of a schedule of ours: ``--pipeline-receives``."""
    first_stage_layers: int = 0
    """``--decoder-first-pipeline-num-layers``; 0: as many as the other stages."""
    last_stage_layers: int = 0
    """``--decoder-last-pipeline-num-layers``; 0: as many as the other stages."""
    pipeline_layout: str = ""
    """``--pipeline-model-parallel-layout``, which decides on ``chunks``, too; empty: layers are spread evenly."""

    def but(self, **changes: Any) -> Layout:
        """The same with other values of some fields: `dataclasses.replace` in a fifth of its time, as searches need.

        >>> layout = Layout(schedule="2bw", pipeline=4, data=2, microbatch=2, global_batch=64)
        >>> layout.microbatches, layout.but(microbatch=4).microbatches
        (16, 8)

        Raises:
            TypeError: a name is not that of a field.
            PlanError: as for a new layout.
        """
        if unknown := changes.keys() - self.__dict__.keys():
            raise TypeError(f"a Layout has no {', '.join(sorted(unknown))}")
        changed = object.__new__(Layout)
        changed.__dict__.update(self.__dict__, **changes)
        changed.__post_init__()
        return changed

    def __post_init__(self) -> None:
        if self.expert_tensor == 0 and type(self.tensor) is int:
            object.__setattr__(self, "expert_tensor", self.tensor)
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST:
                raise PlanError(wrong_count(name, value, least))
        if self.pipeline_layout:
            object.__setattr__(self, "chunks", self._chunks_of_layout())
        unit = self.microbatch * self.data
        if self.global_batch % unit:
            rule = f"is no multiple of microbatch {self.microbatch} x data {self.data}"
            nearest = nearest_multiple(self.global_batch, unit)
            raise PlanError(Problem(f"global_batch {self.global_batch} {rule}", f"use {nearest}"))

    def _chunks_of_layout(self) -> int:
        for name in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, name):
                raise PlanError(f"{name} {getattr(self, name)}: pipeline_layout has all layers; leave one of them out")
        chunks = chunks_of(self.pipeline_layout, self.pipeline)
        if self.chunks not in (1, chunks):
            raise PlanError(f"chunks {self.chunks}: pipeline_layout has {chunks} per rank; leave chunks out")
        return chunks

    @property
    def modules_again(self) -> tuple[RecomputeModule, ...]:
        """What the backward computes again of a layer that it does not compute again as a whole."""
        return self.recompute_modules if self.recompute is Recompute.SELECTIVE else ()

    @property
    def microbatches(self) -> int:
        """m, per replica."""
        return self.global_batch // (self.microbatch * self.data)

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.pipeline * self.replicas * self.tensor

    @property
    def gradient_width(self) -> int:
        """Bytes per number of the buffer in which microbatches are summed."""
        in_fp16 = self.precision is Precision.FP16 and not self.gradients_in_fp32 and self.schedule != "2bw"
        return 2 if in_fp16 or (self.gradients_in_bf16 and self.precision is Precision.BF16) else 4

    @property
    def is_optimizer_apart(self) -> bool:
        """Whether a precision-aware optimizer keeps main weights and reads gradients in their precision.

        ``use_precision_aware_optimizer_no_fp8_or_ds_fp8``: otherwise Megatron does both, in fp32.
        """
        if self.adam_state is None:
            return False
        return self.adam_state.main_weight != "fp32" or self.fp8 in (Fp8.NONE, Fp8.DELAYED)

    @property
    def has_remainders(self) -> bool:
        """Whether, of main weights in fp32, only what the model's weights in bf16 lack is kept."""
        is_in_fp32 = self.adam_state is not None and self.adam_state.main_weight == "fp32"
        return is_in_fp32 and self.is_optimizer_apart and self.precision is Precision.BF16

    @property
    def state_width(self) -> int:
        """Bytes per weight of what the optimizer keeps: moments, and main weights where the model's are in 16 bits."""
        if self.adam_state is not None:
            return self.adam_state.width(has_remainders=self.has_remainders)
        main_weight = 0 if self.precision is Precision.FP32 else FP32_BYTES
        return main_weight + self.optimizer.moments * FP32_BYTES

    def shards(self, replicas: int) -> int:
        """Of the optimizer's state of weights that so many ranks have."""
        return replicas // self.optimizer_instances if self.distributed_optimizer else 1

    @property
    def replicas(self) -> int:
        """Ranks with the same weights, those of experts apart: all that sum a gradient."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks with the same experts."""
        return self.replicas * self.tensor // (self.expert * self.expert_tensor)
