"""What our schedules do with Megatron's flags: refuse, map, or warn of the cost.

One table drives the checks before training and the documentation. A flag in no row goes to Megatron as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DELAYED = frozenset({"2bw"})
FLUSHED = frozenset({"1f1b-flush", "gpipe"})
OURS = DELAYED | FLUSHED

_USE_FLUSH = "use --pipeline-schedule 1f1b-flush, or leave the flag out"
_USE_MEGATRON = "use --pipeline-schedule megatron, or leave the flag out"


def _given(*names: str) -> Callable[[Any], bool]:
    """Whether one of the attributes has a value other than Megatron's "off" values."""
    return lambda args: any(getattr(args, name, None) not in (None, False, "none", 0, [], "") for name in names)


_VIRTUAL = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",  # Derived, from a pipeline layout for one.
)


def _above(name: str, limit: float) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or limit) > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A flag that stops the run before training."""

    flag: str
    is_set: Callable[[Any], bool]
    """Decides from the parsed arguments; asked before Megatron validates them, and again after."""
    schedules: frozenset[str]
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """A flag that works and makes all ranks meet, with a one-line notice."""

    flag: str
    is_set: Callable[[Any], bool]
    schedules: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A flag that gets another value, with a one-line notice."""

    flag: str
    is_set: Callable[[Any], bool]
    schedules: frozenset[str]
    becomes: str
    reason: str
    change: Callable[[Any], None]


REFUSED: tuple[Refused, ...] = (
    Refused(
        flag="--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank",
        is_set=_given(*_VIRTUAL),
        schedules=DELAYED,
        reason="interleaving shrinks a bubble, and 2bw leaves none",
        remedy="leave the flag out, or use --pipeline-schedule megatron for the interleaved schedule",
    ),
    Refused(
        flag="--num-layers-per-virtual-pipeline-stage / --num-virtual-stages-per-pipeline-rank",
        is_set=_given(*_VIRTUAL),
        schedules=FLUSHED,
        reason="it selects Megatron's interleaved schedule",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--cuda-graph-impl",
        is_set=_given("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
        schedules=OURS,
        reason="a captured graph holds the order of Megatron's schedule",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--fp8-format / --fp4-format",
        is_set=_given("fp8", "fp4"),
        schedules=DELAYED,
        reason="quantized weights are cached for one version, and 2bw alternates between two",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--fp16",
        is_set=_given("fp16"),
        schedules=DELAYED,
        reason="the loss scale of a batch would have to be known before the overflow check of the one before it",
        remedy="train in fp32, or use --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--bf16",
        is_set=_given("bf16"),
        schedules=DELAYED,
        reason="only fp32 is proven equal to delay-1 training in this release",
        remedy="train in fp32, or use --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--use-precision-aware-optimizer",
        is_set=_given("use_precision_aware_optimizer"),
        schedules=DELAYED,
        reason="it keeps gradients where a captured batch cannot put them",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--use-megatron-fsdp / --use-torch-fsdp2",
        is_set=_given("use_megatron_fsdp", "use_torch_fsdp2"),
        schedules=OURS,
        reason="its parameters are gathered and freed around every use, in the order of Megatron's schedule",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--use-distributed-optimizer",
        is_set=_given("use_distributed_optimizer"),
        schedules=DELAYED,
        reason="its parameter buffer holds one version",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--optimizer",
        is_set=lambda args: args.optimizer not in ("adam", "sgd"),
        schedules=DELAYED,
        reason="delayed updates are proven for adam and sgd",
        remedy="use --optimizer adam or sgd, or --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--optimizer-cpu-offload",
        is_set=_given("optimizer_cpu_offload"),
        schedules=DELAYED,
        reason="its copies of the weights would follow only one version",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--tensor-model-parallel-size above 1",
        is_set=_above("tensor_model_parallel_size", 1),
        schedules=DELAYED,
        reason="2bw is proven for pipeline and data parallelism in this release",
        remedy="use 1, or --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--context-parallel-size above 1",
        is_set=_above("context_parallel_size", 1),
        schedules=DELAYED,
        reason="2bw is proven for pipeline and data parallelism in this release",
        remedy="use 1, or --pipeline-schedule 1f1b-flush",
    ),
    Refused(
        flag="--num-experts",
        is_set=_given("num_experts"),
        schedules=DELAYED,
        reason="the scale of the auxiliary loss and the routers' token counts belong to one batch at a time",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--mtp-num-layers",
        is_set=_given("mtp_num_layers"),
        schedules=DELAYED,
        reason="the scale of its loss belongs to one batch at a time",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--calculate-per-token-loss",
        is_set=_given("calculate_per_token_loss"),
        schedules=DELAYED,
        reason="the token count would have to travel with the delayed gradients",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--rampup-batch-size / --step-batch-size-schedule",
        is_set=_given("rampup_batch_size", "step_batch_size_schedule"),
        schedules=OURS,
        reason="a run of this release keeps one number of microbatches",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--iterations-to-skip",
        is_set=_given("iterations_to_skip"),
        schedules=DELAYED,
        reason="a skipped batch may already be half way through the pipeline",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--async-save",
        is_set=_given("async_save"),
        schedules=DELAYED,
        reason="the weights being written would be overwritten two updates later",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--log-params-norm",
        is_set=_given("log_params_norm"),
        schedules=DELAYED,
        reason="it waits for all stages after every batch",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--log-num-zeros-in-grad",
        is_set=_given("log_num_zeros_in_grad"),
        schedules=DELAYED,
        reason="it waits for all stages in every update",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--grad-norm-skip-threshold",
        is_set=lambda args: getattr(args, "grad_norm_skip_threshold", float("inf")) != float("inf"),
        schedules=DELAYED,
        reason="a skip would be known after the learning-rate schedule has moved on",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--qk-clip",
        is_set=_given("qk_clip", "log_max_attention_logit"),
        schedules=DELAYED,
        reason="it changes or reads weights between batches, at one version",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--check-weight-hash-across-dp-replicas-interval",
        is_set=_given("check_weight_hash_across_dp_replicas_interval"),
        schedules=DELAYED,
        reason="it would compare weights whose update is pending",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--save-params-interval and the like for activations, gradients and tokens per expert",
        is_set=_given(
            "save_params_interval",
            "save_activations_interval",
            "save_wgrads_interval",
            "save_dgrads_interval",
            "save_tokens_per_expert_interval",
        ),
        schedules=DELAYED,
        reason="what it saves after a call belongs to several batches",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--check-for-large-grads",
        is_set=_given("check_for_large_grads"),
        schedules=DELAYED,
        reason="it looks at gradients when Megatron reduces them, and 2bw reduces a copy",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--tensor-parallel-num-weight-shards",
        is_set=_above("gtp_weight_remat_size", 1),
        schedules=DELAYED,
        reason="its gradients need a reduction that 2bw does not have",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--adlr-autoresume",
        is_set=_given("adlr_autoresume"),
        schedules=DELAYED,
        reason="it saves while an update is pending",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--dataloader-save",
        is_set=_given("dataloader_save"),
        schedules=DELAYED,
        reason="the first stage has read ahead into the next batch when it saves",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--inprocess-restart",
        is_set=_given("inprocess_restart"),
        schedules=OURS,
        reason="process groups of the failed run would survive the restart",
        remedy="leave the flag out",
    ),
    Refused(
        flag="--freeze-all-layers",
        is_set=_given("freeze_all_layers"),
        schedules=DELAYED,
        reason="there is nothing to update",
        remedy=_USE_FLUSH,
    ),
    Refused(
        flag="--timing-log-level 2",
        is_set=_above("timing_log_level", 1),
        schedules=OURS,
        reason="its timers wait for the whole device, where a receive posted early may depend on a later send",
        remedy="use --timing-log-level 1 and --pipeline-trace FILE",
    ),
    Refused(
        flag="--num-microbatches-with-partial-activation-checkpoints",
        is_set=_given("num_microbatches_with_partial_activation_checkpoints"),
        schedules=OURS,
        reason="which microbatches recompute is decided inside Megatron's schedule",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--fine-grained-activation-offloading",
        is_set=_given("fine_grained_activation_offloading"),
        schedules=OURS,
        reason="Megatron's schedule resets its state",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--overlap-moe-expert-parallel-comm / --delay-wgrad-compute",
        is_set=_given("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
        schedules=OURS,
        reason="it splits forwards and backwards inside Megatron's schedule",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--defer-embedding-wgrad-compute",
        is_set=_given("defer_embedding_wgrad_compute"),
        schedules=OURS,
        reason="Megatron's schedule finishes what it defers",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--moe-expert-rank-capacity-factor",
        is_set=_given("moe_expert_rank_capacity_factor", "moe_paged_stash"),
        schedules=OURS,
        reason="its paged buffers are tied to Megatron's schedule",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--perform-rl-step",
        is_set=_given("perform_rl_step"),
        schedules=OURS,
        reason="rollouts and updates alternate on the newest weights",
        remedy=_USE_MEGATRON,
    ),
    Refused(
        flag="--rerun-mode",
        is_set=lambda args: args.rerun_mode not in ("disabled", "validate_results"),
        schedules=DELAYED,
        reason="a batch cannot be run again while the next one is under way",
        remedy="use --rerun-mode disabled",
    ),
)


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda args: setattr(args, name, value)


MAPPED: tuple[Mapped, ...] = (
    Mapped(
        flag="--rerun-mode",
        is_set=lambda args: args.rerun_mode == "validate_results",
        schedules=DELAYED,
        becomes="disabled",
        reason="Megatron's default makes all ranks meet after every batch",
        change=_set("rerun_mode", "disabled"),
    ),
    Mapped(
        flag="--overlap-grad-reduce",
        is_set=_given("overlap_grad_reduce"),
        schedules=DELAYED,
        becomes="off",
        reason="2bw overlaps the whole reduction with the next batch",
        change=_set("overlap_grad_reduce", False),
    ),
    Mapped(
        flag="--no-barrier-with-level-1-timing",
        is_set=lambda args: getattr(args, "timing_log_level", 0) > 0 and args.barrier_with_L1_time,
        schedules=DELAYED,
        becomes="on",
        reason="Megatron's default makes all ranks meet around every level-1 timer",
        change=_set("barrier_with_L1_time", False),
    ),
)


SLOWED: tuple[Slowed, ...] = (
    Slowed(
        flag="--exit-signal-handler",
        is_set=_given("exit_signal_handler"),
        schedules=DELAYED,
        reason="all ranks ask each other for signals after every batch",
    ),
    Slowed(
        flag="--exit-duration-in-mins",
        is_set=_given("exit_duration_in_mins"),
        schedules=DELAYED,
        reason="all ranks compare their clocks after every batch",
    ),
)


def table() -> str:
    """Every row as a Markdown table."""
    lines = ["| flag | schedules | what happens | why |", "|---|---|---|---|"]
    for row in MAPPED:
        lines.append(f"| `{row.flag}` | {_names(row.schedules)} | set to {row.becomes}, with a notice | {row.reason} |")
    for row in SLOWED:
        lines.append(f"| `{row.flag}` | {_names(row.schedules)} | works, costs speed | {row.reason} |")
    for row in REFUSED:
        lines.append(f"| `{row.flag}` | {_names(row.schedules)} | refused: {row.remedy} | {row.reason} |")
    return "\n".join(lines)


def _names(schedules: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(schedules))


if __name__ == "__main__":
    print(table())
