"""Every row of the table of flags is reached by its flag, and by nothing that a user leaves alone."""

from __future__ import annotations

import argparse
import math
from copy import copy

import pytest
import torch

from megatron_2bw.mcore.loop.arguments import add_arguments
from megatron_2bw.mcore.loop.checks import ArgumentError, adapt, exit_with, refuse
from megatron_2bw.mcore.symbols import megatron_version
from megatron_2bw.planner.flag_table.conditions import LEAD, leads_too_far
from megatron_2bw.planner.flag_table.rows import OURS, STOCK, sums_in_bf16
from megatron_2bw.planner.flag_table.table import MAPPED, REFUSED, SLOWED
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.flags.refusals import BY_FLAGS, DEFAULTS, refusal
from megatron_2bw.planner.rows.arguments import flags_of
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.runtime.corrections import MomentLead
from megatron_2bw.schedule.registry import SCHEDULES

OLD_EXPERTS = "--expert-tensor-parallel-size, without --expert-model-parallel-size, in Megatron 0.18"
PRECISION_AWARE = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "bf16": True}
OVERLAPPED_OFFLOAD = PRECISION_AWARE | {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
BY_NVRX = {"async_save": True, "async_strategy": "nvrx"}
SETTINGS: dict[str, list[dict[str, object]]] = {
    "--mixpipe-k / --mixpipe-gamma": [{"mixpipe_k": 4}, {"mixpipe_gamma": 1}],
    "--num-experts": [{"num_experts": 4}],
    "--pipeline-extra-in-flight": [{"pipeline_extra_in_flight": 1}],
    "--pipeline-delayed-microbatches": [{"pipeline_delayed_microbatches": 2}],
    "--synchronous-warmup-iters": [{"synchronous_warmup_iters": 5}],
    "--pipeline-gradient-buffers 1": [{"pipeline_gradient_buffers": 1}],
    "--delay-correction": [{"delay_correction": "update-lead", "bf16": True}],
    "--delay-lead": [{"delay_lead": 1.0}],
    "--pipeline-receives early with --num-experts, --sft or --dataloader-inter-document-masking": [
        {"pipeline_receives": "early", "num_experts": 4},
        {"pipeline_receives": "early", "sft": True},
    ],
    "--pipeline-trace / --log-pipeline / --pipeline-receives": [
        {"pipeline_trace": "file"},
        {"log_pipeline": True},
        {"pipeline_receives": "early"},
    ],
    "--delay-correction lead with lion": [
        {"delay_correction": "lead", "optimizer": "lion"},
        {"delay_correction": "lead", "optimizer": "muon", "muon_scalar_optimizer": "lion", "muon_momentum": 0.95},
    ],
    "--delay-correction lead with soap": [{"delay_correction": "lead", "optimizer": "soap"}],
    "--delay-correction update-lead in fp32": [{"delay_correction": "update-lead"}],
    "--delay-correction lead": [
        {"delay_correction": "lead", "optimizer": "muon", "muon_momentum": 0.6},
        {"delay_correction": "lead", "delay_lead": 9.0},
        {"delay_correction": "lead", "optimizer": "sgd", "sgd_momentum": 0.5},
    ],
    "--delay-correction with --use-precision-aware-optimizer": [
        {"delay_correction": "update-lead", "bf16": True, "use_precision_aware_optimizer": True}
    ],
    "--clip-grad / grad_norm_skip_threshold of the config": [{"clip_grad": 1.0}, {"grad_norm_skip_threshold": 10.0}],
    "--untie-embeddings-and-output-weights": [{"untie_embeddings_and_output_weights": False}],
    "--fp16 / --loss-scale": [{"fp16": True}, {"bf16": True, "loss_scale": 128.0}],
    "--calculate-per-token-loss": [{"calculate_per_token_loss": True}],
    "--log-num-zeros-in-grad": [{"log_num_zeros_in_grad": True}],
    "--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank": [
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"virtual_pipeline_model_parallel_size": 2},
    ],
    "--cuda-graph-impl": [{"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}],
    "--fp8-format / --fp4-format / --te-precision-config-file / --kitchen-config-file": [
        {"fp8": "hybrid"},
        {"fp4": "e2m1"},
        {"te_precision_config_file": "file"},
        {"kitchen_config_file": "file"},
        {"kitchen_recipe_number": 0},
    ],
    "--non-persistent-save-interval with --non-persistent-ckpt-type in_memory": [
        {"save": "folder", "non_persistent_save_interval": 5, "non_persistent_ckpt_type": "in_memory"}
    ],
    "experimental_attention_variant_loss_scale_func of the config": [
        {"experimental_attention_variant_loss_scale_func": print}
    ],
    "has_cond_embedder / flextron of the config": [{"has_cond_embedder": True}, {"flextron": True}],
    "--pipeline-model-parallel-comm-backend ucc": [{"pipeline_model_parallel_comm_backend": "ucc"}],
    "--use-ring-exchange-p2p": [{"use_ring_exchange_p2p": True}],
    OLD_EXPERTS: [{"num_experts": 4, "expert_tensor_parallel_size": 2}],
    "--loss-scale with --grad-reduce-in-bf16": [
        {"loss_scale": 1000.0, "bf16": True, "grad_reduce_in_bf16": True},
        {"loss_scale": 1000.0, "bf16": True, "use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"},
    ],
    "--ddp-reduce-scatter-with-fp32-accumulation with --ddp-average-in-collective": [
        {
            "ddp_reduce_scatter_with_fp32_accumulation": True,
            "ddp_average_in_collective": True,
            "use_distributed_optimizer": True,
            "bf16": True,
            "grad_reduce_in_bf16": True,
        }
    ],
    "--ddp-param-name-patterns-for-fp32-local-accumulation": [
        {"ddp_param_name_patterns_for_fp32_local_accumulation": ["all"]}
    ],
    "--use-megatron-fsdp / --use-torch-fsdp2": [{"use_megatron_fsdp": True}, {"use_torch_fsdp2": True}],
    "--num-distributed-optimizer-instances above 1, with muon, lion or soap": [
        {
            "num_distributed_optimizer_instances": 2,
            "use_distributed_optimizer": True,
            "optimizer": "muon",
            "muon_momentum": 0.95,
            "bf16": True,
        }
    ],
    "--mtp-detach-heads with --use-distributed-optimizer and grad_norm_skip_threshold of the config": [
        {"mtp_detach_heads": True, "use_distributed_optimizer": True, "grad_norm_skip_threshold": 10.0}
    ],
    "--mtp-detach-heads with --use-distributed-optimizer, and muon, lion or soap": [
        {
            "mtp_detach_heads": True,
            "data_parallel_size": 2,
            "use_distributed_optimizer": True,
            "optimizer": "muon",
            "muon_momentum": 0.95,
            "bf16": True,
        }
    ],
    "--use-nccl-ub": [{"nccl_ub": True}],
    "--optimizer": [{"optimizer": "adaptive_muon", "muon_momentum": 0.95}],
    "--no-use-layer-wise-param-layout": [
        {"optimizer": "muon", "use_distributed_optimizer": True, "use_layer_wise_param_layout": False, "bf16": True},
        {"optimizer": "lion", "use_layer_wise_distributed_optimizer": True, "use_layer_wise_param_layout": False}
        | {"bf16": True},
        {"optimizer": "dist_muon", "use_layer_wise_param_layout": False, "bf16": True},
    ],
    "--use-distributed-optimizer with muon, lion or soap in fp32": [
        {"optimizer": "muon", "use_distributed_optimizer": True},
        {"optimizer": "lion", "use_layer_wise_distributed_optimizer": True},
        {"optimizer": "dist_muon"},
    ],
    "--expert-tensor-parallel-size, with --use-distributed-optimizer, muon, lion or soap, and one replica": [
        {"optimizer": optimizer, "use_distributed_optimizer": True, "bf16": True, "data_parallel_size": 1}
        | {"num_experts": 4, "tensor_model_parallel_size": 4, **split}
        for optimizer, split in (
            ("muon", {"expert_tensor_parallel_size": 1}),
            ("lion", {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}),
        )
    ],
    "--ckpt-format torch, with --use-distributed-optimizer and muon, lion or soap": [
        {"save": "folder", "ckpt_format": "torch", "optimizer": "muon", "use_distributed_optimizer": True},
    ],
    "--mtp-num-layers with tied embeddings, and --save in --ckpt-format torch_dist": [
        {"save": "folder", "mtp_num_layers": 1, "untie_embeddings_and_output_weights": False},
    ],
    "--save in --ckpt-format torch_dist, where the optimizers of stages have different groups of weights": [
        {"save": "folder", "bf16": True, "pipeline_model_parallel_layout": "E|ttttL"},
        {"save": "folder", "optimizer": "muon", "muon_momentum": 0.95, "pipeline_model_parallel_layout": "Etttt|L"},
        {"save": "folder", "bf16": True, "use_mup": True, "pipeline_model_parallel_size": 3},
        {"save": "folder", "optimizer": "lion", "bf16": True, "swiglu": True, "pipeline_model_parallel_size": 4},
        *(
            {"save": "folder", "num_experts": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
            | where
            for where in (
                {"num_layers": 4, "moe_layer_freq": "([0]*2+[1]*2)"},
                {
                    "num_layers": 5,
                    "moe_layer_freq": "([1]*3+[0]*2)",
                    "decoder_first_pipeline_num_layers": 3,
                    "fp16": True,
                },
                {"num_layers": 8, "moe_layer_freq": 4, "pipeline_model_parallel_size": 4, "bf16": True},
                {"pipeline_model_parallel_layout": "Ett|tt|L", "bf16": True},
                {"num_layers": 4, "moe_layer_freq": "([1]*2+[0]*2)", "optimizer": "sgd"},
                {
                    "num_layers": 4,
                    "moe_layer_freq": "([0]*2+[1]*2)",
                    "expert_model_parallel_size": 1,
                    "tensor_model_parallel_size": 2,
                    "expert_tensor_parallel_size": 1,
                },
            )
        ),
        *(
            {"save": "folder", "num_layers": 3, "pipeline_model_parallel_size": 4} | where
            for where in (
                {"bf16": True, "account_for_embedding_in_pipeline_split": True},
                {"optimizer": "muon", "muon_momentum": 0.95, "account_for_loss_in_pipeline_split": True},
            )
        ),
    ],
    "--save in --ckpt-format torch_dist with soap": [{"save": "folder", "optimizer": "soap"}],
    "--dist-ckpt-optim-fully-reshardable with lion": [
        {
            "save": "folder",
            "optimizer": "lion",
            "bf16": True,
            "use_distributed_optimizer": True,
            "dist_ckpt_optim_fully_reshardable": True,
        }
    ],
    "--use-precision-aware-optimizer with bf16, and --dist-ckpt-optim-fully-reshardable or --ckpt-format torch": [
        PRECISION_AWARE | {"save": "folder", "ckpt_format": "torch"},
        PRECISION_AWARE | {"save": "folder", "dist_ckpt_optim_fully_reshardable": True},
    ],
    "--optimizer-cpu-offload with --save in --ckpt-format torch": [
        {"optimizer_cpu_offload": True, "save": "folder", "ckpt_format": "torch"}
    ],
    "--optimizer-cpu-offload with --async-save by nvidia-resiliency-ext": [
        {"optimizer_cpu_offload": True, "save": "folder", **BY_NVRX}
    ],
    "--overlap-cpu-optimizer-d2h-h2d with --optimizer-offload-fraction below 1, and gradients in bf16": [
        OVERLAPPED_OFFLOAD | {"grad_reduce_in_bf16": True},
        OVERLAPPED_OFFLOAD | {"main_grads_dtype": "bf16"},
    ],
    "--use-precision-aware-optimizer with fp16": [PRECISION_AWARE | {"bf16": False, "fp16": True}],
    "--recompute-modules mlp with biases": [{"recompute_granularity": "selective", "recompute_modules": ["mlp"]}],
    "--moe-router-load-balancing-type quantile_balancing": [{"moe_router_load_balancing_type": "quantile_balancing"}],
    "--moe-single-grouped-weight / --moe-single-grouped-bias": [
        {"moe_single_grouped_weight": True},
        {"moe_single_grouped_bias": True},
    ],
    "--moe-routing-trace-path": [{"moe_routing_trace_path": "folder"}],
    "--experimental-attention-variant dsa / D in --hybrid-layer-pattern": [
        {"experimental_attention_variant": "dsa"},
        {"hybrid_layer_pattern": "D-|D-"},
    ],
    "--vision-pretraining": [{"vision_pretraining": True}],
    "--mtp-num-layers": [{"mtp_num_layers": 1}],
    "--mtp-num-layers before the last stage": [
        {"mtp_num_layers": 1, "pipeline_model_parallel_layout": layout} for layout in ("Et|tm|L", "E(t|)*2m|L")
    ],
    "--pipeline-model-parallel-layout with an empty stage": [
        {"pipeline_model_parallel_layout": layout} for layout in ("Et||tL", "Et*2|*2,L")
    ],
    "--ckpt-format": [{"save": "folder", "ckpt_format": "torch_dcp"}, {"load": "folder", "ckpt_format": "torch_dcp"}],
    "--non-persistent-ckpt-type local": [{"non_persistent_ckpt_type": "local"}],
    "--async-save with --ckpt-format torch": [{"save": "folder", "async_save": True, "ckpt_format": "torch"}],
    "--non-persistent-save-interval with --ckpt-format torch": [
        {
            "save": "folder",
            "non_persistent_save_interval": 2,
            "non_persistent_ckpt_type": "global",
            "ckpt_format": "torch",
        }
    ],
    "--non-persistent-save-interval without --non-persistent-ckpt-type": [
        {"save": "folder", "non_persistent_save_interval": 2}
    ],
    "--qk-clip / --log-max-attention-logit": [{"qk_clip": True}, {"log_max_attention_logit": True}],
    "--qk-clip with --use-distributed-optimizer, adam or sgd, in bf16 or fp16": [
        {"qk_clip": True, "use_distributed_optimizer": True, precision: True} for precision in ("bf16", "fp16")
    ],
    "--qk-clip with --tensor-model-parallel-size, without --multi-latent-attention": [
        {"qk_clip": True, "tensor_model_parallel_size": 2}
    ],
    "--qk-clip with --attention-output-gate, without --multi-latent-attention": [
        {"qk_clip": True, "attention_output_gate": True}
    ],
    "--qk-clip / --log-max-attention-logit in fp32": [{"qk_clip": True}, {"log_max_attention_logit": True}],
    "--save-params-interval and the like for activations, gradients and tokens per expert": [
        {f"save_{what}_interval": 1} for what in ("params", "activations", "wgrads", "dgrads", "tokens_per_expert")
    ],
    "--tensor-parallel-num-weight-shards / --expert-tensor-parallel-num-weight-shards": [
        {"gtp_weight_remat_size": 2},
        {"expert_gtp_weight_remat_size": 2},
    ],
    "--adlr-autoresume": [{"adlr_autoresume": True}],
    "--dataloader-save of a script": [{"dataloader_save": "folder"}],
    "--fake-process-group": [{"fake_process_group": True}],
    "--inprocess-restart": [{"inprocess_restart": True}],
    "--freeze-all-layers": [{"freeze_all_layers": True}],
    "num_microbatches_with_partial_activation_checkpoints of the config": [
        {"num_microbatches_with_partial_activation_checkpoints": 1}
    ],
    "--fine-grained-activation-offloading": [{"fine_grained_activation_offloading": True}],
    "--overlap-moe-expert-parallel-comm / --delay-wgrad-compute": [
        {"overlap_moe_expert_parallel_comm": True},
        {"delay_wgrad_compute": True},
    ],
    "--defer-embedding-wgrad-compute": [{"defer_embedding_wgrad_compute": True}],
    "--moe-expert-rank-capacity-factor": [{"moe_expert_rank_capacity_factor": 1.5}, {"moe_paged_stash": True}],
    "--perform-rl-step": [{"perform_rl_step": True}],
    "--rerun-mode": [{"rerun_mode": "report_stats"}],
    "--error-injection-rate": [{"error_injection_rate": 100}],
}
NOTICED: dict[str, dict[str, object]] = {
    "--rerun-mode": {"rerun_mode": "validate_results"},
    "--overlap-grad-reduce": {"overlap_grad_reduce": True},
    "--overlap-param-gather": {"overlap_param_gather": True},
    "--accumulate-allreduce-grads-in-fp32": {"fp16": True},
    "--ddp-reduce-scatter-with-fp32-accumulation": {"ddp_reduce_scatter_with_fp32_accumulation": True},
    "--ckpt-assume-constant-structure": {"ckpt_assume_constant_structure": True, "synchronous_warmup_iters": 5},
    "--ckpt-assume-constant-structure with --async-save by nvidia-resiliency-ext": {
        "ckpt_assume_constant_structure": True,
        **BY_NVRX,
    },
    "--log-energy": {"log_energy": True},
    "--optimizer-cpu-offload": {"optimizer_cpu_offload": True},
    "--disable-gloo-process-groups": {"use_gloo_process_groups": False},
    "--use-sharp / --sharp-enabled-group": {"use_sharp": True},
    "--ddp-num-buckets / --ddp-bucket-size": {"ddp_num_buckets": 4},
    "--qk-clip": {"qk_clip": True},
    "--check-weight-hash-across-dp-replicas-interval": {"check_weight_hash_across_dp_replicas_interval": 5},
    "--gpu-sniff-test-interval": {"gpu_sniff_test_interval": 5},
    "--no-barrier-with-level-1-timing": {"timing_log_level": 1},
    "--rampup-batch-size": {"rampup_batch_size": ["4", "4", "16"]},
    "--log-params-norm": {"log_params_norm": True},
    "--sft / --dataloader-inter-document-masking": {"sft": True},
    "--timing-log-level above 0": {"timing_log_level": 1},
    "--train-sync-interval": {"train_sync_interval": 5},
    "--log-straggler": {"log_straggler": True},
    "--num-experts": {"num_experts": 4},
    "--empty-unused-memory-level": {"empty_unused_memory_level": 1},
    "--async-save": {"async_save": True},
}


DERIVED = {
    "data_parallel_size",
    "grad_norm_skip_threshold",
    "use_layer_wise_distributed_optimizer",
    "virtual_pipeline_model_parallel_size",
    "gtp_weight_remat_size",
    "expert_gtp_weight_remat_size",
    "num_microbatches_with_partial_activation_checkpoints",
    "dataloader_save",
    "has_cond_embedder",
    "flextron",
    "experimental_attention_variant_loss_scale_func",
    "kitchen_config_file",
    "kitchen_recipe_number",
}
"""Not from Megatron's command line: it computes them from other arguments, training scripts or models add them, or an
extension that is not installed does."""


IS_0_18 = megatron_version().startswith("0.18")
SINCE_0_19 = {"freeze_all_layers", "moe_routing_trace_path", "mtp_detach_heads"}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser()))


@pytest.fixture(scope="module")
def defaults(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Megatron's arguments as a user leaves them, with the one notice that always comes dealt with."""
    args = parser.parse_args([])
    args.rerun_mode = "disabled"
    return args


NEEDED: dict[str, dict[str, object]] = {"pipedream": {"clip_grad": 0.0, "untie_embeddings_and_output_weights": True}}
"""What Megatron's defaults are refused for."""


def _with(defaults: argparse.Namespace, schedule: str, settings: dict[str, object]) -> argparse.Namespace:
    args = copy(defaults)
    vars(args).update(NEEDED.get(schedule, {}) | settings)
    return args


def test_megatron_has_every_argument_that_a_row_asks_for(defaults: argparse.Namespace) -> None:
    """A misspelt name would never be set."""
    named = {name for rows in SETTINGS.values() for settings in rows for name in settings}
    named |= {name for settings in NOTICED.values() for name in settings}
    missing = SINCE_0_19 if IS_0_18 else set()
    assert named - vars(defaults).keys() == missing | DERIVED


def test_every_row_is_in_the_tables_above() -> None:
    assert {row.flag for row in REFUSED} == set(SETTINGS)
    assert {row.flag for row in MAPPED + SLOWED} == set(NOTICED)


def test_every_schedule_trains() -> None:
    assert set(SCHEDULES) == OURS


@pytest.mark.parametrize("schedule", sorted(OURS | STOCK))
def test_defaults_pass_without_a_word(defaults: argparse.Namespace, schedule: str) -> None:
    args = _with(defaults, schedule, {})
    before = copy(vars(args))
    refuse(args, schedule)
    assert adapt(args, schedule) == []
    assert vars(args) == before


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.flag} {min(row.schedules)}")
def test_refused_with_flag_reason_and_remedy(
    defaults: argparse.Namespace, row, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row.flag == OLD_EXPERTS:
        monkeypatch.setattr("megatron.core.package_info.__version__", "0.18.2")
    for settings in SETTINGS[row.flag]:
        for schedule in OURS | STOCK:
            args = _with(defaults, schedule, settings)
            if schedule in row.schedules:
                with pytest.raises(ArgumentError) as refusal:
                    refuse(args, schedule)
                assert all(part in str(refusal.value) for part in (row.flag, schedule, row.reason, row.remedy))
            elif _name(row) not in {_name(other) for other in REFUSED if schedule in other.schedules}:
                refuse(args, schedule)


@pytest.mark.parametrize("schedule", sorted(OURS | STOCK))
def test_the_planner_refuses_flags_as_training_does(
    parser: argparse.ArgumentParser, defaults: argparse.Namespace, schedule: str
) -> None:
    layout = Layout(schedule=schedule, pipeline=2, data=1, microbatch=1, global_batch=2)
    for settings in ({}, *(settings for row in SETTINGS.values() for settings in row)):
        if not _is_a_flag(settings, defaults):
            continue
        options = Options(values=flags_of({"rerun_mode": "disabled"} | NEEDED.get(schedule, {}) | settings))
        args = parser.parse_args([word for flag, words in options.values.items() for word in (flag, *words)])
        refused = [row.message(schedule) for row in BY_FLAGS if row.applies(args, schedule)]
        assert refusal(options, layout) == (refused or [None])[0]


def _is_a_flag(settings: dict[str, object], defaults: argparse.Namespace) -> bool:
    """Whether this Megatron's command line can say it."""
    known = settings.keys() <= vars(defaults).keys()
    return known and not (IS_0_18 and settings == {"moe_router_load_balancing_type": "quantile_balancing"})


@pytest.mark.parametrize("lead", [0.5, 1.0, LEAD, 9.0])
def test_a_lead_is_too_far_where_the_correction_says_so(defaults: argparse.Namespace, lead: float) -> None:
    args = argparse.Namespace(**vars(defaults) | {"delay_correction": "lead", "delay_lead": lead})
    args.adam_beta1 = MomentLead(lead).least_decay
    assert leads_too_far(args)
    args.adam_beta1 = math.nextafter(args.adam_beta1, 1)
    assert not leads_too_far(args)


def test_the_planner_knows_defaults(defaults: argparse.Namespace) -> None:
    assert {name: getattr(defaults, name) for name in DEFAULTS} == DEFAULTS | {"rerun_mode": "disabled"}


@pytest.mark.parametrize(
    ("kept", "version"),
    [({"expert_tensor_parallel_size": 1}, "0.18.2"), ({"expert_model_parallel_size": 2}, "0.18.2"), ({}, "0.19.2")],
)
def test_experts_are_refused_only_where_megatron_fails(
    defaults: argparse.Namespace, kept: dict[str, object], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settings,) = SETTINGS[OLD_EXPERTS]
    monkeypatch.setattr("megatron.core.package_info.__version__", version)
    refuse(_with(defaults, "2bw", settings | kept), "2bw")


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.skipif(IS_0_18, reason="refused for more")),
        {"expert_model_parallel_size": 4},
        {"expert_tensor_parallel_size": None},
    ],
    ids=str,
)
def test_copies_of_experts_are_refused_only_where_they_drift(
    defaults: argparse.Namespace, kept: dict[str, object]
) -> None:
    settings, _ = SETTINGS[
        "--expert-tensor-parallel-size, with --use-distributed-optimizer, muon, lion or soap, and one replica"
    ]
    refuse(_with(defaults, "2bw", settings | kept), "2bw")


@pytest.mark.parametrize(
    "kept",
    [
        {"moe_layer_freq": "([0]*1+[1]*3)"},
        {
            "pipeline_model_parallel_layout": "Et|t|mL",
            "moe_layer_freq": [1, 1],
            "mtp_num_layers": 1,
            "untie_embeddings_and_output_weights": True,
        },
        {"moe_layer_freq": 2},
        {"expert_model_parallel_size": 1},
        {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"moe_layer_freq": "([1]*2+[0]*2)"},
        {"optimizer": "sgd"},
        {"use_distributed_optimizer": True},
        {"save": None},
        {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1},
        {"num_layers": 3, "moe_layer_freq": [0, 1, 1], "account_for_loss_in_pipeline_split": True},
    ],
    ids=str,
)
def test_experts_are_refused_only_where_some_stages_have_none(
    defaults: argparse.Namespace, kept: dict[str, object]
) -> None:
    rows = SETTINGS[
        "--save in --ckpt-format torch_dist, where the optimizers of stages have different groups of weights"
    ]
    settings = next(settings for settings in rows if settings.get("moe_layer_freq") == "([0]*2+[1]*2)")
    refuse(_with(defaults, "2bw", settings | kept), "2bw")


def test_all_refused_flags_are_named_at_once(defaults: argparse.Namespace, capsys: pytest.CaptureFixture) -> None:
    args = _with(defaults, "2bw", {"dataloader_save": "folder", "adlr_autoresume": True})
    with pytest.raises(ArgumentError) as refusal:
        refuse(args, "2bw")
    with pytest.raises(SystemExit):
        exit_with(refusal.value)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("megatron_2bw: error: --adlr-autoresume does not work")
    assert second.startswith("megatron_2bw: error: --dataloader-save of a script does not work")


def _name(row) -> str:
    """Of the flag, without its value."""
    return row.flag.split()[0]


@pytest.mark.parametrize("row", MAPPED + SLOWED, ids=lambda row: row.flag)
def test_noticed_once_and_then_settled(defaults: argparse.Namespace, row) -> None:
    for schedule in row.schedules:
        args = _with(defaults, schedule, NOTICED[row.flag])
        first, second = ([notice for notice in adapt(args, schedule) if row.reason in notice] for _ in range(2))
        (notice,) = first
        assert row.flag in notice
        assert second == ([notice] if row in SLOWED else [])


@pytest.mark.parametrize(
    ("environment", "late_receives", "told"),
    [
        ({}, False, ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]),
        ({}, True, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"}, False, []),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, False, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False, ["PYTORCH_CUDA_ALLOC_CONF"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_LAUNCH_BLOCKING": "1"}, False, ["LAUNCH_BLOCKING"]),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, True, ["LAUNCH_BLOCKING"]),
    ],
)
def test_a_run_is_told_what_makes_ranks_wait_for_each_other(
    environment: dict[str, str], late_receives: bool, told: list[str]
) -> None:
    from megatron_2bw.mcore.loop.session import notices

    found = [*notices(environment, late_receives=late_receives)]
    assert len(found) == len(told)
    assert all(expected in notice for expected, notice in zip(told, found, strict=True))


def test_receives_are_late_on_a_gpu_or_where_kernels_depend_on_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_2bw.mcore.loop.arguments import has_late_receives

    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        given = [has_late_receives(argparse.Namespace(pipeline_receives=one)) for one in (None, "late", "early")]
        assert given == [there, True, False]
        assert has_late_receives(argparse.Namespace(pipeline_receives=None, num_experts=4))


@pytest.mark.parametrize("written", ["bf16", torch.bfloat16])
def test_main_gradients_in_bf16_are_sums_in_bf16(written: object):
    """Before and after Megatron validates its arguments."""
    args = argparse.Namespace(bf16=True, grad_reduce_in_bf16=False, main_grads_dtype=written)
    assert sums_in_bf16(args)
    args.main_grads_dtype = {"bf16": "fp32", torch.bfloat16: torch.float32}[written]
    assert not sums_in_bf16(args)


@pytest.mark.parametrize(
    "given",
    [
        {"pipeline_model_parallel_layout": "E|ttttL"},
        {"pipeline_model_parallel_layout": "E|ttttL", "bf16": True, "use_distributed_optimizer": True},
        {"pipeline_model_parallel_layout": "E|ttttL", "bf16": True, "no_save_optim": True},
        {"pipeline_model_parallel_layout": "E|ttttL", "bf16": True, "ckpt_format": "torch"},
        {"pipeline_model_parallel_layout": "Et|tt|tL", "bf16": True, "optimizer": "muon", "muon_momentum": 0.95},
        {"pipeline_model_parallel_layout": "Ettt|L", "bf16": True},
        {"pipeline_model_parallel_size": 2, "swiglu": True, "bf16": True, "optimizer": "lion"},
        {
            "pipeline_model_parallel_size": 4,
            "swiglu": True,
            "bf16": True,
            "optimizer": "lion",
            "add_bias_linear": False,
        },
        {"dist_ckpt_optim_fully_reshardable": True, "optimizer": "lion", "bf16": True},
        PRECISION_AWARE,
        PRECISION_AWARE | {"dist_ckpt_optim_fully_reshardable": True, "bf16": False, "fp16": True, "clip_grad": 0.0},
    ],
    ids=str,
)
def test_optimizers_that_megatron_can_load_are_saved(defaults: argparse.Namespace, given: dict[str, object]):
    refuse(_with(defaults, "1f1b-flush", {"save": "folder"} | given), "1f1b-flush")


@pytest.mark.parametrize(
    "given",
    [{}, {"grad_reduce_in_bf16": True, "optimizer_offload_fraction": 1.0}],
    ids=["gradients in fp32", "all on the host"],
)
def test_overlapped_offloading_without_a_race(defaults: argparse.Namespace, given: dict[str, object]):
    refuse(_with(defaults, "2bw", OVERLAPPED_OFFLOAD | given), "2bw")
