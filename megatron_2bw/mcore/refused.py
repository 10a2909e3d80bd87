"""Flags that are refused before training, by schedule."""

from __future__ import annotations

from math import inf
from typing import Any

from megatron_2bw.mcore.rows import (
    DELAYED,
    FLUSHED,
    MIRRORED,
    OURS,
    PIPEDREAM,
    STOCK,
    TWO_BW,
    USE_FLUSH,
    USE_MEGATRON,
    VIRTUAL,
    Refused,
    above,
    given,
    sums_in_bf16,
    words,
)
from megatron_2bw.mcore.symbols import megatron_version
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.pipeline_layout import (
    EMBEDDING,
    LAYER,
    LOSS,
    PREDICTION,
    has_an_empty_stage,
    predicts_early,
    stages_of,
)


def _leads_too_far(args: Any) -> bool:
    if getattr(args, "delay_correction", None) != "lead":
        return False
    from megatron_2bw.runtime.corrections import MomentLead  # The table alone needs no torch.

    decays = {
        "sgd": lambda: [args.sgd_momentum],
        "muon": lambda: [args.muon_momentum, args.adam_beta1],
    }.get(args.optimizer, lambda: [args.adam_beta1])
    return min(decays()) <= MomentLead(args.delay_lead).least_decay


def _leads_lion(args: Any) -> bool:
    by_lion = args.optimizer == "lion" or (
        args.optimizer == "muon" and getattr(args, "muon_scalar_optimizer", None) == "lion"
    )
    return by_lion and getattr(args, "delay_correction", None) == "lead"


def _is_sharded_by_layers(args: Any) -> bool:
    is_distributed = args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False)
    return args.optimizer == "dist_muon" or (args.optimizer not in ("adam", "sgd") and is_distributed)


def _scatters_a_mean_to_fp32(args: Any) -> bool:
    is_asked = args.ddp_reduce_scatter_with_fp32_accumulation and args.ddp_average_in_collective
    is_sharded = args.use_distributed_optimizer or _is_sharded_by_layers(args)
    return is_asked and is_sharded and sums_in_bf16(args)


def _gathers_weights_one_by_one(args: Any) -> bool:
    return _is_sharded_by_layers(args) and getattr(args, "use_layer_wise_param_layout", None) is False


def _sums_experts_over_wrong_ranks(args: Any) -> bool:
    """Megatron 0.18 takes such experts for weights that the tensor-parallel ranks split like all others."""
    split = getattr(args, "expert_tensor_parallel_size", None)
    is_split_apart = args.num_experts and split not in (None, args.tensor_model_parallel_size)
    return bool(is_split_apart) and args.expert_model_parallel_size == 1 and megatron_version().startswith("0.18.")


def _stages_of(args: Any) -> tuple[str, ...]:
    """The layers of every stage of a pipeline layout, in its letters; empty without one."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if not layout:
        return ()
    if isinstance(layout, str):
        try:
            return stages_of(layout)
        except PlanError:  # Megatron says why.
            return ()
    letters = {"embedding": EMBEDDING, "decoder": LAYER, "mtp": PREDICTION, "loss": LOSS}
    return tuple("".join(letters[layer.name] for chunk in rank for layer in chunk) for rank in layout.layout)


def _predicts_before_the_last_stage(args: Any) -> bool:
    return bool(getattr(args, "mtp_num_layers", None)) and predicts_early(_stages_of(args))


def _has_an_empty_stage(args: Any) -> bool:
    return has_an_empty_stage(_stages_of(args))


def _quantizes(args: Any) -> bool:
    by_recipe = given("te_precision_config_file", "kitchen_config_file", "quant_recipe", "use_kitchen")
    return given("fp8", "fp4")(args) or by_recipe(args) or getattr(args, "kitchen_recipe_number", None) is not None


def _shards_weights(args: Any) -> bool:
    return any(above(name, 1)(args) for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"))


def _attends_sparsely(args: Any) -> bool:
    is_asked = getattr(args, "experimental_attention_variant", None) == "dsa"
    return is_asked or "D" in (getattr(args, "hybrid_layer_pattern", None) or "")


_SHARDED_WEIGHTS = "--tensor-parallel-num-weight-shards / --expert-tensor-parallel-num-weight-shards"
_QUANTIZED = "--fp8-format / --fp4-format / --te-precision-config-file / --kitchen-config-file"
_SAVED = "--save-params-interval and the like for activations, gradients and tokens per expert"
_SAVES = tuple(f"save_{what}_interval" for what in ("params", "activations", "wgrads", "dgrads", "tokens_per_expert"))
_LAST_STAGE = "put m into the last stage of --pipeline-model-parallel-layout, or use --pipeline-schedule megatron"
_ONE_OF_TWO = "it looks at one stage per rank, and a rank has two"


def _of_2bw(flag: str, reason: str) -> Refused:
    """A flag of ours that only 2bw has a use for."""
    return Refused(
        flag=flag,
        schedules=FLUSHED | PIPEDREAM | STOCK,
        reason=reason,
        remedy="leave the flag out, or use --pipeline-schedule 2bw",
    )


REFUSED: tuple[Refused, ...] = (
    Refused(
        flag="--mixpipe-k / --mixpipe-gamma",
        is_set=given("mixpipe_k", "mixpipe_gamma"),
        schedules=(OURS | STOCK) - {"mixpipe"},
        reason="they say how many forwards mixpipe keeps in flight",
        remedy="leave the flags out, or use --pipeline-schedule mixpipe",
    ),
    _of_2bw("--pipeline-extra-in-flight", "only 2bw can keep more activations in flight than its stages need"),
    _of_2bw(
        "--pipeline-delayed-microbatches",
        "only 2bw can compute some microbatches of a batch with newer weights than the others",
    ),
    _of_2bw("--synchronous-warmup-iters", "only 2bw can begin without its delay"),
    Refused(
        flag="--delay-correction",
        schedules=FLUSHED | STOCK,
        reason="a synchronous schedule has no delay",
        remedy="leave the flag out, or use --pipeline-schedule 2bw",
    ),
    Refused(
        flag="--delay-correction",
        schedules=PIPEDREAM,
        reason="it corrects a delay of one batch, and every stage has another delay",
        remedy="leave the flag out, or use --pipeline-schedule 2bw",
    ),
    Refused(
        flag="--pipeline-trace / --log-pipeline",
        is_set=given("pipeline_trace", "log_pipeline"),
        schedules=STOCK,
        reason="they record the schedules of megatron_2bw",
        remedy="leave the flags out, or use --pipeline-schedule 1f1b-flush, which is Megatron's 1F1B",
    ),
    Refused(
        flag="--delay-correction lead",
        is_set=_leads_too_far,
        schedules=TWO_BW,
        reason="at this decay of the first moment, the corrected average would no longer contain the old one",
        remedy="raise --adam-beta1 (--sgd-momentum, --muon-momentum) above C/(1+C), or lower --delay-lead C",
    ),
    Refused(
        flag="--delay-correction lead with lion",
        is_set=_leads_lion,
        schedules=TWO_BW,
        reason="Lion's update is the sign of another average than the one it keeps",
        remedy="use --delay-correction update-lead",
    ),
    Refused(
        flag="--delay-correction update-lead in fp32",
        is_set=lambda args: getattr(args, "delay_correction", None) == "update-lead" and not (args.bf16 or args.fp16),
        schedules=TWO_BW,
        reason="it needs main weights beside the model's",
        remedy="use --bf16 or --fp16, or --delay-correction lead",
    ),
    Refused(
        flag="--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank",
        is_set=given(*VIRTUAL),
        schedules=DELAYED,
        reason="interleaving shrinks a bubble, and this schedule leaves none",
        remedy="leave the flag out, or use --pipeline-schedule megatron for the interleaved schedule",
    ),
    Refused(
        flag="--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank",
        is_set=given(*VIRTUAL),
        schedules=FLUSHED,
        reason="it selects Megatron's interleaved schedule",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--clip-grad / grad_norm_skip_threshold of the config",
        is_set=lambda args: args.clip_grad > 0 or (getattr(args, "grad_norm_skip_threshold", None) or inf) < inf,
        schedules=PIPEDREAM,
        reason="a norm over all stages would drain the pipeline after every microbatch",
        remedy="use --clip-grad 0, or --pipeline-schedule 2bw, which clips by the exact norm",
    ),
    Refused(
        flag="--untie-embeddings-and-output-weights",
        is_set=lambda args: not args.untie_embeddings_and_output_weights,
        schedules=PIPEDREAM,
        reason="a weight on the first and the last stage would have two delays",
        remedy="set the flag, or use --pipeline-schedule 2bw",
    ),
    Refused(
        flag="--fp16 / --loss-scale",
        is_set=given("fp16", "loss_scale"),
        schedules=PIPEDREAM,
        reason="skipping an update on all stages would drain the pipeline after every microbatch",
        remedy="use --bf16 without a loss scale, or --pipeline-schedule 2bw",
    ),
    Refused(
        flag="--calculate-per-token-loss",
        schedules=PIPEDREAM,
        reason="only the last stage knows the number of tokens, and earlier ones would wait for it",
        remedy="leave the flag out, or use --pipeline-schedule 2bw",
    ),
    Refused(
        flag="--log-num-zeros-in-grad",
        schedules=PIPEDREAM,
        reason="a count over all stages would drain the pipeline after every microbatch",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--cuda-graph-impl",
        is_set=given("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
        schedules=OURS,
        reason="a captured graph holds the order of Megatron's schedule",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag=_QUANTIZED,
        is_set=_quantizes,
        schedules=DELAYED,
        reason="quantized weights are cached for one version, and there are several",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag=_QUANTIZED,
        is_set=_quantizes,
        schedules=MIRRORED,
        reason="a rank's second stage gets new weights from another rank, and quantized copies of them would stay old",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--num-experts",
        schedules=MIRRORED,
        reason="loads and losses of experts are counted once per rank, and a rank has two stages",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--expert-tensor-parallel-size, without --expert-model-parallel-size, in Megatron 0.18",
        is_set=_sums_experts_over_wrong_ranks,
        schedules=OURS,
        reason="Megatron 0.18 sums these experts' gradients over the wrong ranks, and their copies drift apart",
        remedy="use megatron-core 0.19, leave the flag out, or set --expert-model-parallel-size above 1",
    ),
    Refused(
        flag="--loss-scale with --grad-reduce-in-bf16",
        is_set=lambda args: args.loss_scale and sums_in_bf16(args),
        schedules=DELAYED,
        reason="a delayed update removes the loss scale from gradients as they are, which would round them once more",
        remedy="leave --loss-scale out, which bf16 does not need",
    ),
    Refused(
        flag="--ddp-reduce-scatter-with-fp32-accumulation with --ddp-average-in-collective",
        is_set=_scatters_a_mean_to_fp32,
        schedules=DELAYED,
        reason="Megatron's reduce-scatter in fp32 sums and takes no mean",
        remedy="leave --ddp-average-in-collective out",
    ),
    Refused(
        flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
        schedules=DELAYED | MIRRORED,
        reason="it keeps some gradients outside of the buffer that is captured, or added to that of another rank",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--use-precision-aware-optimizer",
        schedules=DELAYED,
        reason="it keeps gradients where a captured batch cannot put them",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--use-megatron-fsdp / --use-torch-fsdp2",
        is_set=given("use_megatron_fsdp", "use_torch_fsdp2"),
        schedules=OURS,
        reason="its parameters are gathered and freed around every use, in the order of Megatron's schedule",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--num-distributed-optimizer-instances above 1",
        is_set=above("num_distributed_optimizer_instances", 1),
        schedules=DELAYED,
        reason="its shards are summed once more over the instances, which a delayed update does not do",
        remedy="use 1 instance, or --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--use-nccl-ub",
        is_set=given("nccl_ub"),
        schedules=DELAYED,
        reason="only one of the parameter buffers would be registered with NCCL",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--optimizer",
        is_set=lambda args: args.optimizer not in ("adam", "sgd", "muon", "dist_muon", "lion"),
        schedules=DELAYED,
        reason="delayed updates are proven for adam, sgd, muon and lion",
        remedy="use one of these, or --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--no-use-layer-wise-param-layout",
        is_set=_gathers_weights_one_by_one,
        schedules=DELAYED,
        reason="its gather of weights has no place for two versions",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--use-distributed-optimizer with muon or lion in fp32",
        is_set=lambda args: _is_sharded_by_layers(args) and not (args.bf16 or args.fp16),
        schedules=OURS,
        reason="Megatron fails when it makes that optimizer so",
        remedy="use --bf16, or leave --use-distributed-optimizer out",
    ),
    Refused(
        flag="--ckpt-format torch, with --use-distributed-optimizer and muon or lion",
        is_set=lambda args: (args.save or args.load) and args.ckpt_format == "torch" and _is_sharded_by_layers(args),
        schedules=OURS,
        reason="Megatron fails when it saves that optimizer so",
        remedy="use --ckpt-format torch_dist",
    ),
    Refused(
        flag="--optimizer-cpu-offload",
        schedules=DELAYED,
        reason="its copies of the weights would follow only one version",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--moe-router-load-balancing-type quantile_balancing",
        is_set=lambda args: "quantile_balancing" in words(args.moe_router_load_balancing_type),
        schedules=DELAYED,
        reason="its quantiles would include forwards that ran ahead into the next batch",
        remedy="use --moe-router-enable-expert-bias or an auxiliary loss, or --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--moe-single-grouped-weight / --moe-single-grouped-bias",
        is_set=given("moe_single_grouped_weight", "moe_single_grouped_bias"),
        schedules=DELAYED,
        reason="such a weight keeps its numbers where a weight version cannot replace them",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--moe-routing-trace-path",
        schedules=DELAYED,
        reason="it would write forwards that ran ahead to the batch before theirs",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--experimental-attention-variant dsa / D in --hybrid-layer-pattern",
        is_set=_attends_sparsely,
        schedules=DELAYED,
        reason="its auxiliary loss is scaled and logged as if no forward ran ahead into the next batch",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--vision-pretraining",
        schedules=DELAYED,
        reason="it changes gradients and weights between batches, at one version",
        remedy=USE_FLUSH,
    ),
    *(
        Refused(flag=flag, is_set=given(*names), schedules=MIRRORED, reason=_ONE_OF_TWO, remedy=USE_FLUSH)
        for flag, names in {
            "--mtp-num-layers": ("mtp_num_layers",),
            "--vision-pretraining": ("vision_pretraining",),
            "--qk-clip": ("qk_clip", "log_max_attention_logit"),
            _SAVED: _SAVES,
        }.items()
    ),
    Refused(
        flag=_SHARDED_WEIGHTS,
        is_set=_shards_weights,
        schedules=MIRRORED,
        reason=_ONE_OF_TWO,
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--mtp-num-layers",
        schedules=PIPEDREAM,
        reason="a weight on the first and the last stage would have two delays",
        remedy="leave the flag out, or use --pipeline-schedule 2bw",
    ),
    Refused(
        flag="--mtp-num-layers before the last stage",
        is_set=_predicts_before_the_last_stage,
        schedules=TWO_BW,
        reason="its embeddings would be tied on other stages than the first and the last",
        remedy=_LAST_STAGE,
    ),
    Refused(
        flag="--mtp-num-layers before the last stage",
        is_set=_predicts_before_the_last_stage,
        schedules=FLUSHED - MIRRORED,
        reason="what it predicts from would go on to later stages, and transfers have one shape",
        remedy=_LAST_STAGE,
    ),
    Refused(
        flag="--pipeline-model-parallel-layout with an empty stage",
        is_set=_has_an_empty_stage,
        schedules=OURS,
        reason="a stage without weights has nothing to update",
        remedy="give every stage a layer, or use --pipeline-schedule megatron",
    ),
    Refused(
        flag="--mtp-detach-heads",
        schedules=DELAYED,
        reason="its gradients have a norm of their own, with a reduction that delayed updates do not have",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--ckpt-format",
        is_set=lambda args: (args.save or args.load) and args.ckpt_format not in ("torch", "torch_dist"),
        schedules=DELAYED,
        reason="it would lose the older weight versions",
        remedy="use --ckpt-format torch_dist or torch",
    ),
    Refused(
        flag="--non-persistent-ckpt-type local",
        is_set=lambda args: args.non_persistent_ckpt_type == "local",
        schedules=DELAYED,
        reason="resuming with all weight versions is proven for checkpoints in a shared folder",
        remedy="use --non-persistent-ckpt-type global",
    ),
    Refused(
        flag="--ckpt-step",
        is_set=lambda args: args.ckpt_step and args.ckpt_format == "torch" and args.use_distributed_optimizer,
        schedules=OURS,
        reason="in the torch format, Megatron reads the distributed optimizer's state of the newest checkpoint all the "
        "same",
        remedy="use --ckpt-format torch_dist, or put the iteration into latest_checkpointed_iteration.txt",
    ),
    Refused(
        flag="--qk-clip",
        is_set=given("qk_clip", "log_max_attention_logit"),
        schedules=DELAYED,
        reason="it changes or reads weights between batches, at one version",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag=_SAVED,
        is_set=given(*_SAVES),
        schedules=DELAYED,
        reason="what it saves after a call belongs to several batches",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--check-for-large-grads",
        schedules=DELAYED,
        reason="it looks at gradients when Megatron reduces them, and delayed updates reduce them on their own",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="has_cond_embedder / flextron of the config",
        is_set=given("has_cond_embedder", "flextron"),
        schedules=DELAYED,
        reason="gradients of some weights need a reduction over the stages that delayed updates do not have",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--pipeline-model-parallel-comm-backend ucc",
        is_set=lambda args: getattr(args, "pipeline_model_parallel_comm_backend", None) == "ucc",
        schedules=OURS,
        reason="transfers have process groups of their own, with the backend of the others",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag=_SHARDED_WEIGHTS,
        is_set=_shards_weights,
        schedules=DELAYED,
        reason="its gradients need a reduction that delayed updates do not have",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--adlr-autoresume",
        schedules=DELAYED,
        reason="it saves while an update is pending",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--dataloader-save",
        schedules=DELAYED,
        reason="the first stage has read ahead into the next batch when it saves",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--fake-process-group",
        schedules=OURS,
        reason="its ranks never answer, and ours connect with their neighbours before the first batch",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--inprocess-restart",
        schedules=OURS,
        reason="process groups of the failed run would survive the restart",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--freeze-all-layers",
        schedules=DELAYED,
        reason="there is nothing to update",
        remedy=USE_FLUSH,
    ),
    Refused(
        flag="--num-microbatches-with-partial-activation-checkpoints",
        schedules=OURS,
        reason="which microbatches recompute is decided inside Megatron's schedule",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--fine-grained-activation-offloading",
        schedules=OURS,
        reason="Megatron's schedule resets its state",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--overlap-moe-expert-parallel-comm / --delay-wgrad-compute",
        is_set=given("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
        schedules=OURS,
        reason="it splits forwards and backwards inside Megatron's schedule",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--defer-embedding-wgrad-compute",
        schedules=OURS,
        reason="Megatron's schedule finishes what it defers",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--moe-expert-rank-capacity-factor",
        is_set=given("moe_expert_rank_capacity_factor", "moe_paged_stash"),
        schedules=OURS,
        reason="its paged buffers are tied to Megatron's schedule",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--perform-rl-step",
        schedules=OURS,
        reason="rollouts and updates alternate on the newest weights",
        remedy=USE_MEGATRON,
    ),
    Refused(
        flag="--rerun-mode",
        is_set=lambda args: args.rerun_mode not in ("disabled", "validate_results"),
        schedules=DELAYED,
        reason="a batch cannot be run again while the next one is under way",
        remedy="use --rerun-mode disabled",
    ),
    Refused(
        flag="--error-injection-rate",
        schedules=DELAYED,
        reason="errors are injected into batches that are run again, and a delayed update's batch is not",
        remedy=USE_FLUSH,
    ),
)
