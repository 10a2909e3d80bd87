"""What our schedules do with Megatron's flags: refuse, map, or warn of the cost.

One table drives the checks before training and the documentation. A flag in no row goes to Megatron as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_2bw.planner.flag_table.refused import REFUSED
from megatron_2bw.planner.flag_table.rows import (
    OURS,
    Mapped,
    Slowed,
    above,
    attribute,
    given,
    set_to,
    sums_in_bf16,
)
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED, PER_MICROBATCH, TWO_BW

__all__ = ["MAPPED", "REFUSED", "SLOWED", "table"]


def _off(flag: str, schedules: frozenset[str], reason: str, is_set: Callable[[Any], bool] | None = None) -> Mapped:
    """A switch that is on."""
    change = set_to(attribute(flag), False)
    return Mapped(flag=flag, is_set=is_set, schedules=schedules, becomes="off", reason=reason, change=change)


MAPPED: tuple[Mapped, ...] = (
    Mapped(
        flag="--rerun-mode",
        is_set=lambda args: args.rerun_mode == "validate_results",
        schedules=DELAYED,
        becomes="disabled",
        reason="Megatron's default makes all ranks meet after every batch",
        change=set_to("rerun_mode", "disabled"),
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
        flag="--accumulate-allreduce-grads-in-fp32",
        is_set=lambda args: args.fp16 and not args.accumulate_allreduce_grads_in_fp32,
        schedules=DELAYED,
        becomes="on",
        reason="a delayed update removes the loss scale from gradients in fp32",
        change=set_to("accumulate_allreduce_grads_in_fp32", True),
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
        flag="--no-barrier-with-level-1-timing",
        is_set=lambda args: getattr(args, "timing_log_level", 0) > 0 and args.barrier_with_L1_time,
        schedules=DELAYED,
        becomes="on",
        reason="Megatron's default makes all ranks meet around every level-1 timer",
        change=set_to("barrier_with_L1_time", False),
    ),
    Mapped(
        flag="--rampup-batch-size",
        schedules=OURS,
        becomes="ignored",
        reason="Megatron's training loop no longer reads it; --step-batch-size-schedule does what it did",
        change=set_to("rampup_batch_size", None),
    ),
)


SLOWED: tuple[Slowed, ...] = (
    Slowed(
        flag="--log-params-norm",
        schedules=DELAYED,
        reason="all stages finish their update before every log line that shows the norm",
    ),
    Slowed(
        flag="--sft / --dataloader-inter-document-masking",
        is_set=given("sft", "dataloader_inter_document_masking"),
        schedules=DELAYED,
        reason="all ranks add up the lengths of packed sequences after every batch",
    ),
    Slowed(
        flag="--timing-log-level above 0",
        is_set=above("timing_log_level", 0),
        schedules=DELAYED,
        reason="all ranks gather their timers at every log line, and level 1 waits for the device after every batch; "
        "there are no timers of what runs beside computation: transfers, reductions of gradients, clipping "
        "(--pipeline-trace shows when they end)",
    ),
    Slowed(
        flag="--train-sync-interval",
        schedules=DELAYED,
        reason="every rank waits for its device after so many batches, and so for transfers with the neighbours",
    ),
    Slowed(
        flag="--log-straggler",
        schedules=DELAYED,
        reason="all ranks compare their speeds at every log line",
    ),
    Slowed(
        flag="--log-energy",
        schedules=DELAYED,
        reason="all ranks add up what they used at every log line",
    ),
    Slowed(
        flag="--check-weight-hash-across-dp-replicas-interval",
        schedules=DELAYED,
        reason="replicas compare their weights after so many batches",
    ),
    Slowed(
        flag="--gpu-sniff-test-interval",
        schedules=DELAYED,
        reason="all ranks compute and communicate for a test after so many batches",
    ),
    Slowed(
        flag="--num-experts",
        schedules=DELAYED,
        reason="all stages add up the experts' losses at every log line and every entry in Tensorboard or W&B",
    ),
    Slowed(
        flag="--empty-unused-memory-level",
        schedules=DELAYED,
        reason="giving memory back waits for the device after every batch, and so for transfers with the neighbours",
    ),
    Slowed(
        flag="--async-save",
        schedules=DELAYED,
        reason="all ranks ask each other after every batch whether the checkpoint is written, while one is",
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
