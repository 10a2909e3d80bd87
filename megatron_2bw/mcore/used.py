"""What of Megatron a run relies on and `install` leaves alone; where it is missing, `install` refuses."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.mcore.symbols import Used


def _names(module: str, *names: str) -> Iterator[Used]:
    """Of which no parameter is passed by name."""
    return (Used(module=module, name=name) for name in names)


_CALCULATOR = "megatron.core.num_microbatches_calculator"
_CHECKPOINTS = "megatron.core.dist_checkpointing"
_DISTRIBUTED = "megatron.core.distributed"
_MOE = "megatron.core.transformer.moe"
_OPTIMIZER = "megatron.core.optimizer"
_PARALLEL_STATE = "megatron.core.parallel_state"
_RERUN = "megatron.core.rerun_state_machine"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

USED: tuple[Used, ...] = (
    *_names(
        _PARALLEL_STATE,
        "get_context_parallel_group",
        "get_context_parallel_world_size",
        "get_data_parallel_group",
        "get_data_parallel_world_size",
        "get_embedding_group",
        "get_pipeline_model_parallel_group",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_world_size",
        "get_tensor_and_data_parallel_group",
        "get_tensor_model_parallel_group",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
        "_PIPELINE_MODEL_PARALLEL_GROUP",
    ),
    Used(
        module=_PARALLEL_STATE,
        name="create_group",
        parameters=("ranks", "timeout", "backend", "pg_options", "group_desc"),
    ),
    *_names("megatron.core.process_groups_config", "ProcessGroupCollection"),
    *_names(f"{_CHECKPOINTS}.dict_utils", "nested_values"),
    *_names("megatron.core.utils", "get_attr_wrapped_model", "get_model_config", "unwrap_model"),
    # The stage's boundary.
    Used(module=_SCHEDULES, name="forward_step", parameters=("current_microbatch", "is_last_stage", "cp_group_size")),
    Used(module=_SCHEDULES, name="backward_step", parameters=("input_tensor", "output_tensor", "output_tensor_grad")),
    Used(module=_SCHEDULES, name="get_tensor_shapes", parameters=("tp_group", "cp_group", "decoder_seq_length")),
    Used(
        module=_SCHEDULES,
        name="forward_backward_pipelining_without_interleaving",
        parameters=("force_all_reduce", "forward_only", "collect_non_loss_data"),
    ),
    Used(module=_SCHEDULES, name="deallocate_output_tensor", parameters=("out", "deallocate_pipeline_outputs")),
    *_names("megatron.core.tensor_parallel", "get_cuda_rng_tracker"),
    # Missing, a tied embedding would be taken for an untied one.
    Used(
        module="megatron.core.models.gpt.gpt_model",
        name="GPTModel",
        parameters=("share_embeddings_and_output_weights", "pre_process", "post_process"),
    ),
    # Gradients and updates.
    *_names(_DISTRIBUTED, "finalize_model_grads"),
    *_names(f"{_DISTRIBUTED}.param_and_grad_buffer", "shard_buffer"),
    Used(
        module=f"{_DISTRIBUTED}.reduce_scatter_with_fp32_accumulation",
        name="reduce_scatter_with_fp32_accumulation",
        parameters=("op", "group", "async_op"),
    ),
    *_names(f"{_OPTIMIZER}.clip_grads", "multi_tensor_applier", "l2_norm_impl"),
    *_names(
        f"{_OPTIMIZER}.optimizer",
        "ChainedOptimizer.get_grad_norm",
        "ChainedOptimizer.count_zeros",
        "ChainedOptimizer.grads_states_parallel_group_is_shared",
        "MegatronOptimizer.get_grad_stats_parallel_group",
        "MegatronOptimizer.prepare_grads",
        "Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads",
        "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
    ),
    *_names(
        f"{_OPTIMIZER}.distrib_optimizer",
        "DistributedOptimizer._copy_model_grads_to_main_grads",
        "DistributedOptimizer._copy_main_params_to_model_params",
    ),
    # Missing, losses would be scaled and gradients never divided by the scale.
    Used(module=f"{_OPTIMIZER}.optimizer", name="MixedPrecisionOptimizer", parameters=("grad_scaler",)),
    Used(module=f"{_OPTIMIZER}.optimizer", name="SEPARATE_GRAD_NORM_GROUPS", since=(0, 19)),
    *(
        Used(module=f"{_OPTIMIZER}.optimizer", name=name, parameters=("grad_norm_group",), since=(0, 19))
        for name in (
            "ChainedOptimizer.has_grad_norm_group",
            "ChainedOptimizer._get_grad_norm_for_group",
            "MegatronOptimizer.get_grads_for_grad_norm",
        )
    ),
    Used(module=f"{_OPTIMIZER}.optimizer", name="MegatronOptimizer.get_main_grads_for_grad_norm", until=(0, 19)),
    *_names(f"{_OPTIMIZER}.layer_wise_optimizer", "LayerWiseDistributedOptimizer"),
    *_names(_RERUN, "_GLOBAL_RERUN_STATE_MACHINE", "RerunMode", "get_rerun_state_machine"),
    Used(
        module=_RERUN,
        name="RerunStateMachine.validate_result",
        parameters=("result", "rejection_func", "message", "fatal"),
    ),
    Used(
        module=_RERUN,
        name="RerunStateMachine.is_unexpectedly_large",
        parameters=("result", "threshold", "context"),
    ),
    # Experts.
    *_names(f"{_MOE}.moe_utils", "MoEAuxLossAutoScaler.main_loss_backward_scale"),
    Used(module=f"{_MOE}.moe_utils", name="get_updated_expert_bias", parameters=("tp_dp_cp_group",)),
    *_names(f"{_MOE}.router", "TopKRouter._maintain_float32_expert_bias"),
    *_names(f"{_MOE}.moe_logging", "MoEMetricsTracker", "MoEMetricsTracker.metrics", "get_moe_metrics_tracker"),
    Used(module=f"{_MOE}.moe_logging", name="set_moe_metrics_tracker", parameters=("tracker",)),
    Used(
        module=f"{_MOE}.moe_logging",
        name="MoEMetricsTracker.report",
        parameters=("loss_scale", "writer", "wandb_writer", "per_layer_logging", "total_loss_dict"),
    ),
    Used(
        module=f"{_MOE}.moe_logging",
        name="MoEMetricsTracker.ensure_initialized",
        parameters=("name", "num_layers", "device"),
    ),
    Used(
        module=f"{_MOE}.moe_logging",
        name="MetricEntry",
        parameters=("values", "reduce_group", "avg_group", "needs_dp_avg"),
    ),
    # Attention.
    *_names("megatron.core.transformer.attention", "SelfAttention.clip_qk"),
    *_names("megatron.core.transformer.multi_latent_attention", "MLASelfAttention.clip_qk"),
    # The training loop.
    *_names("megatron.training", "get_args", "get_timers"),
    *_names("megatron.training.utils", "print_rank_0"),
    *_names(
        "megatron.training.training",
        "_TRAIN_START_TIME",
        "_seqlen_stats_active",
        "_seqlen_stats_in_iteration",
    ),
    *_names("megatron.core.timers", "DummyTimer", "TimerBase", "Timers"),
    Used(module="megatron.core.timers", name="Timer.set_elapsed", parameters=("value",)),
    *_names(_CALCULATOR, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"),
    Used(
        module=_CALCULATOR,
        name="_build_num_microbatches_calculator",
        parameters=(
            "rank",
            "global_batch_size",
            "micro_batch_size",
            "data_parallel_size",
            "decrease_batch_size_if_needed",
            "step_batch_size_schedule",
            "seq_length",
        ),
    ),
    # Checkpoints.
    *_names(f"{_CHECKPOINTS}.mapping", "ShardedTensor", "ShardedTensorFactory"),
    *_names(f"{_CHECKPOINTS}.utils", "add_prefix_for_sharding"),
    Used(
        module=f"{_CHECKPOINTS}.gpt_checkpoint_interop",
        name="retarget_sharded_state_dict_to_gpt_checkpoint",
        since=(0, 19),
    ),
    Used(module="megatron.training.async_utils", name="maybe_finalize_async_save", parameters=("blocking",)),
    Used(
        module="megatron.training.checkpointing",
        name="get_checkpoint_name",
        parameters=("iteration", "return_base_dir"),
    ),
    Used(module="megatron.training.checkpointing", name="read_metadata", parameters=("tracker_filename",)),
    Used(
        module="megatron.training.wandb_utils",
        name="on_save_checkpoint_success",
        parameters=("checkpoint_path", "tracker_filename", "save_dir", "iteration"),
    ),
    *_names(
        "megatron.training.checkpointing",
        "get_checkpoint_tracker_filename",
        "_NON_PERSISTENT_CKPT_SUBDIR",
    ),
)
