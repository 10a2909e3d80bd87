"""Our command-line arguments, and the checks that come before training."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_2bw.mcore import cpu_backend
from megatron_2bw.mcore.support import MAPPED, REFUSED, SLOWED
from megatron_2bw.schedule.feasible import enough_microbatches, refusal
from megatron_2bw.schedule.registry import ALIASES, SCHEDULES, build, canonical_name

MEGATRON = "megatron"


class ArgumentError(ValueError):
    """Flags that do not go together: the flag, the reason and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group to Megatron's parser."""
    group = parser.add_argument_group("pipeline schedule (megatron_2bw)")
    group.add_argument(
        "--pipeline-schedule",
        default=MEGATRON,
        choices=[MEGATRON, *SCHEDULES, *ALIASES],
        help="2bw: never drain the pipeline, update with gradients one batch old (PipeDream-2BW); "
        "1f1b-flush and gpipe: synchronous; megatron: Megatron's own schedule, untouched.",
    )
    group.add_argument(
        "--pipeline-trace",
        default=None,
        metavar="FILE",
        help="At the end of training, write when every forward, backward and update ran on every stage "
        "of the first pipeline, as a Chrome/Perfetto trace.",
    )
    return parser


def parsed(megatron_parsing: Callable[[], Any]) -> Any:
    """Parse; exit with code 2 where our arguments would be lost without a word."""
    args = megatron_parsing()
    given = [word for word in sys.argv[1:] if word.startswith("--pipeline-schedule")]
    if getattr(args, "pipeline_schedule", None) is None and given:
        _exit(ArgumentError(f"{given[0]} does not work with --yaml-cfg, which replaces all other flags; use flags"))
    return args


def validated(args: Any, megatron_validation: Callable[[], Any]) -> Any:
    """Check and adapt ``args`` around Megatron's own validation; exit with code 2 on a refusal."""
    try:
        notices = cpu_backend.adapt_arguments(args) if cpu_backend.needed() else []
        schedule = getattr(args, "pipeline_schedule", MEGATRON)
        if schedule == MEGATRON:
            _refuse_trace(args)
        else:
            _refuse(args, canonical_name(schedule))
            notices += _map(args, canonical_name(schedule))
        _print_once(notices)
        result = megatron_validation()
        if schedule != MEGATRON:
            _refuse(args, canonical_name(schedule))  # Again: Megatron derives some values from others.
            _check_trace(args)
            check_layout(
                canonical_name(schedule),
                stages=args.pipeline_model_parallel_size,
                microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            )
    except ArgumentError as error:
        _exit(error)
    return result


def check_layout(name: str, *, stages: int, microbatches: int) -> None:
    """Refuse a depth and number of microbatches that the validator refuses.

    Raises:
        ArgumentError: with the smallest number of microbatches that works.
    """
    if stages < 2:
        raise ArgumentError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size of at least 2, got {stages}: "
            f"one stage has no bubble; use --pipeline-schedule {MEGATRON}"
        )
    problem = refusal(build(name, stages=stages, microbatches=microbatches))
    if problem is None:
        return
    enough = enough_microbatches(name, stages=stages, microbatches=microbatches)
    raise ArgumentError(
        f"--pipeline-schedule {name} cannot run {microbatches} microbatches per batch on {stages} stages: {problem}; "
        f"it needs at least {enough}: raise --global-batch-size to {enough} x --micro-batch-size x data-parallel size, "
        f"lower --micro-batch-size, or use --pipeline-schedule 1f1b-flush"
    )


def _refuse(args: Any, schedule: str) -> None:
    for row in REFUSED:
        if schedule in row.schedules and row.is_set(args):
            raise ArgumentError(
                f"{row.flag} does not work with --pipeline-schedule {schedule}: {row.reason}; {row.remedy}"
            )


def _map(args: Any, schedule: str) -> list[str]:
    notices = [
        f"{row.flag} costs speed under --pipeline-schedule {schedule}: {row.reason}"
        for row in SLOWED
        if schedule in row.schedules and row.is_set(args)
    ]
    for row in MAPPED:
        if schedule in row.schedules and row.is_set(args):
            row.change(args)
            notices.append(f"{row.flag} is {row.becomes} under --pipeline-schedule {schedule}: {row.reason}")
    return notices


def _check_trace(args: Any) -> None:
    if args.pipeline_trace is None:
        return
    try:
        file = Path(args.pipeline_trace)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise ArgumentError(f"--pipeline-trace {args.pipeline_trace} cannot be written: {error.strerror}") from error


def _refuse_trace(args: Any) -> None:
    if getattr(args, "pipeline_trace", None) is not None:
        raise ArgumentError(
            "--pipeline-trace records the schedules of megatron_2bw, not Megatron's own: "
            "choose one, for example --pipeline-schedule 1f1b-flush"
        )


def _print_once(notices: list[str]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        for notice in notices:
            print(f"megatron_2bw: {notice}", flush=True)


def _exit(error: ArgumentError) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"megatron_2bw: error: {error}", file=sys.stderr, flush=True)
    else:
        # A launcher ends all ranks when the first one exits; let the message come out before.
        time.sleep(1.0)
    raise SystemExit(2)
