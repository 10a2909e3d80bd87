"""Our command-line arguments, and the checks that come before training."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_2bw.mcore import cpu_backend
from megatron_2bw.mcore.batches import BatchSizes
from megatron_2bw.mcore.placement import place
from megatron_2bw.planner.automatic import AUTO
from megatron_2bw.planner.flag_table.table import MAPPED, REFUSED, SLOWED
from megatron_2bw.runtime.corrections import CORRECTIONS
from megatron_2bw.schedule.commands.arguments import count, natural
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.feasible import checked, enough_microbatches
from megatron_2bw.schedule.registry import ALIASES, MEGATRON, MIRRORED, SCHEDULES, TWO_BW, canonical_name
from megatron_2bw.schedule.two_bw import MOST_EXTRA_IN_FLIGHT


class ArgumentError(ValueError):
    """Flags that do not go together: the flag, the reason and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group to Megatron's parser."""
    group = parser.add_argument_group("pipeline schedule (megatron_2bw)")
    group.add_argument(
        "--pipeline-schedule",
        default=MEGATRON,
        choices=[MEGATRON, *SCHEDULES, *ALIASES],
        help="2bw: never drain the pipeline, update with gradients one batch old (PipeDream-2BW); pipedream: update "
        "after every microbatch, with a delay per stage; 1f1b-flush, gpipe and inter-layer: synchronous; gems, chimera "
        "and mixpipe: synchronous, in both directions, with two stages per rank; megatron: Megatron's own, untouched.",
    )
    group.add_argument(
        "--pipeline-gradient-buffers",
        type=int,
        default=2,
        choices=[1, 2],
        help="2bw: with 2, finished gradients (with the distributed optimizer: this rank's shard) are kept apart, and "
        "their update waits for nobody before its weights are needed. 1 saves that memory; the update then "
        "comes before the next batch's first backward, which costs speed.",
    )
    group.add_argument(
        "--pipeline-extra-in-flight",
        type=natural,
        default=0,
        choices=range(MOST_EXTRA_IN_FLIGHT + 1),
        metavar="N",
        help="2bw: keep N more activations in flight per stage boundary than its d-s. That hides transfers and "
        "uneven moments of neighbouring stages, costs the memory of the activations, and needs "
        "(1+N)*(d-1) microbatches per batch.",
    )
    group.add_argument(
        "--pipeline-delayed-microbatches",
        type=count,
        default=None,
        metavar="N",
        help="2bw: compute the first N microbatches of a batch with the weights of one update before, the others with "
        "the newest, so that the delay costs less progress. At least what the first stage runs ahead, d-1 or with "
        "--pipeline-extra-in-flight X (1+X)*(d-1); one more leaves time to hide an update. By default all are delayed, "
        "the paper's rule.",
    )
    group.add_argument(
        "--mixpipe-k",
        type=_natural_or_auto,
        default=None,
        metavar="K",
        help="mixpipe: forwards that a rank starts with, over both directions; even. By default as many as stages, "
        "which is Chimera's order. auto: with --mixpipe-gamma, the fastest that the planner expects to fit.",
    )
    group.add_argument(
        "--mixpipe-gamma",
        type=natural,
        default=None,
        metavar="G",
        help="mixpipe: so many more forwards are in flight once backwards have begun.",
    )
    group.add_argument(
        "--delay-correction",
        default="none",
        choices=["none", *CORRECTIONS],
        help="2bw: none is the paper's exact rule. lead updates with the average of gradients --delay-lead steps ahead "
        "of time, as its trend has it, which allows larger learning rates; use it with a larger --adam-beta1, such as "
        "0.95. update-lead computes, evaluates and saves the model with weights that are --delay-lead updates ahead of "
        "the optimizer's, in bf16 or fp16. Neither keeps more memory.",
    )
    group.add_argument(
        "--delay-lead",
        type=_positive,
        default=2.0,
        metavar="C",
        help="Steps that --delay-correction looks ahead.",
    )
    group.add_argument(
        "--synchronous-warmup-iters",
        type=natural,
        default=0,
        metavar="N",
        help="2bw: run the first N iterations of a training as 1f1b-flush does, without a delay, which costs most "
        "while the loss falls fast. They have its bubble. --delay-correction looks one step less ahead in them.",
    )
    group.add_argument(
        "--pipeline-trace",
        default=None,
        metavar="FILE",
        help="At the end of training, write when every forward, backward and update ran on every stage "
        "of the first pipeline, as a Chrome/Perfetto trace.",
    )
    group.add_argument(
        "--log-pipeline",
        action="store_true",
        help="Log the pipeline's bubble, how much busier the busiest stage is than the least busy one and, "
        "under 2bw, how long before an update its reductions are complete; also to Tensorboard and W&B.",
    )
    return parser


def parsed(megatron_parsing: Callable[[], Any]) -> Any:
    """Parse; exit with code 2 where our arguments would be lost without a word."""
    args = megatron_parsing()
    given = [word for word in sys.argv[1:] if word.startswith("--pipeline-schedule")]
    if getattr(args, "pipeline_schedule", None) is None and given:
        _exit(ArgumentError(f"{given[0]} does not work with --yaml-cfg, which replaces all other flags; use flags"))
    if getattr(args, "pipeline_schedule", MEGATRON) in MIRRORED:
        _print_once(place(args))
    return args


def validated(args: Any, megatron_validation: Callable[[], Any]) -> Any:
    """Check and adapt ``args`` around Megatron's own validation; exit with code 2 on a refusal."""
    try:
        notices = cpu_backend.adapt_arguments(args) if cpu_backend.needed() else []
        schedule = getattr(args, "pipeline_schedule", MEGATRON)
        name = MEGATRON if schedule == MEGATRON else canonical_name(schedule)
        _refuse(args, name)
        _print_once([*notices, *_map(args, name)])
        result = megatron_validation()
        if name != MEGATRON:
            _refuse(args, name)  # Again: Megatron derives some values from others.
            _check_trace(args)
            if not args.skip_train:  # Evaluation is by Megatron's own schedule.
                if args.mixpipe_k == AUTO:
                    _print_once([_automatic(args)])
                # How far a loaded run has come is known only later; then `checked_before_training` looks again.
                check_batches(args, only_last_phase=args.load is not None)
    except ArgumentError as error:
        _exit(error)
    return result


def checked_before_training(args: Any) -> None:
    """Check the batches that are left, once it is known how many there are; exit with code 2 on a refusal."""
    try:
        check_batches(args, samples=args.consumed_train_samples, batches_done=args.iteration)
    except ArgumentError as error:
        _exit(error)


def check_batches(args: Any, *, samples: int = 0, batches_done: int = 0, only_last_phase: bool = False) -> None:
    """Refuse depths and numbers of microbatches that the validator refuses, in any phase of the run.

    Args:
        args: Megatron's arguments, validated.
        samples: consumed so far.
        batches_done: so far.
        only_last_phase: leave out the phases before the last one.

    Raises:
        ArgumentError: with the phase and the smallest number of microbatches that works.
    """
    try:
        phases = list(BatchSizes(args).phases(samples, batches_done))
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    name, stages = canonical_name(args.pipeline_schedule), args.pipeline_model_parallel_size
    ends = [*(phase.first_batch for phase in phases[1:]), math.inf]
    delayed = [(phase, end) for phase, end in zip(phases, ends, strict=True) if end > args.synchronous_warmup_iters]
    for phase, end in delayed[-1:] if only_last_phase else delayed:
        remedy = "raise --global-batch-size to {enough} x --micro-batch-size x data-parallel size"
        if args.step_batch_size_schedule is not None:
            instead = f"--pipeline-schedule 1f1b-flush and load its checkpoint with {name}"
            if name in TWO_BW and end < math.inf:
                instead = f"--synchronous-warmup-iters {end}"
            remedy = (
                "let --step-batch-size-schedule have {enough} x --micro-batch-size x data-parallel size samples "
                f"per batch from sample {phase.first_sample} on, not {phase.batch_size}; or run it with {instead}"
            )
        check_layout(
            name,
            stages=stages,
            microbatches=phase.microbatches,
            remedy=remedy,
            **options_of(args),
        )


def options_of(args: Any) -> dict[str, int | None]:
    """What the flags say of the schedule beside its size."""
    return {
        "extra_in_flight": args.pipeline_extra_in_flight,
        "delayed_microbatches": args.pipeline_delayed_microbatches,
        "k": args.mixpipe_k,
        "gamma": args.mixpipe_gamma,
    }


def check_layout(name: str, *, stages: int, microbatches: int, remedy: str, **options: int | None) -> None:
    """Refuse a depth and number of microbatches that the validator refuses.

    Args:
        name: of the schedule.
        stages: pipeline depth.
        microbatches: per batch and replica.
        remedy: how to have more; ``{enough}`` stands for the smallest number that works.
        **options: of the schedule; see `registry.build`.

    Raises:
        ArgumentError: with the reason and the remedy.
    """
    if stages < 2:
        raise ArgumentError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size of at least 2, got {stages}: "
            f"one stage has no bubble; use --pipeline-schedule {MEGATRON}"
        )
    size = {"stages": stages, "microbatches": microbatches, **options}
    try:
        checked(name, **size)
    except ScheduleError as error:
        problem = error.message
    else:
        return
    what = f"--pipeline-schedule {name} cannot run {microbatches} microbatches per batch on {stages} stages: {problem}"
    enough = enough_microbatches(name, **size)
    if enough is None:
        raise ArgumentError(f"{what}; or use --pipeline-schedule 1f1b-flush")
    if (options["delayed_microbatches"] or enough) < enough:
        what += (
            f"; --pipeline-delayed-microbatches {options['delayed_microbatches']} is less than {enough}: give that, or "
            "leave the flag out"
        )
        if microbatches >= enough:
            raise ArgumentError(what)
    if options["extra_in_flight"]:
        remedy = f"lower --pipeline-extra-in-flight {options['extra_in_flight']}, {remedy}"
    raise ArgumentError(
        f"{what}; it needs at least {enough}: {remedy.format(enough=enough)}, lower --micro-batch-size, "
        f"or use --pipeline-schedule 1f1b-flush"
    )


def _automatic(args: Any) -> str:
    """Choose what ``--mixpipe-k auto`` leaves open; says what."""
    from megatron_2bw.mcore.automatic import choose
    from megatron_2bw.planner.errors import PlanError

    if args.mixpipe_gamma is not None:
        raise ArgumentError("--mixpipe-gamma is chosen together with --mixpipe-k auto: leave it out, or give both")
    try:
        return choose(args)
    except PlanError as error:
        raise ArgumentError(f"--mixpipe-k auto needs a prediction: {error}; or give a number") from error


def _natural_or_auto(text: str) -> int | str:
    return text if text == AUTO else natural(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _refuse(args: Any, schedule: str) -> None:
    refusals = [row.message(schedule) for row in REFUSED if row.applies(args, schedule)]
    if refusals:  # All of them: a job that waits hours for its nodes should not fail once per flag.
        raise ArgumentError("\n".join(refusals))


def _map(args: Any, schedule: str) -> list[str]:
    notices = [
        f"{row.flag} costs speed under --pipeline-schedule {schedule}: {row.reason}"
        for row in SLOWED
        if row.applies(args, schedule)
    ]
    for row in MAPPED:
        if row.applies(args, schedule):
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


def _print_once(notices: list[str]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        for notice in notices:
            print(f"megatron_2bw: {notice}", flush=True)


def _exit(error: ArgumentError) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        lines = [f"megatron_2bw: error: {line}" for line in str(error).splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)
    else:
        # A launcher ends all ranks when the first one exits; let the message come out before.
        time.sleep(1.0)
    raise SystemExit(2)
