"""The checks that come before training: what is refused, what is set to something else, and whether batches fit."""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_2bw.mcore.cpu import backend as cpu_backend
from megatron_2bw.mcore.loop.arguments import has_late_receives, options_of
from megatron_2bw.mcore.loop.batches import BatchSizes
from megatron_2bw.mcore.loop.placement import place
from megatron_2bw.planner.flag_table.table import MAPPED, REFUSED, SLOWED
from megatron_2bw.planner.papers.automatic import AUTO
from megatron_2bw.planner.rules import least_microbatches
from megatron_2bw.schedule.program import GradientCopy
from megatron_2bw.schedule.registry import (
    BIDIRECTIONAL,
    DELAYED,
    MEGATRON,
    PER_MICROBATCH,
    TWO_BW,
    WITHOUT_DELAY,
    canonical_name,
)
from megatron_2bw.schedule.validation.feasible import chain_of, enough_microbatches, refusal

_NODES = ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES")
"""What torchrun, and srun without it, tell a rank of how many nodes there are."""


class ArgumentError(ValueError):
    """Flags that do not go together: the flag, the reason and the remedy."""


def parsed(megatron_parsing: Callable[[], Any]) -> Any:
    """Parse; exit with code 2 where our arguments would be lost without a word."""
    args = megatron_parsing()
    given = _given("--pipeline-schedule")
    if getattr(args, "pipeline_schedule", None) is None and given:
        exit_with(ArgumentError(f"{given[0]} does not work with --yaml-cfg, which replaces all other flags; use flags"))
    if getattr(args, "pipeline_schedule", MEGATRON) in BIDIRECTIONAL:
        _print_once(place(args))
    return args


def _given(flag: str) -> list[str]:
    """What the command line says by ``flag``, with or without its value."""
    return [word for word in sys.argv[1:] if word.partition("=")[0] == flag]


def validated(args: Any, megatron_validation: Callable[[], Any]) -> Any:
    """Check and adapt ``args`` around Megatron's own validation; exit with code 2 on a refusal."""
    try:
        notices = []
        if cpu_backend.needed():
            refuse_to_miss_gpus(args)
            notices = cpu_backend.adapt_arguments(args)
        schedule = getattr(args, "pipeline_schedule", MEGATRON)
        name = MEGATRON if schedule == MEGATRON else canonical_name(schedule)
        refuse(args, name)
        _print_once([*notices, *adapt(args, name)])
        result = megatron_validation()
        if name != MEGATRON:
            refuse(args, name)  # Again: Megatron derives some values from others.
            _check_trace(args)
            if args.mixpipe_k == AUTO:
                _print_once([_automatic(args)])
            if not args.skip_train:  # Evaluation is by Megatron's own schedule.
                # How far a loaded run has come is known only later; then `checked_before_training` looks again.
                check_batches(args, BatchSizes.of_arguments(args), only_last_phase=args.load is not None)
    except ArgumentError as error:
        exit_with(error)
    return result


def checked_before_training(args: Any) -> None:
    """Check the batches that are left, once it is known how many there are; exit with code 2 on a refusal."""
    try:
        sizes = BatchSizes.of_training(args)
        check_batches(args, sizes, samples=args.consumed_train_samples, batches_done=args.iteration)
    except ArgumentError as error:
        exit_with(error)


def check_batches(
    args: Any, sizes: BatchSizes, *, samples: int = 0, batches_done: int = 0, only_last_phase: bool = False
) -> None:
    """Refuse depths and numbers of microbatches that the validator refuses, in any phase of the run.

    Args:
        args: Megatron's arguments, validated.
        sizes: of the batches.
        samples: consumed so far.
        batches_done: so far.
        only_last_phase: leave out the phases before the last one.

    Raises:
        ArgumentError: with the phase and the smallest number of microbatches that works.
    """
    try:
        phases = list(sizes.phases(samples, batches_done))
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    name, stages = canonical_name(args.pipeline_schedule), args.pipeline_model_parallel_size
    ends = [*(phase.first_batch for phase in phases[1:]), math.inf]
    most, last = args.pipeline_delayed_microbatches or 0, phases[-1].microbatches
    if most > last:  # In phases of fewer, all are delayed.
        raise ArgumentError(
            f"--pipeline-delayed-microbatches {most} is more than the {last} of a batch: give fewer, or leave the flag "
            "out, which delays all"
        )
    for phase in () if only_last_phase else phases:
        if phase.first_batch < args.synchronous_warmup_iters:  # Works; so that the first call finds it proven.
            refusal(WITHOUT_DELAY, stages=stages, microbatches=phase.microbatches, **lowering_of(args))
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
            **lowering_of(args),
        )


def lowering_of(args: Any) -> dict[str, Any]:
    """How the run's Programs are lowered, as far as flags tell, so that a run finds them proven: see `lowered_as`."""
    name = canonical_name(args.pipeline_schedule)
    late_receives = has_late_receives(args)
    if name not in DELAYED:
        return {"reductions": chain_of(tied=False), "late_receives": late_receives}
    copy = GradientCopy.WHOLE
    if args.pipeline_gradient_buffers == 1 or name in PER_MICROBATCH:
        copy = GradientCopy.NONE
    elif (args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer) and _shards(args) > 1:
        copy = GradientCopy.SHARD
    tied = not args.untie_embeddings_and_output_weights or bool(args.mtp_num_layers)
    return {"copy": copy, "reductions": chain_of(tied=tied), "late_receives": late_receives}


def _shards(args: Any) -> int:
    """Ranks that share the optimizer of weights other than experts'."""
    return args.data_parallel_size * args.context_parallel_size // args.num_distributed_optimizer_instances


def check_layout(name: str, *, stages: int, microbatches: int, remedy: str, **options: Any) -> None:
    """Refuse a depth and number of microbatches that the validator refuses.

    Args:
        name: of the schedule.
        stages: pipeline depth.
        microbatches: per batch and replica.
        remedy: how to have more; ``{enough}`` stands for the smallest number that works.
        **options: of the schedule and its lowering; see `lowered_as`.

    Raises:
        ArgumentError: with the reason and the remedy.
    """
    if stages < 2:
        raise ArgumentError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size of at least 2, got {stages}: "
            f"one stage has no bubble; use --pipeline-schedule {MEGATRON}"
        )
    size = {"stages": stages, "microbatches": microbatches, **options}
    problem = refusal(name, **size)
    if problem is None:
        return
    what = (
        f"--pipeline-schedule {name} cannot run {microbatches} microbatches per batch on "
        f"--pipeline-model-parallel-size {stages}"
    )
    enough, delayed = enough_microbatches(name, **size), options["delayed_microbatches"]
    if enough is None:
        raise ArgumentError(f"{what}: {problem}; or use --pipeline-schedule 1f1b-flush")
    ahead = least_microbatches(name, stages, options["extra_in_flight"] or 0)
    what += f": its first stage runs {ahead} ahead" if min(delayed or ahead, microbatches) < ahead else f": {problem}"
    if (delayed or enough) < enough:
        what += (
            f"; --pipeline-delayed-microbatches {delayed} is less than {enough}: give {enough} or more, or leave the "
            "flag out"
        )
    if microbatches < enough:
        if options["extra_in_flight"]:
            remedy = f"lower --pipeline-extra-in-flight {options['extra_in_flight']}, {remedy}"
        what += (
            f"; {enough} microbatches work: {remedy.format(enough=enough)}, lower --micro-batch-size, or use "
            "--pipeline-schedule 1f1b-flush"
        )
    raise ArgumentError(what)


def _automatic(args: Any) -> str:
    """Choose what ``--mixpipe-k auto`` leaves open; says what."""
    from megatron_2bw.mcore.loop.automatic import choose
    from megatron_2bw.planner.errors import PlanError

    if args.mixpipe_gamma is not None:
        raise ArgumentError("--mixpipe-gamma is chosen together with --mixpipe-k auto: leave it out, or give both")
    try:
        return choose(args)
    except PlanError as error:
        raise ArgumentError(f"--mixpipe-k auto needs a prediction: {error}; or give a number") from error


def refuse_to_miss_gpus(args: Any) -> None:
    """Stop a job that wants GPUs where torch finds none, on a node that would train on its CPU, or wait for the others.

    Raises:
        ArgumentError: with the node's name.
    """
    is_given = bool(_given("--distributed-backend"))
    nodes = next((int(os.environ[name]) for name in _NODES if name in os.environ), 1)
    if args.distributed_backend == "nccl" and (is_given or nodes > 1):
        wanted = "--distributed-backend nccl" if is_given else f"a job of {nodes} nodes"
        raise ArgumentError(
            f"{wanted} needs GPUs, and torch.cuda.is_available() is false on {socket.gethostname()}: look at its "
            "driver and at what the job may use, or train on CPUs by --distributed-backend gloo"
        )


def refuse(args: Any, schedule: str) -> None:
    """Stop where a flag does not work under ``schedule``.

    Raises:
        ArgumentError: with all such flags.
    """
    refusals = [row.message(schedule) for row in REFUSED if row.applies(args, schedule)]
    if refusals:  # All of them: a job that waits hours for its nodes should not fail once per flag.
        raise ArgumentError("\n".join(refusals))


def adapt(args: Any, schedule: str) -> list[str]:
    """Set what ``schedule`` needs otherwise; returns what to say of that, and of what costs speed."""
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
    rank = os.environ.get("RANK", "0")
    if args.pipeline_trace is None or os.environ.get("LOCAL_RANK", rank) != rank:  # The first rank's node writes it.
        return
    file = Path(args.pipeline_trace)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Nothing is written: a run that fails leaves no empty trace.
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(f"--pipeline-trace {file} cannot be written: {error.strerror}") from error


def _print_once(notices: list[str]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        for notice in notices:
            print(f"megatron_2bw: {notice}", flush=True)


def exit_with(error: ArgumentError) -> None:
    """End this rank with code 2; one per node says why."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        lines = [f"megatron_2bw: error: {line}" for line in str(error).splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)
    else:
        # A launcher ends all ranks when the first one exits; let the message come out before.
        time.sleep(1.0)
    raise SystemExit(2)
