"""Compares pipeline schedules side by side, on a real GPT and on stages that wait.

    python scripts/bench/schedules.py [--repetitions 5] [--iterations 24] [--output scripts/bench/results/schedules.txt]

Part one trains a GPT at PP=2 on this machine, one thread per rank. Every repetition runs every arm
once, in turn, so that all arms see the same drift of the machine; figures are medians over the
repetitions of each run's median iteration time. Part two replaces computation by timed waits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from timed_stage import measure, steady_period_s

from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import Durations, steady_state

ROOT = Path(__file__).resolve().parents[2]
LOG_INTERVAL = 4
GPT = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 128 "
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --lr 1e-4 --clip-grad 1.0 "
    "--eval-iters 0 --eval-interval 100000 --pipeline-model-parallel-size 2"
).split()
SAMPLES_PER_MICROBATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the same training."""

    label: str
    schedule: str
    microbatches: int
    flags: tuple[str, ...] = ()
    log_interval: int = LOG_INTERVAL


ARMS = (
    *(
        Arm(label=f"{label}, m={m}", schedule=schedule, microbatches=m)
        for m in (2, 4, 8)
        for label, schedule in (("megatron 1f1b", "megatron"), ("2bw", "2bw"))
    ),
    *(
        Arm(
            label=f"megatron interleaved, {chunks} chunks, m=2",
            schedule="megatron",
            microbatches=2,
            flags=("--num-virtual-stages-per-pipeline-rank", str(chunks)),
        )
        for chunks in (2, 4)
    ),
    Arm(label="1f1b-flush, m=2", schedule="1f1b-flush", microbatches=2),
    Arm(label="2bw, m=2, log every iteration", schedule="2bw", microbatches=2, log_interval=1),
)


@dataclass(slots=True)
class Measured:
    """What the runs of one arm showed; all times in seconds, one entry per repetition."""

    iteration_s: list[float] = field(default_factory=list)
    stages: list[list[dict[str, float]]] = field(default_factory=list)
    """Per stage: median duration of F, B and UPDATE."""

    def median_s(self) -> float:
        return statistics.median(self.iteration_s)

    def stage_s(self, kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(stage[kind] for stage in run) for run in zip(*self.stages, strict=True))


def run_arm(arm: Arm, iterations: int, result: Measured) -> None:
    """Train once; add the median iteration time and, for our schedules, the stages' durations."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(_free_port()), "-m", "megatron_2bw", str(ROOT / "examples/pretrain_gpt.py"), *GPT),
            *("--global-batch-size", str(SAMPLES_PER_MICROBATCH * arm.microbatches)),
            *("--train-iters", str(iterations), "--log-interval", str(arm.log_interval)),
            *("--pipeline-schedule", arm.schedule, *arm.flags),
            *(() if arm.schedule == "megatron" else ("--pipeline-trace", str(trace))),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        times_ms = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", done.stdout)]
        # The first iteration is logged by itself; the first full interval warms up.
        settled = times_ms[1 + LOG_INTERVAL // arm.log_interval :]
        result.iteration_s.append(statistics.median(settled) / 1000)
        if trace.exists():
            result.stages.append(_stage_durations(json.loads(trace.read_text())))


def _stage_durations(trace: dict) -> list[dict[str, float]]:
    stages = [{"F": [], "B": [], "UPDATE": []} for _ in range(trace["otherData"]["stages"])]
    for event in trace["traceEvents"]:
        match = re.match(r"(\d+)(F|B|UPDATE)", event["name"]) if event["ph"] == "X" else None
        if match:
            stages[int(match[1])][match[2]].append(event["dur"] / 1e6)
    return [{kind: statistics.median(values) if values else 0.0 for kind, values in stage.items()} for stage in stages]


def period_s(name: str, microbatches: int, durations: Durations) -> float:
    """Simulated seconds per batch in the steady state, transfers and reductions free."""
    return steady_state(build(name, stages=2, microbatches=microbatches), durations).period_s


def report_gpt(results: dict[str, Measured]) -> list[str]:
    """Lines of part one."""
    title = "Real GPT: PP=2, 8 layers, hidden 256, sequence 128, microbatch 4, fp32, clipping on, one thread per rank"
    lines = ["", title, ""]
    lines.append(f"{'arm':<40} {'ms/iteration':>12} {'min':>8} {'max':>8}")
    for label, result in results.items():
        times = [1000 * s for s in result.iteration_s]
        lines.append(f"{label:<40} {statistics.median(times):>12.1f} {min(times):>8.1f} {max(times):>8.1f}")
    lines.append("")
    head = f"{'2bw over 1f1b':<14} {'measured':>9} {'bound':>7} {'share':>7} {'simulated/measured 2bw time':>28}"
    lines.append(f"{head}   F, B, update per stage (ms)")
    for m in (2, 4, 8):
        ours, stock = results[f"2bw, m={m}"], results[f"megatron 1f1b, m={m}"]
        durations = Durations(
            forward_s=ours.stage_s("F"), backward_s=ours.stage_s("B"), update_s=ours.stage_s("UPDATE")
        )
        bound = period_s("1f1b-flush", m, durations) / period_s("2bw", m, durations)
        speed = _paired_ratio(stock, ours)
        spent = " / ".join(
            ", ".join(f"{1000 * ours.stage_s(kind)[stage]:.1f}" for kind in ("F", "B", "UPDATE")) for stage in (0, 1)
        )
        own = period_s("2bw", m, durations) / ours.median_s()
        lines.append(f"{f'm={m}':<14} {speed:>9.3f} {bound:>7.3f} {speed / bound:>7.3f} {own:>28.3f}   {spent}")
    return [*lines, *_other_ratios(results)]


def _other_ratios(results: dict[str, Measured]) -> list[str]:
    ours, stock = results["2bw, m=2"], results["megatron 1f1b, m=2"]
    stages = [f + b for f, b in zip(ours.stage_s("F"), ours.stage_s("B"), strict=True)]
    interleaved = {label: result for label, result in results.items() if "interleaved" in label}
    best = min(interleaved, key=lambda label: interleaved[label].median_s())
    rows = (
        (f"2bw over {best}", _paired_ratio(interleaved[best], ours)),
        ("1f1b-flush over megatron 1f1b, m=2", _paired_ratio(stock, results["1f1b-flush, m=2"])),
        ("2bw logging every iteration over every 4th", _paired_ratio(ours, results["2bw, m=2, log every iteration"])),
        ("slower over faster stage, 2bw, m=2", max(stages) / min(stages)),
    )
    return ["", *(f"{label:<50} {ratio:.3f}" for label, ratio in rows)]


def _paired_ratio(slow: Measured, fast: Measured) -> float:
    return statistics.median(a / b for a, b in zip(slow.iteration_s, fast.iteration_s, strict=True))


def report_timed(repetitions: int) -> list[str]:
    """Part two: run and report stages that wait."""
    forward_s, backward_s, batches = 0.05, 0.1, 16
    title = f"Timed stages: F = {forward_s} s, B = {backward_s} s, {batches} batches, transfers and reductions real"
    lines = ["", title, ""]
    lines.append(f"{'schedule':<14} {'d':>2} {'m':>2} {'simulated s/batch':>18} {'measured':>9} {'share of speed':>15}")
    for stages in (4, 8):
        for name in ("2bw", "1f1b-flush"):
            durations = Durations(forward_s=forward_s, backward_s=backward_s)
            ideal = steady_state(build(name, stages=stages, microbatches=stages), durations).period_s
            measured = statistics.median(
                steady_period_s(
                    measure(
                        name,
                        stages=stages,
                        microbatches=stages,
                        batches=batches,
                        forward_s=forward_s,
                        backward_s=backward_s,
                    ),
                    stages,
                )
                for _ in range(repetitions)
            )
            lines.append(
                f"{name:<14} {stages:>2} {stages:>2} {ideal:>18.3f} {measured:>9.3f} {ideal / measured:>15.3f}"
            )
    return lines


def header(options: argparse.Namespace) -> list[str]:
    """Date, command, machine and versions."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "numpy"))
    return [
        f"{datetime.date.today().isoformat()}  python scripts/bench/schedules.py "
        f"--repetitions {options.repetitions} --iterations {options.iterations}",
        f"Python {platform.python_version()}, {packages}; {os.cpu_count()} cores, {platform.machine()}, no GPU",
        f"medians of {options.repetitions} interleaved repetitions; ratios are medians of ratios within a repetition",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=24, help="per run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {arm.label: Measured() for arm in ARMS}
    for repetition in range(options.repetitions):
        for arm in ARMS:
            run_arm(arm, options.iterations, results[arm.label])
            iteration_s = results[arm.label].iteration_s[-1]
            print(f"{repetition + 1}/{options.repetitions} {arm.label}: {iteration_s:.3f} s", flush=True)
    report = "\n".join([*header(options), *report_gpt(results), *report_timed(max(1, options.repetitions // 2)), ""])
    print(report)
    if options.output is not None:
        options.output.write_text(report)


if __name__ == "__main__":
    main()
