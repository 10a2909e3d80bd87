"""Compares pipeline schedules side by side, on a real GPT and on stages that wait.

    python scripts/bench/schedules.py [--rounds 12] [--part gpt] [--output scripts/bench/results/schedules.txt]

Part one trains a GPT at PP=2 on this machine, one thread per rank. All jobs of a comparison are alive and take turns of
a few iterations, in the opposite order in the next round, because a machine drifts by more than the differences looked
for; a ratio is the median over the rounds. On GPUs they run one after another: what a stopped job's kernels wait for
would take the GPUs' time. Part two, in ``systems.py``, replaces computation by timed waits and
compares all systems of the two papers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from interval import median_interval
from kernels import flags_without_kernels
from live_job import ROOT, Job
from report import heading, put
from systems import report_timed

from megatron_2bw.schedule.action import Action, ActionType
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import steady_state

LOG_INTERVAL = 4
WARM = MEASURED = LOG_INTERVAL
"""Iterations of a turn."""
COMPUTED = (ActionType.FORWARD, ActionType.BACKWARD, ActionType.UPDATE)
GPT = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 128 "
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --lr 1e-4 --clip-grad 1.0 --num-workers 0 "
    "--eval-iters 0 --eval-interval 100000 --pipeline-model-parallel-size 2"
).split()
STAGES = 2
SAMPLES_PER_MICROBATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the same training."""

    label: str
    schedule: str
    flags: tuple[str, ...] = ()
    log_interval: int = LOG_INTERVAL
    extra_in_flight: int = 0

    def start(self, microbatches: int, iterations: int) -> Job:
        """A job that trains this way."""
        ours = ("--pipeline-extra-in-flight", str(self.extra_in_flight), "--pipeline-trace", "{trace}")
        arguments = [
            *GPT,
            *flags_without_kernels(),
            *("--global-batch-size", str(SAMPLES_PER_MICROBATCH * microbatches)),
            *("--train-iters", str(iterations), "--log-interval", str(self.log_interval)),
            *("--pipeline-schedule", self.schedule, *self.flags),
            *(() if self.schedule == "megatron" else ours),
        ]
        return Job(ROOT / "examples/pretrain_gpt.py", arguments, ranks=STAGES)


MEGATRON = Arm(label="megatron 1f1b", schedule="megatron")
TWO_BW = Arm(label="2bw", schedule="2bw")
AHEAD = Arm(label="2bw, one more in flight", schedule="2bw", extra_in_flight=1)
FLUSH = Arm(label="1f1b-flush", schedule="1f1b-flush")
CHATTY = Arm(label="2bw, log every iteration", schedule="2bw", log_interval=1)
INTERLEAVED = tuple(
    Arm(
        label=f"megatron interleaved, {chunks} chunks",
        schedule="megatron",
        flags=("--num-virtual-stages-per-pipeline-rank", str(chunks)),
    )
    for chunks in (2, 4)
)
COMPARED: dict[int, tuple[Arm, ...]] = {
    2: (MEGATRON, TWO_BW, FLUSH, *INTERLEAVED, AHEAD, CHATTY),
    4: (MEGATRON, TWO_BW, AHEAD),
    8: (MEGATRON, TWO_BW, AHEAD),
}
"""By number of microbatches; what is compared with each other takes turns next to each other as far as possible."""


@dataclass(slots=True)
class Measured:
    """What the turns of one arm showed; all times in seconds."""

    iteration_s: list[float] = field(default_factory=list)
    """Mean of each turn."""
    ran: dict[Action, float] = field(default_factory=dict)
    """Duration of every forward, backward and update; only of arms under 2bw."""

    def stage_s(self, type_: ActionType) -> tuple[float, ...]:
        """Median duration on each stage."""
        return tuple(
            statistics.median(s for action, s in self.ran.items() if (action.type, action.stage) == (type_, stage))
            for stage in range(STAGES)
        )


Results = dict[int, dict[str, Measured]]
"""By number of microbatches and label of the arm."""


def measure(microbatches: int, rounds: int) -> dict[str, Measured]:
    """Run all arms, in turn where that disturbs none; the first round, in which memory is allocated, does not count."""
    arms = COMPARED[microbatches]
    iterations = (rounds + 1) * (WARM + MEASURED) + LOG_INTERVAL
    results = {arm.label: Measured() for arm in arms}
    for group in [[arm] for arm in arms] if torch.cuda.is_available() else [arms]:
        with contextlib.ExitStack() as alive:
            jobs: dict[str, Job] = {}
            for arm in group:
                jobs[arm.label] = job = arm.start(microbatches, iterations)
                alive.callback(job.close)
                job.turn_s(WARM, MEASURED)
            for turn in range(rounds):
                for arm in group if turn % 2 == 0 else reversed(group):
                    results[arm.label].iteration_s.append(jobs[arm.label].turn_s(WARM, MEASURED))
                took = ", ".join(f"{label} {results[label].iteration_s[-1]:.3f}" for label in jobs)
                print(f"m={microbatches}, round {turn + 1}/{rounds}, s per iteration: {took}", flush=True)
            for arm in group:
                if arm.schedule == "2bw":
                    jobs[arm.label].finish()
                    results[arm.label].ran = _durations(json.loads(jobs[arm.label].trace.read_text()))
    return results


def _durations(trace: dict) -> dict[Action, float]:
    """Seconds that every forward, backward and update took, from a trace file."""
    return {
        Action.parse(event["name"]): event["dur"] / 1e6
        for event in trace["traceEvents"]
        if event["ph"] == "X" and re.match(r"\d+(F|B|UPDATE)", event["name"])
    }


def ratio(slow: Measured, fast: Measured) -> tuple[float, float, float]:
    """Median over the rounds of slow over fast, and its 95% interval."""
    return median_interval([a / b for a, b in zip(slow.iteration_s, fast.iteration_s, strict=True)])


def report_gpt(results: Results) -> list[str]:
    """Lines of part one."""
    title = "Real GPT: PP=2, 8 layers, hidden 256, sequence 128, microbatch 4, fp32, clipping on, one thread per rank"
    lines = ["", title, "", f"{'m':>2}  {'arm':<32} {'ms/iteration':>12} {'min':>8} {'max':>8}"]
    for microbatches, arms in results.items():
        for label, measured in arms.items():
            ms = [1000 * s for s in measured.iteration_s]
            lines.append(
                f"{microbatches:>2}  {label:<32} {statistics.median(ms):>12.1f} {min(ms):>8.1f} {max(ms):>8.1f}"
            )
    return [*lines, *_bounds(results), *(_other_ratios(results[2]) if 2 in results else [])]


def _bounds(results: Results) -> list[str]:
    lines = [
        "",
        "bound: simulated from the median F, B and update of each stage, transfers free",
        "own: simulated over measured time per batch of the 2bw run itself",
        "",
        f"{'2bw over 1f1b':<30} {'measured':>9} {'95% interval':>16} {'bound':>7} {'share':>6} {'own':>6}   "
        "F, B, update per stage (ms)",
    ]
    for microbatches, measured in results.items():
        ours = (arm for arm in COMPARED[microbatches] if arm.schedule == "2bw" and arm.log_interval == LOG_INTERVAL)
        lines += (_bound(arm, microbatches, measured[MEGATRON.label], measured[arm.label]) for arm in ours)
    return lines


def _bound(arm: Arm, microbatches: int, stock: Measured, ours: Measured) -> str:
    spent_s = {type_: ours.stage_s(type_) for type_ in COMPUTED}
    durations = Durations(
        forward_s=spent_s[ActionType.FORWARD],
        backward_s=spent_s[ActionType.BACKWARD],
        update_s=spent_s[ActionType.UPDATE],
    )
    flush = build("1f1b-flush", stages=STAGES, microbatches=microbatches)
    two_bw = build("2bw", stages=STAGES, microbatches=microbatches, extra_in_flight=arm.extra_in_flight)
    mine_s = steady_state(two_bw, durations).period_s
    bound = steady_state(flush, durations).period_s / mine_s
    speed, low, high = ratio(stock, ours)
    spent = " / ".join(", ".join(f"{1000 * s[stage]:.1f}" for s in spent_s.values()) for stage in range(STAGES))
    label = f"m={microbatches}, {arm.label}"
    return (
        f"{label:<30} {speed:>9.3f} {f'{low:.3f} to {high:.3f}':>16} {bound:>7.3f} {speed / bound:>6.3f} "
        f"{mine_s / statistics.median(ours.iteration_s):>6.3f}   {spent}"
    )


def _other_ratios(results: dict[str, Measured]) -> list[str]:
    ours = results[TWO_BW.label]
    stages = [f + b for f, b in zip(ours.stage_s(ActionType.FORWARD), ours.stage_s(ActionType.BACKWARD), strict=True)]
    best = min(INTERLEAVED, key=lambda arm: statistics.median(results[arm.label].iteration_s)).label
    rows = (
        (f"2bw over {best}", ratio(results[best], ours)),
        ("1f1b-flush over megatron 1f1b", ratio(results[MEGATRON.label], results[FLUSH.label])),
        ("2bw logging every iteration over every 4th", ratio(ours, results[CHATTY.label])),
    )
    return [
        "",
        "at m = 2:",
        *(f"{label:<50} {median:.3f}  ({low:.3f} to {high:.3f})" for label, (median, low, high) in rows),
        f"{'slower over faster stage, 2bw':<50} {max(stages) / min(stages):.3f}",
    ]


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=12, help="turns of every arm; at least 3")
    found.add_argument("--part", choices=["both", "gpt", "timed"], default="both")
    found.add_argument("--microbatches", type=int, nargs="+", choices=COMPARED, default=[*COMPARED], help="of part one")
    found.add_argument("--output", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    lines = heading("numpy")
    if options.part != "timed":
        results = {microbatches: measure(microbatches, options.rounds) for microbatches in options.microbatches}
        order = "runs one after another" if torch.cuda.is_available() else "takes turns"
        lines.append(f"medians of {options.rounds} rounds of {WARM + MEASURED} iterations; what is compared {order}")
        lines += report_gpt(results)
    if options.part != "gpt":
        lines += report_timed(max(1, options.rounds // 4))
    put(lines, options.output)


if __name__ == "__main__":
    main()
