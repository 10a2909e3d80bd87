"""Every row of the table of flags is reached by its flag, and by nothing that a user leaves alone."""

from __future__ import annotations

import argparse
from copy import copy

import pytest

from megatron_2bw.mcore.arguments import ArgumentError, _map, _refuse, add_arguments
from megatron_2bw.mcore.support import MAPPED, OURS, REFUSED, SLOWED

SETTINGS: dict[str, list[dict[str, object]]] = {
    "--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank": [
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"virtual_pipeline_model_parallel_size": 2},
    ],
    "--cuda-graph-impl": [{"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}],
    "--fp8-format / --fp4-format": [{"fp8": "hybrid"}, {"fp4": "e2m1"}],
    "--fp16": [{"fp16": True}],
    "--bf16": [{"bf16": True}],
    "--use-precision-aware-optimizer": [{"use_precision_aware_optimizer": True}],
    "--use-megatron-fsdp / --use-torch-fsdp2": [{"use_megatron_fsdp": True}, {"use_torch_fsdp2": True}],
    "--use-distributed-optimizer": [{"use_distributed_optimizer": True}],
    "--optimizer": [{"optimizer": "muon"}],
    "--optimizer-cpu-offload": [{"optimizer_cpu_offload": True}],
    "--tensor-model-parallel-size above 1": [{"tensor_model_parallel_size": 2}],
    "--context-parallel-size above 1": [{"context_parallel_size": 2}],
    "--num-experts": [{"num_experts": 8}],
    "--mtp-num-layers": [{"mtp_num_layers": 1}],
    "--calculate-per-token-loss": [{"calculate_per_token_loss": True}],
    "--rampup-batch-size / --step-batch-size-schedule": [
        {"rampup_batch_size": [2, 2, 100]},
        {"step_batch_size_schedule": "0:4 100:8"},
    ],
    "--iterations-to-skip": [{"iterations_to_skip": [3]}],
    "--async-save": [{"async_save": True}],
    "--log-params-norm": [{"log_params_norm": True}],
    "--log-num-zeros-in-grad": [{"log_num_zeros_in_grad": True}],
    "--grad-norm-skip-threshold": [{"grad_norm_skip_threshold": 10.0}],
    "--qk-clip": [{"qk_clip": True}, {"log_max_attention_logit": True}],
    "--check-weight-hash-across-dp-replicas-interval": [{"check_weight_hash_across_dp_replicas_interval": 10}],
    "--save-params-interval and the like for activations, gradients and tokens per expert": [
        {f"save_{what}_interval": 1} for what in ("params", "activations", "wgrads", "dgrads", "tokens_per_expert")
    ],
    "--check-for-large-grads": [{"check_for_large_grads": True}],
    "--tensor-parallel-num-weight-shards": [{"gtp_weight_remat_size": 2}],
    "--adlr-autoresume": [{"adlr_autoresume": True}],
    "--dataloader-save": [{"dataloader_save": "folder"}],
    "--inprocess-restart": [{"inprocess_restart": True}],
    "--freeze-all-layers": [{"freeze_all_layers": True}],
    "--timing-log-level 2": [{"timing_log_level": 2}],
    "--num-microbatches-with-partial-activation-checkpoints": [
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
}
NOTICED: dict[str, dict[str, object]] = {
    "--rerun-mode": {"rerun_mode": "validate_results"},
    "--overlap-grad-reduce": {"overlap_grad_reduce": True},
    "--no-barrier-with-level-1-timing": {"timing_log_level": 1},
    "--exit-signal-handler": {"exit_signal_handler": True},
    "--exit-duration-in-mins": {"exit_duration_in_mins": 60},
}


@pytest.fixture(scope="module")
def defaults() -> argparse.Namespace:
    """Megatron's arguments as a user leaves them, with the one notice that always comes dealt with."""
    from megatron.training.arguments import add_megatron_arguments

    args = add_arguments(add_megatron_arguments(argparse.ArgumentParser())).parse_args([])
    args.rerun_mode = "disabled"
    return args


def _with(defaults: argparse.Namespace, settings: dict[str, object]) -> argparse.Namespace:
    args = copy(defaults)
    vars(args).update(settings)
    return args


def test_every_row_is_in_the_tables_above() -> None:
    assert {row.flag for row in REFUSED} == set(SETTINGS)
    assert {row.flag for row in MAPPED + SLOWED} == set(NOTICED)


@pytest.mark.parametrize("schedule", sorted(OURS))
def test_defaults_pass_without_a_word(defaults: argparse.Namespace, schedule: str) -> None:
    args = copy(defaults)
    _refuse(args, schedule)
    assert _map(args, schedule) == []
    assert vars(args) == vars(defaults)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.flag} {min(row.schedules)}")
def test_refused_with_flag_reason_and_remedy(defaults: argparse.Namespace, row) -> None:
    for settings in SETTINGS[row.flag]:
        for schedule in OURS:
            args = _with(defaults, settings)
            if schedule in row.schedules:
                with pytest.raises(ArgumentError) as refusal:
                    _refuse(args, schedule)
                assert all(part in str(refusal.value) for part in (row.flag, schedule, row.reason, row.remedy))
            elif row.flag not in {other.flag for other in REFUSED if schedule in other.schedules}:
                _refuse(args, schedule)


@pytest.mark.parametrize("row", MAPPED + SLOWED, ids=lambda row: row.flag)
def test_noticed_once_and_then_settled(defaults: argparse.Namespace, row) -> None:
    args = _with(defaults, NOTICED[row.flag])
    (notice,) = _map(args, "2bw")
    assert row.flag in notice
    assert row.reason in notice
    assert _map(args, "2bw") == ([notice] if row in SLOWED else [])
