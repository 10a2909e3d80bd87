"""What ``--pipeline-trace`` shows and what it costs.

    python scripts/bench/timeline.py [--part both|cost] [--stages 2,4,8] [--pairs 20] [--output FILE]

Part one compares the measured bubble with two that are simulated from the measured forwards and
backwards alone, all else free: "replayed" with every one of them as long as it was, "usual" with every
one as long as its stage's median. A real GPT on two stages, and stages that wait instead of computing
on four and eight. Part two runs blocks of batches with and without the recorder in turn, in the same
processes, on stages that wait, and compares neighbouring blocks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cost import STAGES, cost_report
from report import heading, put
from schedules import FLUSH, TWO_BW, Arm
from timed_stage import BACKWARD_S, FORWARD_S, measure
from timed_stage import Arm as TimedArm
from timed_stage import Run as TimedRun

from megatron_2bw.schedule.commands.measured import report as report_of
from megatron_2bw.schedule.pictures.measured import Run
from megatron_2bw.schedule.pictures.run_file import read_run
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.timeline import Timeline

MICROBATCHES, ITERATIONS = 4, 40
WAITED = 40
"""Batches of stages that wait."""


def computed(arm: Arm) -> Run:
    """A GPT on this machine, one thread per stage."""
    job = arm.start(MICROBATCHES, ITERATIONS)
    try:
        job.finish()
        return read_run(job.trace)
    finally:
        job.close()


def waited(schedule: str, stages: int) -> Run:
    """Stages of a known duration."""
    run = TimedRun(
        schedule=schedule,
        stages=stages,
        microbatches=stages,
        batches=WAITED,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        arms=(TimedArm(recorded=True),),
    )
    events = tuple(tuple(measured.events) for measured in measure(run))
    return Run(
        schedule=build(schedule, stages=stages, microbatches=stages), timeline=Timeline(events=events, name=schedule)
    )


def bubbles() -> list[str]:
    """A line per run, then what the command says about the first one."""
    runs = [(f"{arm.label}, GPT", computed(arm)) for arm in (TWO_BW, FLUSH)]
    runs += [(f"{name}, timed", waited(name, stages)) for stages in (4, 8) for name in ("2bw", "1f1b-flush")]
    lines = [
        "",
        f"{'bubble':<24} {'d':>2} {'m':>2} {'measured':>9} {'replayed':>9} {'apart':>6} {'usual':>6} {'apart':>6}",
    ]
    for label, run in runs:
        size = f"{run.schedule.stages:>2} {run.schedule.microbatches:>2}"
        simulated = [
            f"{bubble:>{width}.1%} {100 * (run.bubble - bubble):>+6.1f}"
            for bubble, width in ((run.replayed_bubble, 9), (run.simulated_bubble, 6))
        ]
        lines.append(f"{label:<24} {size} {run.bubble:>9.1%} {' '.join(simulated)}")
    label, first = runs[0]
    return [*lines, "", f"megatron-2bw show --measured, {label}:", "", *(f"    {line}" for line in report_of(first))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["both", "cost"], default="both")
    parser.add_argument("--stages", type=lambda text: [int(word) for word in text.split(",")], default=STAGES)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = bubbles() if options.part == "both" else []
    arms = TimedArm(recorded=True), TimedArm()
    found += cost_report("the recorder", lambda _: arms, depths=options.stages, pairs=options.pairs)
    put([*heading(), *found], options.output)


if __name__ == "__main__":
    main()
