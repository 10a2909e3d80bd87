"""Flags that are refused before training, by schedule."""

from __future__ import annotations

from megatron_2bw.planner.flag_table.conditions import (
    attends_sparsely,
    clips_gates,
    clips_heads_by_replica,
    clips_shards,
    clips_split_heads,
    corrects_precision_aware,
    depends_on_data,
    gathers_weights_one_by_one,
    has_uneven_optimizers,
    interleaves,
    is_sharded_by_layers,
    keeps_remainders,
    leads_lion,
    leads_nothing,
    leads_too_far,
    leaves_a_stage_empty,
    leaves_copies_of_experts_apart,
    predicts_before_the_last_stage,
    quantizes,
    recomputes_biases,
    reshards,
    saves_by_nvrx,
    saves_optimizers,
    scatters_a_mean_to_fp32,
    shards_weights,
    skips_by_norm,
    skips_on_some_ranks,
    sums_experts_over_wrong_ranks,
    ties_what_it_predicts,
)
from megatron_2bw.planner.flag_table.rows import (
    OURS,
    STOCK,
    SYNCHRONOUS,
    USE_FLUSH,
    USE_MEGATRON,
    Refused,
    above,
    given,
    sums_in_bf16,
    words,
)
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED, PER_MICROBATCH, TWO_BW

_SHARDED_WEIGHTS = "--tensor-parallel-num-weight-shards / --expert-tensor-parallel-num-weight-shards"
_QUANTIZED = "--fp8-format / --fp4-format / --te-precision-config-file / --kitchen-config-file"
_SAVED = "--save-params-interval and the like for activations, gradients and tokens per expert"
_SAVES = tuple(f"save_{what}_interval" for what in ("params", "activations", "wgrads", "dgrads", "tokens_per_expert"))
_LAST_STAGE = "put m into the last stage of --pipeline-model-parallel-layout, or use --pipeline-schedule megatron"
_USE_2BW = "leave the flag out, or use --pipeline-schedule 2bw"
_ONE_OF_TWO = "it looks at one stage per rank, and a rank has two"


def _of_2bw(flag: str, reason: str) -> Refused:
    """A flag of ours that only 2bw has a use for."""
    return Refused(flag, SYNCHRONOUS | PER_MICROBATCH | STOCK, reason, _USE_2BW)


REFUSED: tuple[Refused, ...] = (
    Refused(
        "--mixpipe-k / --mixpipe-gamma",
        (OURS | STOCK) - {"mixpipe"},
        "they say how many forwards mixpipe keeps in flight",
        "leave the flags out, or use --pipeline-schedule mixpipe",
        is_set=given("mixpipe_k", "mixpipe_gamma"),
    ),
    _of_2bw("--pipeline-extra-in-flight", "only 2bw can keep more activations in flight than its stages need"),
    _of_2bw(
        "--pipeline-delayed-microbatches",
        "only 2bw can compute some microbatches of a batch with newer weights than the others",
    ),
    _of_2bw("--synchronous-warmup-iters", "only 2bw can begin without its delay"),
    Refused(
        "--pipeline-gradient-buffers 1",
        SYNCHRONOUS | PER_MICROBATCH | STOCK,
        "only 2bw keeps finished gradients beside those of the next batch",
        _USE_2BW,
        is_set=lambda args: getattr(args, "pipeline_gradient_buffers", None) == 1,
    ),
    Refused("--delay-correction", SYNCHRONOUS | STOCK, "a synchronous schedule has no delay", _USE_2BW),
    Refused(
        "--delay-correction",
        PER_MICROBATCH,
        "it corrects a delay of one batch, and every stage has another delay",
        _USE_2BW,
    ),
    Refused(
        "--delay-lead",
        OURS | STOCK,
        "it says how far --delay-correction looks ahead, and there is none",
        "leave the flag out, or add --delay-correction lead or update-lead",
        is_set=leads_nothing,
    ),
    Refused(
        "--pipeline-receives early with --num-experts, --sft or --dataloader-inter-document-masking",
        OURS | STOCK,
        "which kernels run depends on the data, and one that is loaded late waits for receives that are posted early",
        "leave the flag out",
        is_set=lambda args: getattr(args, "pipeline_receives", None) == "early" and depends_on_data(args),
    ),
    Refused(
        "--pipeline-trace / --log-pipeline / --pipeline-receives",
        STOCK,
        "they are about the schedules of megatron_2bw",
        "leave the flags out, or use --pipeline-schedule 1f1b-flush, which is Megatron's 1F1B",
        is_set=given("pipeline_trace", "log_pipeline", "pipeline_receives"),
    ),
    Refused(
        "--delay-correction lead",
        TWO_BW,
        "at this decay of the first moment, the corrected average would no longer contain the old one",
        "raise --adam-beta1 (--sgd-momentum, --muon-momentum) above C/(1+C), which is 0.67 for C = 2, or lower "
        "--delay-lead C",
        is_set=leads_too_far,
    ),
    Refused(
        "--delay-correction lead with lion",
        TWO_BW,
        "Lion's update is the sign of another average than the one it keeps",
        "use --delay-correction update-lead",
        is_set=leads_lion,
    ),
    Refused(
        "--delay-correction lead with soap",
        TWO_BW,
        "SOAP keeps its average of gradients in axes of its own, which turn from update to update",
        "use --delay-correction update-lead",
        is_set=lambda args: getattr(args, "delay_correction", None) == "lead" and args.optimizer == "soap",
    ),
    Refused(
        "--delay-correction update-lead in fp32",
        TWO_BW,
        "it needs main weights beside the model's",
        "use --bf16 or --fp16, or --delay-correction lead",
        is_set=lambda args: getattr(args, "delay_correction", None) == "update-lead" and not (args.bf16 or args.fp16),
    ),
    Refused(
        "--delay-correction with --use-precision-aware-optimizer",
        TWO_BW,
        "that optimizer keeps moments and main weights to itself, in a precision of its own",
        "leave one of the two out",
        is_set=corrects_precision_aware,
    ),
    Refused(
        "--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank",
        DELAYED,
        "interleaving shrinks a bubble, and this schedule leaves none",
        "leave the flag out, or use --pipeline-schedule megatron for the interleaved schedule",
        is_set=interleaves,
    ),
    Refused(
        "--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank",
        SYNCHRONOUS,
        "it selects Megatron's interleaved schedule",
        USE_MEGATRON,
        is_set=interleaves,
    ),
    Refused(
        "--clip-grad / grad_norm_skip_threshold of the config",
        PER_MICROBATCH,
        "a norm over all stages would drain the pipeline after every microbatch",
        "use --clip-grad 0, or --pipeline-schedule 2bw, which clips by the exact norm",
        is_set=lambda args: args.clip_grad > 0 or skips_by_norm(args),
    ),
    Refused(
        "--untie-embeddings-and-output-weights",
        PER_MICROBATCH,
        "a weight on the first and the last stage would have two delays",
        "set the flag, or use --pipeline-schedule 2bw",
        is_set=lambda args: not args.untie_embeddings_and_output_weights,
    ),
    Refused(
        "--fp16 / --loss-scale",
        PER_MICROBATCH,
        "skipping an update on all stages would drain the pipeline after every microbatch",
        "use --bf16 without a loss scale, or --pipeline-schedule 2bw",
        is_set=given("fp16", "loss_scale"),
    ),
    Refused(
        "--calculate-per-token-loss",
        PER_MICROBATCH,
        "only the last stage knows the number of tokens, and earlier ones would wait for it",
        _USE_2BW,
    ),
    Refused(
        "--log-num-zeros-in-grad",
        PER_MICROBATCH,
        "a count over all stages would drain the pipeline after every microbatch",
        "leave the flag out",
    ),
    Refused(
        "--cuda-graph-impl",
        OURS,
        "a captured graph holds the order of Megatron's schedule",
        USE_MEGATRON,
        is_set=given("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
    ),
    Refused(
        _QUANTIZED,
        DELAYED,
        "quantized weights are cached for one version, and there are several",
        USE_FLUSH,
        is_set=quantizes,
    ),
    Refused(
        _QUANTIZED,
        BIDIRECTIONAL,
        "a rank's second stage gets new weights from another rank, and quantized copies of them would stay old",
        USE_FLUSH,
        is_set=quantizes,
    ),
    Refused(
        "--num-experts",
        BIDIRECTIONAL,
        "loads and losses of experts are counted once per rank, and a rank has two stages",
        USE_FLUSH,
    ),
    Refused(
        "--expert-tensor-parallel-size, without --expert-model-parallel-size, in Megatron 0.18",
        OURS,
        "Megatron 0.18 sums these experts' gradients over the wrong ranks, and their copies drift apart",
        "use megatron-core 0.19, leave the flag out, or set --expert-model-parallel-size above 1",
        is_set=sums_experts_over_wrong_ranks,
    ),
    Refused(
        "--loss-scale with --grad-reduce-in-bf16",
        DELAYED,
        "a delayed update removes the loss scale from gradients as they are, which would round them once more",
        "leave --loss-scale out, which bf16 does not need",
        is_set=lambda args: args.loss_scale and sums_in_bf16(args),
    ),
    Refused(
        "--ddp-reduce-scatter-with-fp32-accumulation with --ddp-average-in-collective",
        DELAYED,
        "Megatron's reduce-scatter in fp32 sums and takes no mean",
        "leave --ddp-average-in-collective out",
        is_set=scatters_a_mean_to_fp32,
    ),
    Refused(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        DELAYED | BIDIRECTIONAL,
        "it keeps some gradients outside of the buffer that is captured, or added to that of another rank",
        "leave the flag out",
    ),
    Refused(
        "--use-megatron-fsdp / --use-torch-fsdp2",
        OURS,
        "its parameters are gathered and freed around every use, in the order of Megatron's schedule",
        "leave the flag out",
        is_set=given("use_megatron_fsdp", "use_torch_fsdp2"),
    ),
    Refused(
        "--num-distributed-optimizer-instances above 1, with muon, lion or soap",
        OURS,
        "Megatron has one instance of the optimizer that shards whole weights",
        "use 1 instance",
        is_set=lambda args: above("num_distributed_optimizer_instances", 1)(args) and is_sharded_by_layers(args),
    ),
    Refused(
        "--use-nccl-ub",
        DELAYED,
        "only one of the parameter buffers would be registered with NCCL",
        "leave the flag out",
        is_set=given("nccl_ub"),
    ),
    Refused(
        "--optimizer",
        DELAYED,
        "delayed updates are proven for adam, sgd, muon, lion and soap",
        "use one of these, or --pipeline-schedule 1f1b-flush",
        is_set=lambda args: args.optimizer not in ("adam", "sgd", "muon", "dist_muon", "soap", "lion"),
    ),
    Refused(
        "--no-use-layer-wise-param-layout",
        DELAYED,
        "its gather of weights has no place for two versions",
        "leave the flag out",
        is_set=gathers_weights_one_by_one,
    ),
    Refused(
        "--use-distributed-optimizer with muon, lion or soap in fp32",
        OURS,
        "Megatron fails when it makes that optimizer so",
        "use --bf16, or leave --use-distributed-optimizer out",
        is_set=lambda args: is_sharded_by_layers(args) and not (args.bf16 or args.fp16),
    ),
    Refused(
        "--expert-tensor-parallel-size, with --use-distributed-optimizer, muon, lion or soap, and one replica",
        OURS,
        "Megatron updates the copies of an expert apart, each by a part of its gradient",
        "leave --use-distributed-optimizer out, which shards nothing here, or --expert-tensor-parallel-size",
        is_set=leaves_copies_of_experts_apart,
    ),
    Refused(
        "--ckpt-format torch, with --use-distributed-optimizer and muon, lion or soap",
        OURS,
        "Megatron fails when it saves that optimizer so",
        "use --ckpt-format torch_dist, or with soap, which has none, leave --use-distributed-optimizer out",
        is_set=lambda args: (args.save or args.load) and args.ckpt_format == "torch" and is_sharded_by_layers(args),
    ),
    Refused(
        "--mtp-num-layers with tied embeddings, and --save in --ckpt-format torch_dist",
        OURS,
        "Megatron fails when it saves an embedding that the last stage has twice",
        "give --untie-embeddings-and-output-weights, or use --ckpt-format torch",
        is_set=lambda args: args.save and args.ckpt_format == "torch_dist" and ties_what_it_predicts(args),
    ),
    Refused(
        "--save in --ckpt-format torch_dist, where the optimizers of stages have different groups of weights",
        OURS,
        "Megatron saves them and cannot load them: of parallel experts on some stages only, of an embedding alone on "
        "the first, with muP, and with muon or lion of a last stage without layers and of biases with SwiGLU",
        "use --ckpt-format torch, or --use-distributed-optimizer",
        is_set=lambda args: saves_optimizers(args) and args.ckpt_format == "torch_dist" and has_uneven_optimizers(args),
    ),
    Refused(
        "--save in --ckpt-format torch_dist with soap",
        OURS,
        "Megatron fails when it saves that optimizer so: some of its matrices have other shapes than the weights",
        "use --ckpt-format torch without --use-distributed-optimizer, or --no-save-optim, and --no-load-optim later",
        is_set=lambda args: saves_optimizers(args) and args.ckpt_format == "torch_dist" and args.optimizer == "soap",
    ),
    Refused(
        "--dist-ckpt-optim-fully-reshardable with lion",
        OURS,
        "Megatron 0.19 saves that optimizer and cannot load it: it looks for a second moment",
        "leave the flag out",
        is_set=lambda args: reshards(args) and args.optimizer == "lion" and is_sharded_by_layers(args),
    ),
    Refused(
        "--use-precision-aware-optimizer with bf16, and --dist-ckpt-optim-fully-reshardable or --ckpt-format torch",
        OURS,
        "Megatron saves in fp32 what weights in bf16 lack of main weights, and Transformer Engine loads it in int16 "
        "alone",
        "leave the flag out, and use --ckpt-format torch_dist",
        is_set=lambda args: (
            keeps_remainders(args) and saves_optimizers(args) and (args.ckpt_format == "torch" or reshards(args))
        ),
    ),
    Refused(
        "--optimizer-cpu-offload with --save in --ckpt-format torch",
        OURS,
        "Megatron saves that optimizer and cannot load it: torch reads no classes, of which its file names two",
        "use --ckpt-format torch_dist",
        is_set=lambda args: args.optimizer_cpu_offload and saves_optimizers(args) and args.ckpt_format == "torch",
    ),
    Refused(
        "--optimizer-cpu-offload with --async-save by nvidia-resiliency-ext",
        OURS,
        "it hands what is on the host to another process as it is, and the next update changes it meanwhile",
        "use --async-strategy mcore",
        is_set=lambda args: args.optimizer_cpu_offload and saves_optimizers(args) and saves_by_nvrx(args),
    ),
    Refused(
        "--overlap-cpu-optimizer-d2h-h2d with --optimizer-offload-fraction below 1, and gradients in bf16",
        OURS,
        "Megatron writes in fp32, beside the update that reads them, the gradients of what the GPU updates",
        "leave the flag out, or sum gradients in fp32",
        is_set=lambda args: (
            args.optimizer_cpu_offload
            and args.overlap_cpu_optimizer_d2h_h2d
            and args.optimizer_offload_fraction < 1
            and sums_in_bf16(args)
        ),
    ),
    Refused(
        "--use-precision-aware-optimizer with fp16",
        SYNCHRONOUS,
        "Megatron clips no gradients in fp16 for it",
        "give --accumulate-allreduce-grads-in-fp32, or --clip-grad 0",
        is_set=lambda args: (
            args.use_precision_aware_optimizer
            and args.fp16
            and args.clip_grad
            and not args.accumulate_allreduce_grads_in_fp32
        ),
    ),
    Refused(
        "--mtp-detach-heads with --use-distributed-optimizer and grad_norm_skip_threshold of the config",
        OURS,
        "Megatron skips an update only where a rank has weights beside those of the heads",
        "leave one of the three out",
        is_set=skips_on_some_ranks,
    ),
    Refused(
        "--mtp-detach-heads with --use-distributed-optimizer, and muon, lion or soap",
        SYNCHRONOUS,
        "Megatron leaves other replicas out of the norm by which it clips those heads",
        "use --pipeline-schedule 2bw, or --clip-grad 0",
        is_set=clips_heads_by_replica,
    ),
    Refused(
        "--recompute-modules mlp with biases",
        OURS,
        "Megatron's backward runs into itself without end: its checkpoint returns the bias, too",
        "give --disable-bias-linear, or leave mlp out",
        is_set=recomputes_biases,
    ),
    Refused(
        "--moe-router-load-balancing-type quantile_balancing",
        DELAYED,
        "its quantiles would include forwards that ran ahead into the next batch",
        "use --moe-router-enable-expert-bias or an auxiliary loss, or --pipeline-schedule 1f1b-flush",
        is_set=lambda args: "quantile_balancing" in words(args.moe_router_load_balancing_type),
    ),
    Refused(
        "--moe-single-grouped-weight / --moe-single-grouped-bias",
        DELAYED,
        "such a weight keeps its numbers where a weight version cannot replace them",
        "leave the flag out",
        is_set=given("moe_single_grouped_weight", "moe_single_grouped_bias"),
    ),
    Refused(
        "--moe-routing-trace-path",
        DELAYED,
        "it would write forwards that ran ahead to the batch before theirs",
        USE_FLUSH,
    ),
    Refused(
        "--experimental-attention-variant dsa / D in --hybrid-layer-pattern",
        DELAYED,
        "its auxiliary loss is scaled and logged as if no forward ran ahead into the next batch",
        USE_FLUSH,
        is_set=attends_sparsely,
    ),
    Refused(
        "--vision-pretraining", DELAYED, "it changes gradients and weights between batches, at one version", USE_FLUSH
    ),
    *(
        Refused(flag, BIDIRECTIONAL, _ONE_OF_TWO, USE_FLUSH, is_set=given(*names))
        for flag, names in {
            "--mtp-num-layers": ("mtp_num_layers",),
            "--vision-pretraining": ("vision_pretraining",),
            "--qk-clip / --log-max-attention-logit": ("qk_clip", "log_max_attention_logit"),
            _SAVED: _SAVES,
        }.items()
    ),
    Refused(_SHARDED_WEIGHTS, BIDIRECTIONAL, _ONE_OF_TWO, USE_FLUSH, is_set=shards_weights),
    Refused(
        "--mtp-num-layers", PER_MICROBATCH, "a weight on the first and the last stage would have two delays", _USE_2BW
    ),
    Refused(
        "--mtp-num-layers before the last stage",
        TWO_BW,
        "its embeddings would be tied on other stages than the first and the last",
        _LAST_STAGE,
        is_set=predicts_before_the_last_stage,
    ),
    Refused(
        "--mtp-num-layers before the last stage",
        SYNCHRONOUS - BIDIRECTIONAL,
        "what it predicts from would go on to later stages, and transfers have one shape",
        _LAST_STAGE,
        is_set=predicts_before_the_last_stage,
    ),
    Refused(
        "--pipeline-model-parallel-layout with an empty stage",
        OURS,
        "a stage without weights has nothing to update",
        "give every stage a layer, or use --pipeline-schedule megatron",
        is_set=leaves_a_stage_empty,
    ),
    Refused(
        "--ckpt-format",
        DELAYED,
        "it would lose the older weight versions",
        "use --ckpt-format torch_dist or torch",
        is_set=lambda args: (args.save or args.load) and args.ckpt_format not in ("torch", "torch_dist"),
    ),
    Refused(
        "--non-persistent-ckpt-type local",
        DELAYED,
        "resuming with all weight versions is proven for checkpoints in a shared folder",
        "use --non-persistent-ckpt-type global",
        is_set=lambda args: args.non_persistent_ckpt_type == "local",
    ),
    Refused(
        "--async-save with --ckpt-format torch",
        OURS,
        "Megatron would end at the first save: it does not write this format beside training",
        "use --ckpt-format torch_dist, or leave --async-save out",
        is_set=lambda args: args.save and args.async_save and args.ckpt_format == "torch",
    ),
    Refused(
        "--non-persistent-save-interval with --ckpt-format torch",
        OURS,
        "Megatron would end at the first such save: non-persistent checkpoints have another format",
        "use --ckpt-format torch_dist, or leave the interval out",
        is_set=lambda args: args.save and args.non_persistent_save_interval and args.ckpt_format == "torch",
    ),
    Refused(
        "--non-persistent-save-interval without --non-persistent-ckpt-type",
        OURS,
        "Megatron would end at the first such save: it does not know where to put it",
        "use --non-persistent-ckpt-type global",
        is_set=lambda args: args.save and args.non_persistent_save_interval and args.non_persistent_ckpt_type is None,
    ),
    Refused(
        "--non-persistent-save-interval with --non-persistent-ckpt-type in_memory",
        OURS,
        "Megatron would end at the first such save: it does not have this type yet",
        "use --non-persistent-ckpt-type global",
        is_set=lambda args: (
            args.save and args.non_persistent_save_interval and args.non_persistent_ckpt_type == "in_memory"
        ),
    ),
    Refused(
        "--qk-clip with --use-distributed-optimizer, adam or sgd, in bf16 or fp16",
        OURS,
        "Megatron would end when it first clips: it looks for whole main weights, and each replica has a part",
        "leave --use-distributed-optimizer out, or use --optimizer muon",
        is_set=clips_shards,
    ),
    Refused(
        "--qk-clip with --tensor-model-parallel-size, without --multi-latent-attention",
        OURS,
        "Megatron would end when it first clips: it takes the heads of all tensor-parallel ranks for those of one",
        "leave one of the two out, or use --multi-latent-attention",
        is_set=clips_split_heads,
    ),
    Refused(
        "--qk-clip with --attention-output-gate, without --multi-latent-attention",
        OURS,
        "Megatron would end when it first clips: it takes the gates for queries and keys",
        "leave one of the two out",
        is_set=clips_gates,
    ),
    Refused(
        "--qk-clip / --log-max-attention-logit in fp32",
        SYNCHRONOUS - BIDIRECTIONAL,
        "Megatron looks for attention inside a model in 16 bits",
        "use --bf16, or --pipeline-schedule 2bw",
        is_set=lambda args: (args.qk_clip or args.log_max_attention_logit) and not (args.bf16 or args.fp16),
    ),
    Refused(_SAVED, DELAYED, "what it saves after a call belongs to several batches", USE_FLUSH, is_set=given(*_SAVES)),
    Refused(
        "has_cond_embedder / flextron of the config",
        DELAYED,
        "gradients of some weights need a reduction over the stages that delayed updates do not have",
        USE_FLUSH,
        is_set=given("has_cond_embedder", "flextron"),
    ),
    Refused(
        "experimental_attention_variant_loss_scale_func of the config",
        DELAYED,
        "it scales a loss for the whole process, and forwards of the next batch run before all backwards of this one",
        USE_FLUSH,
        is_set=given("experimental_attention_variant_loss_scale_func"),
    ),
    Refused(
        "--pipeline-model-parallel-comm-backend ucc",
        OURS,
        "transfers have process groups of their own, with the backend of the others",
        USE_MEGATRON,
        is_set=lambda args: getattr(args, "pipeline_model_parallel_comm_backend", None) == "ucc",
    ),
    Refused(
        "--use-ring-exchange-p2p",
        OURS,
        "transfers have process groups of their own, with sends and receives",
        USE_MEGATRON,
    ),
    Refused(
        _SHARDED_WEIGHTS,
        DELAYED,
        "its gradients need a reduction that delayed updates do not have",
        USE_FLUSH,
        is_set=shards_weights,
    ),
    Refused("--adlr-autoresume", DELAYED, "it saves while an update is pending", "leave the flag out"),
    Refused(
        "--dataloader-save of a script",
        DELAYED,
        "the first stage has read ahead into the next batch when it saves",
        USE_FLUSH,
        is_set=given("dataloader_save"),
    ),
    Refused(
        "--fake-process-group",
        OURS,
        "its ranks never answer, and ours connect with their neighbours before the first batch",
        USE_MEGATRON,
    ),
    Refused(
        "--inprocess-restart", OURS, "process groups of the failed run would survive the restart", "leave the flag out"
    ),
    Refused("--freeze-all-layers", DELAYED, "there is nothing to update", USE_FLUSH),
    Refused(
        "num_microbatches_with_partial_activation_checkpoints of the config",
        OURS,
        "which microbatches recompute is decided inside Megatron's schedule",
        USE_MEGATRON,
        is_set=given("num_microbatches_with_partial_activation_checkpoints"),
    ),
    Refused("--fine-grained-activation-offloading", OURS, "Megatron's schedule resets its state", USE_MEGATRON),
    Refused(
        "--overlap-moe-expert-parallel-comm / --delay-wgrad-compute",
        OURS,
        "it splits forwards and backwards inside Megatron's schedule",
        USE_MEGATRON,
        is_set=given("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    ),
    Refused("--defer-embedding-wgrad-compute", OURS, "Megatron's schedule finishes what it defers", USE_MEGATRON),
    Refused(
        "--moe-expert-rank-capacity-factor",
        OURS,
        "its paged buffers are tied to Megatron's schedule",
        USE_MEGATRON,
        is_set=given("moe_expert_rank_capacity_factor", "moe_paged_stash"),
    ),
    Refused("--perform-rl-step", OURS, "rollouts and updates alternate on the newest weights", USE_MEGATRON),
    Refused(
        "--rerun-mode",
        DELAYED,
        "a batch cannot be run again while the next one is under way",
        "use --rerun-mode disabled",
        is_set=lambda args: args.rerun_mode not in ("disabled", "validate_results"),
    ),
    Refused(
        "--error-injection-rate",
        DELAYED,
        "errors are injected into batches that are run again, and a delayed update's batch is not",
        USE_FLUSH,
    ),
)
