"""What our schedules do with Megatron's flags: refuse, map, or warn of the cost.

One table drives the checks before training and the documentation. A flag in no row goes to Megatron as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_2bw.planner.flag_table.conditions import saves_by_nvrx
from megatron_2bw.planner.flag_table.refused import REFUSED
from megatron_2bw.planner.flag_table.rows import (
    OURS,
    Mapped,
    Slowed,
    above,
    given,
    set_to,
    sums_in_bf16,
)
from megatron_2bw.planner.spelling import attribute
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED, PER_MICROBATCH, TWO_BW

__all__ = ["MAPPED", "REFUSED", "SLOWED", "table"]


def _off(flag: str, schedules: frozenset[str], reason: str, is_set: Callable[[Any], bool] | None = None) -> Mapped:
    """A switch that is on."""
    change = set_to(attribute(flag), False)
    return Mapped(flag, schedules, reason, "off", change, is_set=is_set)


MAPPED: tuple[Mapped, ...] = (
    Mapped(
        "--rerun-mode",
        DELAYED,
        "Megatron's default makes all ranks meet after every batch",
        "disabled",
        set_to("rerun_mode", "disabled"),
        is_set=lambda args: args.rerun_mode == "validate_results",
    ),
    _off(
        "--overlap-grad-reduce",
        DELAYED,
        "delayed updates start their reductions on their own, 2bw's beside the whole next batch",
    ),
    _off(
        "--overlap-param-gather",
        DELAYED,
        "a delayed update gathers parameters, beside the other stages' computation",
    ),
    _off(
        "--overlap-grad-reduce",
        BIDIRECTIONAL,
        "a rank adds the gradients of the other copy of its stage first",
    ),
    _off(
        "--overlap-param-gather",
        BIDIRECTIONAL,
        "a rank gives its weights to the other copy of its stage before the first forward",
    ),
    Mapped(
        "--accumulate-allreduce-grads-in-fp32",
        DELAYED,
        "a delayed update removes the loss scale from gradients in fp32",
        "on",
        set_to("accumulate_allreduce_grads_in_fp32", True),
        is_set=lambda args: args.fp16 and not args.accumulate_allreduce_grads_in_fp32,
    ),
    _off(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        DELAYED,
        "gradients are in fp32 already",
        is_set=lambda args: args.ddp_reduce_scatter_with_fp32_accumulation and not sums_in_bf16(args),
    ),
    _off(
        "--ckpt-assume-constant-structure",
        PER_MICROBATCH,
        "checkpoints of the first batches hold fewer weight versions than later ones",
    ),
    _off(
        "--ckpt-assume-constant-structure",
        TWO_BW,
        "checkpoints of a synchronous beginning hold fewer weight versions than later ones",
        is_set=lambda args: args.ckpt_assume_constant_structure and args.synchronous_warmup_iters,
    ),
    Mapped(
        "--ckpt-assume-constant-structure with --async-save by nvidia-resiliency-ext",
        TWO_BW,
        "nvidia-resiliency-ext 0.6 saves what now lies where weights were at the first save, and 2bw moves them",
        "off",
        set_to("ckpt_assume_constant_structure", False),
        is_set=lambda args: args.ckpt_assume_constant_structure and saves_by_nvrx(args),
    ),
    Mapped(
        "--no-barrier-with-level-1-timing",
        DELAYED,
        "Megatron's default makes all ranks meet around every level-1 timer",
        "on",
        set_to("barrier_with_L1_time", False),
        is_set=lambda args: getattr(args, "timing_log_level", 0) > 0 and args.barrier_with_L1_time,
    ),
    Mapped(
        "--rampup-batch-size",
        OURS,
        "Megatron's training loop no longer reads it; --step-batch-size-schedule does what it did",
        "ignored",
        set_to("rampup_batch_size", None),
    ),
)


SLOWED: tuple[Slowed, ...] = (
    Slowed("--log-params-norm", DELAYED, "all stages finish their update before every log line that shows the norm"),
    Slowed(
        "--sft / --dataloader-inter-document-masking",
        DELAYED,
        "all ranks add up the lengths of packed sequences after every batch",
        is_set=given("sft", "dataloader_inter_document_masking"),
    ),
    Slowed(
        "--timing-log-level above 0",
        DELAYED,
        "all ranks gather their timers at every log line, and level 1 waits for the device after every batch; "
        "there are no timers of what runs beside computation: transfers, reductions of gradients, clipping "
        "(--pipeline-trace shows when they end)",
        is_set=above("timing_log_level", 0),
    ),
    Slowed(
        "--train-sync-interval",
        DELAYED,
        "every rank waits for its device after so many batches, and so for transfers with the neighbours",
    ),
    Slowed(
        "--optimizer-cpu-offload",
        DELAYED,
        "while the host computes an update it gives its device nothing else to do, and neighbours wait for it",
    ),
    Slowed(
        "--disable-gloo-process-groups",
        DELAYED,
        "norms and early exits are summed on the hosts all the same, over groups of gloo, which connect every rank "
        "with every other one",
        is_set=lambda args: args.use_gloo_process_groups is False,
    ),
    Slowed(
        "--use-sharp / --sharp-enabled-group",
        DELAYED,
        "gradients are summed over groups that are made later, for which Megatron does not have NCCL use SHARP",
        is_set=given("use_sharp", "sharp_enabled_group"),
    ),
    Slowed(
        "--ddp-num-buckets / --ddp-bucket-size",
        DELAYED,
        "the gradients of a stage are in one bucket all the same, whose sum runs beside the whole next batch",
        is_set=given("ddp_num_buckets", "ddp_bucket_size"),
    ),
    Slowed("--qk-clip", PER_MICROBATCH, "a stage waits for its largest attention logits after every microbatch"),
    Slowed("--log-straggler", DELAYED, "all ranks compare their speeds at every log line"),
    Slowed("--log-energy", DELAYED, "all ranks add up what they used at every log line"),
    Slowed(
        "--check-weight-hash-across-dp-replicas-interval",
        DELAYED,
        "replicas compare their weights after so many batches",
    ),
    Slowed("--gpu-sniff-test-interval", DELAYED, "all ranks compute and communicate for a test after so many batches"),
    Slowed(
        "--num-experts",
        DELAYED,
        "all stages add up the experts' losses at every log line and every entry in Tensorboard or W&B",
    ),
    Slowed(
        "--empty-unused-memory-level",
        DELAYED,
        "giving memory back waits for the device after every batch, and so for transfers with the neighbours",
    ),
    Slowed(
        "--async-save",
        DELAYED,
        "all ranks ask each other after every batch whether the checkpoint is written, while one is",
    ),
)


def table() -> str:
    """Every row as a Markdown table."""
    lines = ["| flag | schedules | what happens | why |", "|---|---|---|---|"]
    for row in MAPPED:
        lines.append(f"| `{row.flag}` | {_names(row.schedules)} | {row.becomes}, with a notice | {row.reason} |")
    for row in SLOWED:
        lines.append(f"| `{row.flag}` | {_names(row.schedules)} | works, costs speed | {row.reason} |")
    for row in REFUSED:
        lines.append(f"| `{row.flag}` | {_names(row.schedules)} | refused: {row.remedy} | {row.reason} |")
    return "\n".join(lines)


def _names(schedules: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(schedules))


if __name__ == "__main__":
    print(table())
