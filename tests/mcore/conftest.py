"""What is collected, and which tests run only when asked for, with ``scripts/test.sh -m slow``."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

collect_ignore_glob = ["[!t]*.py"]
"""Only test files are collected: the others import Megatron, which belongs into the ranks."""

SLOW = {
    "test_ordinary_oracle_is_megatron_in_every_precision": (
        *("PP1-", "PP2xTP2-", "PP4-bf16", "PP4-fp32", "PP2xDP2 distributed optimizer-fp32"),
        "PP2xDP2 distributed optimizer-bf16",
    ),
    "test_ordinary_oracle_is_megatron_to_the_last_bit": ("4", "1", "2"),
    "test_a_resumed_run_is_the_uninterrupted_one": (
        *("torch_dist-1]", "torch-3]", "torch-1", "torch_dist-11", "torch-d2-w2", "torch]"),
    ),
    "test_a_killed_run_goes_on_from_its_newest_complete_checkpoint": ("torch_dist-forward-rank1", "torch-"),
    "test_a_killed_save_does_not_leave_a_mixture_of_two_runs": ("torch]",),
    "test_an_ordinary_schedule_goes_on_with_the_newest_weights": ("torch_dist-1f1b-flush", "torch-"),
    "test_another_layout_goes_on_with_both_versions": ("torch_dist-PP4", "torch_dist-PP2xDP2"),
    "test_every_rank_ends_by_itself": ("3-2bw", "1-", "3-1f1b-flush"),
    "test_a_rank_that_is_killed_ends_the_others": ("2bw-middle", "2bw-first", "1f1b-flush"),
    "test_tied_and_clipped_by_an_exact_norm": ("d4", "d2-w2"),
    "test_a_chosen_step_is_loaded_whole": ("1f1b-flush",),
    "test_infinity_on_one_stage": ("d2-s0-(3, 4)", "d4-s2-(0"),
    "test_infinity_on_one_of_several_ranks_of_a_stage": ("TP2, biases of experts",),
    "test_the_peak_has_one_more_copy_of_weights_and_gradients": ("bf16",),
    "test_what_lasts_is_a_copy_of_the_weights_and_of_what_is_updated_here": ("True",),
    "test_no_number_changes": (
        *("--log-params-norm", "--timing-log-level", "--exit-signal-handler", "--empty-unused", "--no-check"),
    ),
    "test_the_time_is_up_on_one_rank": ("1",),
    "test_many_batches_at_the_tightest_fit": ("2-", "4-4"),
    "test_equal_to_megatrons_own_schedule": (
        *("4-2-1-gpipe", "4-8-1", "2-2-2-gpipe", "2-1-1", "2-4-1-", "4-2-1-1f1b-flush", "2-2-2-inter-layer"),
    ),
    "test_a_rank_that_hangs_ends_the_others_within_the_timeout": ("1f1b-flush",),
    "test_evaluation_changes_no_number_of_the_training": ("d4-m3-5", "d4-m3-1", "d2-m2-"),
    "test_evaluation_uses_the_newest_weights": ("d2",),
    "test_others_go_on_as_far_as_their_inputs_allow": (
        *("2-1-0-sleep before forward", "4-4-0-", "4-4-1-", "4-3-0-sleep before reduction", "2-2-"),
    ),
    "test_equal_to_the_last_bit_tied_and_clipped_by_an_exact_norm": (
        *("d2-m2-w1", "d4-m8", "d4-m4", "d2-m2-w2", "d2-m4-w1", "d2-m1-w2", "gems"),
    ),
    "test_equal_to_the_last_bit_untied_without_clipping": (
        *("d4-m3-w1", "d2-m2-w2", "d2-m2-w1", "mixpipe, d4, many microbatches", "d4-m8", "d4-m4", "d2-m4-w1"),
        *("d2-m1-w2", "d4]", "gems, d2, 2 replicas", "mixpipe, d4]", "mixpipe, d4, 2 replicas", "chimera, d4]"),
        *("chimera, d2, 2 replicas", "chimera, loss per token", "chimera, bf16, tensor parallel"),
        *("mixpipe, d2, 2 replicas", "chimera, d4, two units", "chimera, precision-aware", "chimera, fused gradients"),
    ),
    "test_equal_to_the_last_bit": (
        *("d4]", "muon]", "d2]", "lion", "muon, distributed", "d2-w2-gradients", "biases of experts"),
    ),
    "test_equal_to_the_loop_to_the_last_bit_untied_without_clipping": ("d4]", "d2]", "one-size"),
    "test_a_flush_is_equal_to_megatrons_own_schedule": ("d4",),
    "test_every_line_is_megatrons": ("m4, every third", "m1, every batch", "m1, every third"),
    "test_an_overwritten_checkpoint_is_the_new_one": ("torch_dist]", "torch]"),
    "test_aliases_are_the_same_schedule": ("pipedream-flush", "dapple"),
    "test_megatron_is_untouched_with_the_extension_loaded": ("4-8-1", "2-4-1", "1-2-1"),
    "test_equal_to_the_oracle": (
        *("first stage]", "one gradient buffer, bf16, distributed optimizer", "clipped attention, GQA, fp16"),
        *("pipeline layout", "whole experts, tensor parallel, distributed optimizer", "PP2, fp16", "PP4, fp32"),
        *("PP2xDP2, fp16", "PP2xDP2 distributed optimizer, fp32", "PP2xDP2 distributed optimizer, fp16"),
        *("GQA, SwiGLU, RoPE, RMSNorm, bf16, tensor parallel", "PP2xTP2, fp32", "PP2xTP2, bf16", "PP2, bf16"),
        *("PP4, bf16", "PP2xDP2, fp32", "gradients in bf16, tensor and sequence parallel"),
        *("multi-token prediction, more in flight", "the same, sequence parallel", "context and tensor parallel"),
        *("an instance of the distributed optimizer per", "SwiGLU, tensor and sequence parallel, norms"),
        *("soap, distributed optimizer, experts", "latent attention, experts with biases, multi-token prediction"),
        *("clipped latent attention, muon", "multi-latent attention]", "loss per token, fp16"),
        *("experts with biases, half delayed", "precision-aware optimizer, gradients in bf16"),
        *("first stage, one buffer", "lower layers", "fused gradients, bf16", "multi-latent attention, fp16"),
        *("multi-token prediction, tied, fp16", "experts, fp16, distributed optimizer"),
        *("gradients in bf16, summed in fp32 over four replicas", "precision-aware optimizer, fp16"),
        "one more in flight per boundary",
    ),
    "test_equals_the_oracle": (
        *("bf16, distributed optimizer, lead", "bf16, distributed optimizer]", "muon]", "untied]", "d4", "tied-w2"),
        *("update-lead, d2", "muon, lead, d4", "tensor parallel", "muon, tensor parallel"),
        *("update-lead, bf16, tensor parallel", "PP3, more in flight", "PP4, more in flight"),
        *("PP4, tied, bf16, full recompute", "one buffer, update-lead"),
    ),
    "test_ordinary_oracle_is_megatron": (
        *("multi-latent attention]", "gradients in bf16, distributed optimizer, loss per token"),
        *("the same, sequence parallel", "loss per token", "whole experts, tensor parallel"),
        *("gradients in bf16, tensor", "gradients in bf16, summed", "experts, loss over the batch of all replicas"),
        "experts with biases, bf16",
    ),
    "test_gradients_in_bf16_save_nothing_at_the_peak_without_shards": ("",),
    "test_experts_of_two_replicas_no_further_off_than_megatron": ("whole",),
    "test_precisions_optimizers_and_models": (
        *("distributed-bf16", "fp16]", "distributed-fp32", "muon-distributed", "several-tokens"),
        *("biases-of-experts-bf16", "two-instances", "precision-aware-fp16", "a-part-on-the-host-reshardable"),
        *("all-on-the-host", "sgd]", "sgd-bf16", "experts-([1,0])", "biases-of-experts"),
    ),
    "test_a_run_has_no_problem": ("mixpipe", "distributed optimizer, fp16", "experts with biases, full recompute"),
    "test_it_trains_like_a_pipeline": ("half delayed, lead", "a beginning without a delay"),
    "test_a_run_whose_loader_handles_signals_ends": ("",),
    "test_a_profile_of_other_versions_is_not_gone_on_with": ("",),
    "test_models::test_equal_to_the_oracle": ("experts, loss over the batch of all replicas",),
    "test_the_oracle_clips_as_megatron_does": ("GQA",),
    "test_a_command_that_is_ended_ends_its_ranks": ("15",),
    "test_2bw_goes_on_from_megatrons_checkpoint_with_one_version": ("fp32-torch]",),
    "test_a_loss_that_is_no_number_is_counted_and_left_out": ("4-]", "1-]", "2-settled", "4-settled"),
    "test_a_synchronous_schedule_can_go_on": ("tied-w2]", "untied", "biases of experts"),
    "test_norms_are_megatrons_to_the_last_bit": ("muon, distributed", "tied, tensor", "further tokens"),
    "test_a_process_leaves_no_thread_of_gloo_at_work": ("megatron_2bw.uninstall",),
    "test_a_run_without_an_update_so_far": ("distributed", "precision-aware-torch]", "1f1b-flush"),
    "test_experts_that_tensor_parallel_ranks_split_get_their_tokens_either_way": ("",),
    "test_runs_start_from_the_same_weights_in_every_layout": ("",),
    "test_delayed_microbatches::test_it_changes_the_training": ("",),
    "test_a_safe_path_stays_as_it_is": ("",),
    "test_large_gradients_are_noted_as_by_megatron": ("parallel experts",),
    "test_megatron_accepts_what_is_printed_under_any_limits": ("deepseek-6",),
    "test_k_and_gamma_by_themselves": ("8-no choice",),
    "test_refused_before_training": (
        *("CUDA graphs", "fp8", "Megatron-FSDP", "precision-aware optimizer, corrected", "rerun mode"),
        *("virtual stages by number", "numbers of a pipeline that is Megatron's", "no delay to wait with"),
    ),
    "test_a_killed_save_keeps_the_checkpoint_that_the_run_has_loaded": ("torch]",),
    "test_the_norm_of_the_weights_is_that_of_the_newest": ("1]",),
    "test_timers_inside_a_call_are_logged": ("1f1b-flush",),
    "test_checkpoint_holds_the_newest_weights": ("torch-6", "torch-18", "torch_dist-6"),
    "test_a_hybrid_model_goes_on_from_a_gpt": ("finetuned-torch_dist",),
    "test_no_batch_follows_one_that_failed": ("1f1b-flush",),
    "test_synchronous_schedules_equal_megatrons_own": ("gpipe",),
    "test_reductions_that_overlap_are_megatrons": ("False",),
    "test_every_line_of_several_tokens_is_megatrons": ("1]",),
    "test_logs_count_every_skipped_update": ("(3, 4)",),
    "test_synchronous::test_equals_the_oracle": ("muon, lead]",),
    "test_many_batches_under_random_waits": ("",),
    "test_pipedream::test_equal_to_the_last_bit": ("soap", "clipped attention"),
    "test_pipedream::test_delays_differ_from_each_other": ("",),
    "test_delayed_microbatches::test_evaluation_changes_no_number": ("",),
    "test_bert::test_equal_to_the_last_bit_tied_and_clipped_by_an_exact_norm": ("d4",),
}
"""By test, of one file where others have a test of that name: how its parameters begin.

What they show, others show at less cost; the suite has 25 minutes.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, _, parameters = item.name.partition("[")
        starts = *SLOW.get(name, ()), *SLOW.get(f"{item.path.stem}::{name}", ())
        if any(map(parameters.startswith, starts)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
