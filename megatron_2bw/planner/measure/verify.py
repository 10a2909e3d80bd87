"""Runs the best layouts of a plan on this machine: the end-to-end profiling of PipeDream-2BW's planner (section 4)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.measure.torchrun import LOGGED, gpus_here, lines_of, random_data
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.report.report import flags_of
from megatron_2bw.planner.search.finder import Choice
from megatron_2bw.planner.search.search import Plan
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Kind
from megatron_2bw.planner.table import seconds

LOG_INTERVAL, LOGS = 4, 4
"""Iterations per log line, and lines; what has the start of everything in it does not count."""
_TRAINING = (
    f"--train-iters {LOG_INTERVAL * LOGS} --log-interval {LOG_INTERVAL} --lr 1e-5 --clip-grad 1.0 --eval-iters 0 "
    "--eval-interval 1000000 --num-workers 0 --rerun-mode disabled"
).split()
_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "pretrain_gpt.py"


def measured(
    plan: Plan, choices: list[Choice], script: Path | None = None, more_flags: Sequence[str] = (), rounds: int = 1
) -> Plan:
    """``plan`` with ``choices`` measured and ranked by that, before the others; one that fails comes last.

    Args:
        plan: for one node, this one.
        choices: each run once a round.
        script: to train with; None for our example.
        more_flags: Megatron's, for the runs.
        rounds: of runs.

    Raises:
        PlanError: they cannot run here.
    """
    script = script or _EXAMPLE
    if plan.model.kind is not Kind.GPT:
        raise PlanError(f"--verify-top with a model of kind {plan.model.kind}: only gpt can be run; leave it out")
    if plan.cluster.nodes > 1:
        raise PlanError(
            f"--verify-top runs on this machine alone, and the plan is for {plan.cluster.nodes} nodes; leave it out, "
            "or plan for one node"
        )
    if not script.is_file():
        raise PlanError(f"there is no {script} to run; give your training script as --script FILE")
    _check_processors(plan.cluster)
    times_s: dict[Layout, list[float]] = {choice.layout: [] for choice in choices}
    problems: dict[Layout, PlanError] = {}
    for number in range(rounds):
        for choice in choices if number % 2 == 0 else reversed(choices):  # A machine that warms up favours none.
            if choice.layout in problems:
                continue
            try:
                times_s[choice.layout] += _run(plan, choice, script, more_flags)
            except PlanError as error:
                problems[choice.layout] = error
                print(f"{name(choice.layout)} is out: {error}", file=sys.stderr, flush=True)
    if len(problems) == len(choices):
        raise PlanError(f"none of the layouts ran; {problems[choices[-1].layout]}")
    ran = [_with_times(choice, times_s[choice.layout]) for choice in choices if choice.layout not in problems]
    ran.sort(key=lambda choice: choice.to_loss_s(choice.measured_s))
    failed = [choice for choice in choices if choice.layout in problems]
    rest = [choice for choice in plan.choices if choice not in choices]
    return replace(plan, choices=(*ran, *rest, *failed))


def _check_processors(cluster: Cluster) -> None:
    """Whether this machine has as many GPUs as the plan is for, and those of its profile.

    Raises:
        PlanError: it has fewer, or others.
    """
    here, profile = gpus_here(), cluster.profile
    if profile is not None and here and (profile.processors or profile.device not in here):
        raise PlanError(f"--verify-top runs on {here[0]} here, and the profile is of {profile.device}; leave it out")
    if profile is not None and profile.processors:
        return
    if len(here) < cluster.gpus:
        raise PlanError(
            f"--verify-top runs on this machine, which has {len(here) or 'none'} of the {cluster.gpus} GPUs "
            f"({cluster.gpu.name}); leave it out, or plan with megatron-2bw profile and --profile FILE"
        )
    print(f"running on {cluster.gpus} of this machine's GPUs: {', '.join(dict.fromkeys(here))}", file=sys.stderr)


def _with_times(choice: Choice, times_s: list[float]) -> Choice:
    return replace(choice, measured_s=median(times_s), measured_range_s=(min(times_s), max(times_s)))


def _run(plan: Plan, choice: Choice, script: Path, more_flags: Sequence[str]) -> list[float]:
    """Seconds of a batch, from each log line but the first."""
    layout = choice.layout
    flags = [*flags_of(plan.model, layout), *_TRAINING, *random_data(plan.model), *more_flags]
    lines = lines_of(["-m", "megatron_2bw", str(script), *flags], ranks=layout.gpus, what=name(layout))
    times_s = later_times_s(lines, LOG_INTERVAL)
    if len(times_s) < LOGS - 1:
        raise PlanError(
            f"it logged {len(times_s)} of {LOGS - 1} times after the first iterations; "
            "give a script on megatron.training.pretrain"
        )
    took, predicted = seconds(median(times_s)), seconds(choice.iteration.time_s)
    print(f"ran {name(layout)}: {took} per batch, predicted {predicted}", file=sys.stderr, flush=True)
    return times_s


def later_times_s(lines: Iterable[str], log_interval: int) -> list[float]:
    """Seconds of an iteration, from each of Megatron's log lines but those that count the first iteration.

    It may log that one by itself, too, and counts it in the next line again.
    """
    found = filter(None, map(LOGGED.search, lines))
    return [float(one[2]) / 1000 for one in found if int(one[1]) > log_interval]
