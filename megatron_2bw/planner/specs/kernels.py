"""Which precisions, kernels and optimizers there are, with the reason where there are none."""

from __future__ import annotations

from collections.abc import Collection

from megatron_2bw.planner.errors import Problem
from megatron_2bw.planner.multiples import nearest_multiple
from megatron_2bw.planner.specs.cluster import Gpu
from megatron_2bw.planner.specs.layout import Dispatcher, Fp8, Layout, Optimizer, Precision, RecomputeModule
from megatron_2bw.planner.specs.model import Model


def fp8_problem(layout: Layout) -> Problem | None:
    """Why products cannot be in 8 bits: validate_args, ``fp8_param_gather``."""
    if layout.fp8_parameters and layout.fp8 is Fp8.NONE:
        return Problem("fp8_parameters needs fp8", f"use fp8 {Fp8.DELAYED}")
    if layout.fp8_parameters and not layout.distributed_optimizer:
        return Problem("fp8_parameters needs distributed_optimizer", "switch it on")
    return fp8_precision_problem(layout.fp8, layout.precision)


def optimizer_problem(optimizer: Optimizer, precision: Precision, *, distributed: bool = False) -> Problem | None:
    """Why the optimizer does not train in that precision.

    Rules: ``_get_megatron_emerging_optimizer``; LayerWiseDistributedOptimizer, which wraps optimizers of 16 bits alone.
    """
    if optimizer.is_of_matrices and precision is Precision.FP16:
        return Problem(
            f"optimizer {optimizer}: Megatron has it in {Precision.BF16} and {Precision.FP32} alone",
            f"use {Precision.BF16} or {Precision.FP32}, or optimizer adam",
        )
    if optimizer.is_of_matrices and precision is Precision.FP32 and distributed:
        return Problem(
            f"distributed_optimizer with optimizer {optimizer}: Megatron has it in {Precision.BF16} alone",
            f"switch it off, or use {Precision.BF16}",
        )
    return None


def fp8_size_problem(model: Model, layout: Layout) -> Problem | None:
    """Why Transformer Engine's products in 8 bits do not take these sizes.

    Rule: ``assert_dim_for_fp8_exec`` in ``transformer_engine/pytorch/utils.py``; blocks of 32 for mxfp8.
    """
    if layout.fp8 is Fp8.NONE:
        return None
    unit = 32 if layout.fp8 is Fp8.MXFP8 else 16
    of_mlp = layout.expert_tensor if model.num_experts else layout.tensor
    latent, tensor = model.multi_latent_attention, layout.tensor
    shared = model.moe_shared_expert_intermediate_size
    sizes = {
        "hidden_size": (model.hidden_size, tensor if model.mtp_num_layers else 1),
        "ffn_hidden_size": (model.ffn_hidden_size, of_mlp),
        "dense_ffn_hidden_size": (model.dense_ffn_hidden_size, tensor),
        "moe_shared_expert_intermediate_size": (shared, tensor),
        f"num_attention_heads x {'v_head_dim' if latent else 'kv_channels'}": (model.output_size, tensor),
        "num_attention_heads x (qk_head_dim + qk_pos_emb_head_dim)": (model.query_size, tensor),
        "q_lora_rank": (model.q_lora_rank, 1),
        "kv_lora_rank": (model.kv_lora_rank, 1),
        "kv_lora_rank + qk_pos_emb_head_dim": (model.kv_lora_rank + model.qk_pos_emb_head_dim, 1),
        "seq_length x microbatch": (
            model.tokens(layout.microbatch, layout.context),
            layout.tensor if layout.sequence_parallel else 1,
        ),
    }
    for name, (size, ranks) in sizes.items():
        if size % ranks == 0 and size // ranks % unit:
            nearest = nearest_multiple(size, ranks * unit)
            return Problem(
                f"fp8 {layout.fp8}: {name} {size} on {ranks} ranks is no multiple of {unit}", f"use {nearest}"
            )
    return None


def gpu_problem(
    gpu: Gpu,
    precision: Precision,
    *,
    fused_attention: bool = False,
    fp8: Fp8 = Fp8.NONE,
    dispatcher: Dispatcher = Dispatcher.ALLTOALL,
    modules: Collection[RecomputeModule] = (),
) -> Problem | None:
    """Why ``gpu`` cannot compute like that; of Transformer Engine's recipes, ``check_recipe_support``."""
    if fp8 is not Fp8.NONE and not gpu.fp8_tflops:
        return Problem(f"fp8 {fp8}: {gpu.name} has no products in 8 bits", f"use fp8 {Fp8.NONE}")
    if fp8 is Fp8.MXFP8 and not gpu.has_mxfp8:
        return Problem(f"fp8 {fp8}: {gpu.name} has no such products", f"use fp8 {Fp8.DELAYED}")
    if dispatcher.is_flexible and not gpu.has_bf16:  # From Ampere on.
        return Problem(f"dispatcher {dispatcher}: {gpu.name} has no such kernels", f"use {Dispatcher.ALLTOALL}")
    if RecomputeModule.MOE_ACT in modules and not gpu.has_bf16:  # It is of --moe-grouped-gemm, which is.
        return Problem(
            f"recompute_modules {RecomputeModule.MOE_ACT}: {gpu.name} has no products of several experts in one",
            f"use {RecomputeModule.MOE}, or leave it out",
        )
    if precision is Precision.BF16 and not gpu.has_bf16:
        return Problem(f"precision {precision}: {gpu.name} has no {precision}", f"use {Precision.FP16}")
    if fused_attention and not fuses_attention(gpu, precision):
        return Problem(
            f"fused attention: {gpu.name} has no such kernels in {precision}", "use attention_backend unfused"
        )
    return None


def fuses_attention(gpu: Gpu, precision: Precision) -> bool:
    """Whether there are kernels that never store scores: for 16 bits, on GPUs from Ampere on, which have bf16, too.

    Rule: Transformer Engine, ``get_attention_backend``: FlashAttention and FusedAttention need compute capability 8.0.
    """
    return gpu.has_bf16 and precision is not Precision.FP32


def fp8_precision_problem(fp8: Fp8, precision: Precision) -> Problem | None:
    """Why the rest of the model cannot be in that precision: fp32 beside 8 bits is not priced."""
    if fp8 is not Fp8.NONE and precision is Precision.FP32:
        return Problem(f"fp8 {fp8} beside {precision}", f"use precision {Precision.BF16}")
    return None
