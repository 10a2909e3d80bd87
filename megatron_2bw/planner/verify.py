"""Runs the best layouts of a plan on this machine: the end-to-end profiling of PipeDream-2BW's planner (section 4)."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.model import Kind
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.report import flags_of, shown
from megatron_2bw.planner.search import Choice, Plan, loss_time_s
from megatron_2bw.planner.table import seconds
from megatron_2bw.planner.torchrun import lines_of

LOG_INTERVAL, LOGS = 4, 4
"""Iterations per log line, and lines; the first one, with the start of everything, does not count."""
_TRAINING = (
    f"--mock-data --tokenizer-type NullTokenizer --train-iters {LOG_INTERVAL * LOGS} --log-interval {LOG_INTERVAL} "
    "--lr 1e-5 --clip-grad 1.0 --eval-iters 0 --eval-interval 1000000 --num-workers 0 --rerun-mode disabled"
).split()
_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
_LOGGED = re.compile(r"iteration\s+\d+/.*elapsed time per iteration \(ms\): ([\d.]+)")


def verified(plan: Plan, count: int, script: Path | None = None) -> Plan:
    """``plan`` with the best ``count`` layouts measured and ranked by that, before the others.

    Raises:
        PlanError: they cannot run here, or one of them fails.
    """
    return measured(plan, shown(plan, count), script)


def measured(plan: Plan, choices: list[Choice], script: Path | None = None) -> Plan:
    """The same for layouts of choice."""
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
    ran = []
    for choice in choices:
        time_s = _run(plan, choice, script)
        to_loss_s = loss_time_s(choice.layout, time_s, plan.efficiency)
        ran.append(replace(choice, measured_s=time_s, loss_time_s=to_loss_s))
    ran.sort(key=lambda choice: choice.loss_time_s)
    return replace(plan, choices=(*ran, *(choice for choice in plan.choices if choice not in choices)))


def _run(plan: Plan, choice: Choice, script: Path) -> float:
    """Median seconds of a batch."""
    layout = choice.layout
    words = ["-m", "megatron_2bw", str(script), *flags_of(plan.model, layout), *_TRAINING]
    words += ["--vocab-size", str(plan.model.vocab_size - 1)]  # NullTokenizer adds one token.
    lines = lines_of(words, ranks=layout.gpus, what=name(layout))
    times_s = [float(found[1]) / 1000 for line in lines if (found := _LOGGED.search(line))]
    if len(times_s) < LOGS:
        raise PlanError(f"{script} logged {len(times_s)} of {LOGS} times; give a script on megatron.training.pretrain")
    time_s = median(times_s[1:])
    predicted = seconds(choice.iteration.time_s)
    print(f"ran {name(layout)}: {seconds(time_s)} per batch, predicted {predicted}", file=sys.stderr, flush=True)
    return time_s
