"""Conditions of rows of the table of flags that take more than one attribute; of Megatron's arguments or a config."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import inf
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flag_table.rows import above, given, stored_in, sums_in_bf16
from megatron_2bw.planner.specs.patterns import has_experts
from megatron_2bw.planner.specs.pipeline_layout import (
    EMBEDDING,
    LAYER,
    LOSS,
    MTP,
    has_an_empty_stage,
    predicts_early,
    stages_of,
)

CORRECTIONS = ("none", "lead", "update-lead")
"""What ``--delay-correction`` may be."""
LEAD = 2.0
"""How far corrections look ahead by default."""


def leads_too_far(args: Any) -> bool:
    """The lead leaves nothing of the optimizer's average of gradients: ``MomentLead.least_decay``, without torch."""
    if getattr(args, "delay_correction", None) != "lead":
        return False
    decays = {
        "sgd": lambda: [args.sgd_momentum],
        "muon": lambda: [args.muon_momentum, args.adam_beta1],
    }.get(args.optimizer, lambda: [args.adam_beta1])
    return min(decays()) <= args.delay_lead / (1 + args.delay_lead)


def leads_nothing(args: Any) -> bool:
    """A lead is given, other than the default, and no correction that it is of."""
    has_a_lead = getattr(args, "delay_lead", None) not in (None, LEAD)
    return has_a_lead and getattr(args, "delay_correction", None) in (None, "none")


def leads_lion(args: Any) -> bool:
    """Lion, itself or for what Muon leaves to it, with the lead of moments."""
    by_lion = args.optimizer == "lion" or (
        args.optimizer == "muon" and getattr(args, "muon_scalar_optimizer", None) == "lion"
    )
    return by_lion and getattr(args, "delay_correction", None) == "lead"


def keeps_remainders(args: Any) -> bool:
    """Of main weights, the precision-aware optimizer keeps what weights in bf16 lack."""
    is_apart = getattr(args, "fp8_recipe", None) in (None, "delayed")
    in_fp32 = stored_in(args, "main_params_dtype") == "fp32"
    is_whole = getattr(args, "optimizer_cpu_offload", None)  # Then main weights are, here or on the host.
    return bool(args.use_precision_aware_optimizer and args.bf16 and in_fp32 and is_apart and not is_whole)


def saves_optimizers(args: Any) -> bool:
    """Checkpoints are written, with the optimizers' state."""
    return bool(args.save) and not getattr(args, "no_save_optim", None)


def saves_by_nvrx(args: Any) -> bool:
    """Asynchronously, by nvidia-resiliency-ext: Megatron's default where nothing else is asked for."""
    return bool(args.async_save) and getattr(args, "async_strategy", None) == "nvrx"


def depends_on_data(args: Any) -> bool:
    """Which kernels run: those of experts by where tokens go, those of packed sequences by their lengths."""
    names = "num_experts", "sft", "dataloader_inter_document_masking"
    return any(getattr(args, name, None) for name in names)


def reshards(args: Any) -> bool:
    """Checkpoints hold optimizers in a form that other numbers of stages and tensor-parallel ranks can load."""
    return saves_optimizers(args) and args.ckpt_format == "torch_dist" and bool(args.dist_ckpt_optim_fully_reshardable)


def corrects_precision_aware(args: Any) -> bool:
    """A correction of updates that Transformer Engine's optimizer makes in precisions of its own."""
    return args.use_precision_aware_optimizer and getattr(args, "delay_correction", None) not in (None, "none")


def is_sharded_by_layers(args: Any) -> bool:
    """The distributed optimizer gives whole layers to ranks: Muon's, Lion's and SOAP's."""
    is_distributed = args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False)
    return args.optimizer == "dist_muon" or (args.optimizer not in ("adam", "sgd") and is_distributed)


def _replicas(args: Any) -> int:
    """Of the model; 0 where Megatron has not derived them from its other arguments."""
    return (getattr(args, "data_parallel_size", None) or 0) * args.context_parallel_size


def clips_heads_by_replica(args: Any) -> bool:
    """Whole layers are with one rank each, and some are clipped by a norm that Megatron sums over stages alone.

    Where no other optimizer is beside that of layers, it sums the norm over all ranks.
    """
    clips_apart = getattr(args, "mtp_detach_heads", None) and args.clip_grad
    is_alone = getattr(args, "use_layer_wise_param_layout", None) is False
    return bool(clips_apart) and is_sharded_by_layers(args) and not is_alone and _replicas(args) > 1


def skips_by_norm(args: Any) -> bool:
    """An update whose norm is above a threshold, which only a config has, is left out."""
    return (getattr(args, "grad_norm_skip_threshold", None) or inf) < inf


def skips_on_some_ranks(args: Any) -> bool:
    """Such an update, on ranks alone whose shards have weights that this norm is of."""
    return skips_by_norm(args) and bool(getattr(args, "mtp_detach_heads", None)) and args.use_distributed_optimizer


def scatters_a_mean_to_fp32(args: Any) -> bool:
    """A reduce-scatter in fp32 that would have to take a mean."""
    is_asked = args.ddp_reduce_scatter_with_fp32_accumulation and args.ddp_average_in_collective
    is_sharded = args.use_distributed_optimizer or is_sharded_by_layers(args)
    return is_asked and is_sharded and sums_in_bf16(args)


def gathers_weights_one_by_one(args: Any) -> bool:
    """A distributed optimizer of whole layers without a flat buffer of weights."""
    return is_sharded_by_layers(args) and getattr(args, "use_layer_wise_param_layout", None) is False


def sums_experts_over_wrong_ranks(args: Any) -> bool:
    """Megatron 0.18 takes such experts for weights that the tensor-parallel ranks split like all others."""
    from megatron.core.package_info import __version__  # The rest of the table needs no Megatron.

    split = getattr(args, "expert_tensor_parallel_size", None)
    is_split_apart = args.num_experts and split not in (None, args.tensor_model_parallel_size)
    return bool(is_split_apart) and args.expert_model_parallel_size == 1 and __version__.startswith("0.18.")


def leaves_copies_of_experts_apart(args: Any) -> bool:
    """A distributed optimizer of whole layers shards nothing without replicas of the model, of experts neither."""
    split = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    copies = args.tensor_model_parallel_size // (split * args.expert_model_parallel_size)
    return bool(args.num_experts and copies > 1 and _replicas(args) == 1 and is_sharded_by_layers(args))


def ties_what_it_predicts(args: Any) -> bool:
    """The output layer of further predicted tokens is the embedding."""
    return bool(args.mtp_num_layers) and not args.untie_embeddings_and_output_weights


def has_uneven_optimizers(args: Any) -> bool:
    """Optimizers of stages keep different groups of weights, of which Megatron's torch_dist keeps the first stage's.

    Seen with megatron-core 0.19.2, where the run that loads them ends: parallel experts on some stages only, in fp32
    where those are the first ones, or for Adam the others; an embedding alone on the first stage, in 16 bits; with Muon
    and Lion also a last stage without layers; and in 16 bits on three stages, what the middle ones lack: biases beside
    SwiGLU for Muon and Lion, muP's own rate for Adam.
    """
    if args.use_distributed_optimizer or is_sharded_by_layers(args):
        return False
    stages, in_16_bits = layers_of_stages(args), args.bf16 or args.fp16
    of_matrices, has_middle = args.optimizer not in ("adam", "sgd"), args.pipeline_model_parallel_size > 2
    experts = stages_with_parallel_experts(args, stages)
    are_on_some = any(experts) and not all(experts)
    is_adam = args.optimizer == "adam"
    of_ends = (is_adam and getattr(args, "use_mup", None)) or (of_matrices and args.swiglu and args.add_bias_linear)
    return bool(
        (are_on_some and (in_16_bits or experts[0] != is_adam))
        or (in_16_bits and stages and not stages[0])
        or (of_matrices and stages and not stages[-1] and not args.mtp_num_layers)
        or (in_16_bits and has_middle and of_ends)
    )


def stages_with_parallel_experts(args: Any, stages: tuple[int, ...]) -> list[bool]:
    """Which of a GPT's ``stages``, of so many layers, have experts that ranks share otherwise than other weights."""
    are_split = args.expert_tensor_parallel_size not in (None, args.tensor_model_parallel_size)
    if not args.num_experts or not (args.expert_model_parallel_size > 1 or are_split) or not stages:
        return []
    layers = has_experts(args.moe_layer_freq, sum(stages))
    ends = list(accumulate(stages, initial=0))
    found = [any(layers[start:end]) for start, end in pairwise(ends)]
    found[-1] |= bool(args.mtp_num_layers and layers[-1])
    return found


def clips_shards(args: Any) -> bool:
    """QK-clip of main weights of which each rank has a part: Adam's and SGD's distributed optimizer, in 16 bits."""
    by_elements = args.use_distributed_optimizer and not is_sharded_by_layers(args)
    return bool(args.qk_clip and by_elements and (args.bf16 or args.fp16))


def clips_split_heads(args: Any) -> bool:
    """QK-clip of heads that tensor-parallel ranks share, in one weight of queries, keys and values."""
    return bool(args.qk_clip and args.tensor_model_parallel_size > 1 and not args.multi_latent_attention)


def clips_gates(args: Any) -> bool:
    """QK-clip of a weight that has gates beside queries, keys and values."""
    return bool(args.qk_clip and getattr(args, "attention_output_gate", None) and not args.multi_latent_attention)


def recomputes_biases(args: Any) -> bool:
    """The MLP, with a bias, is computed again by itself."""
    short = getattr(args, "recompute_activations", False)  # Megatron takes it away once it has read it.
    is_selective = args.recompute_granularity == "selective" or short
    return bool(is_selective and "mlp" in (args.recompute_modules or ()) and args.add_bias_linear)


def interleaves(args: Any) -> bool:
    """A rank has several virtual stages; how many, Megatron derives from numbers of layers and from layouts."""
    derived = getattr(args, "virtual_pipeline_model_parallel_size", None)
    return (derived or getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1) > 1


def layers_of_stages(args: Any) -> tuple[int, ...]:
    """Layers on every stage, without those for further tokens; empty where Megatron has yet to find out."""
    given, stages = layout_of_stages(args), int(args.pipeline_model_parallel_size)
    if given:
        return tuple(stage.count(LAYER) for stage in given)
    if not args.num_layers or stages < 2:
        return ()
    others = [None] * (stages - 2)
    sizes = [args.decoder_first_pipeline_num_layers, *others, args.decoder_last_pipeline_num_layers]
    counted = [args.account_for_embedding_in_pipeline_split, *others, args.account_for_loss_in_pipeline_split]
    more = [int(bool(is_counted)) for is_counted in counted]
    left = int(args.num_layers) + sum(more) - sum(int(size or 0) for size in sizes)
    each = left // max(sizes.count(None), 1)
    return tuple(int(each if size is None else size) - extra for size, extra in zip(sizes, more, strict=True))


def layout_of_stages(args: Any) -> tuple[str, ...]:
    """The layers of every stage of a pipeline layout, in its letters; empty without one."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if not layout:
        return ()
    if isinstance(layout, str):
        try:
            return stages_of(layout)
        except PlanError:  # Megatron says why.
            return ()
    letters = {"embedding": EMBEDDING, "decoder": LAYER, "mtp": MTP, "loss": LOSS}
    return tuple("".join(letters[layer.name] for chunk in rank for layer in chunk) for rank in layout.layout)


def predicts_before_the_last_stage(args: Any) -> bool:
    """Multi-token prediction has layers before the last stage."""
    return bool(getattr(args, "mtp_num_layers", None)) and predicts_early(layout_of_stages(args))


def leaves_a_stage_empty(args: Any) -> bool:
    """A pipeline layout leaves a stage without anything."""
    return has_an_empty_stage(layout_of_stages(args))


def quantizes(args: Any) -> bool:
    """Weights are cached in fewer bits."""
    by_recipe = given("te_precision_config_file", "kitchen_config_file", "quant_recipe", "use_kitchen")
    return given("fp8", "fp4")(args) or by_recipe(args) or getattr(args, "kitchen_recipe_number", None) is not None


def shards_weights(args: Any) -> bool:
    """Ranks keep shards of weights and gather them for every use."""
    return any(above(name, 1)(args) for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"))


def attends_sparsely(args: Any) -> bool:
    """Some attention is DeepSeek's sparse one."""
    is_asked = getattr(args, "experimental_attention_variant", None) == "dsa"
    return is_asked or "D" in (getattr(args, "hybrid_layer_pattern", None) or "")
