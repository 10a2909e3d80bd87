"""Compares pipeline schedules side by side, on a real GPT and on stages that wait.

    python scripts/bench/schedules.py [--repetitions 4] [--iterations 24] [--output scripts/bench/results/schedules.txt]

Part one trains a GPT at PP=2 on this machine, one thread per rank. What is compared runs one right
after the other, in the opposite order in the next repetition, because a machine drifts by more than
the differences looked for; a ratio is the median over the repetitions. Part two replaces computation
by timed waits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading
from timed_stage import Run, measure, steady_period_s

from megatron_2bw.schedule.action import Action, ActionType
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import Durations, simulate, steady_state

ROOT = Path(__file__).resolve().parents[2]
LOG_INTERVAL = 4
COMPUTED = (ActionType.FORWARD, ActionType.BACKWARD, ActionType.UPDATE)
GPT = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 128 "
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --lr 1e-4 --clip-grad 1.0 "
    "--eval-iters 0 --eval-interval 100000 --pipeline-model-parallel-size 2"
).split()
STAGES = 2
SAMPLES_PER_MICROBATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the same training."""

    label: str
    schedule: str
    microbatches: int = 2
    flags: tuple[str, ...] = ()
    log_interval: int = LOG_INTERVAL
    extra_in_flight: int = 0


TWO_BW = Arm(label="2bw", schedule="2bw")
AHEAD = Arm(label="2bw, one more in flight", schedule="2bw", extra_in_flight=1)
MEGATRON = Arm(label="megatron 1f1b", schedule="megatron")
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
MICROBATCHES = (2, 4, 8)
COMPARISONS: dict[str, tuple[Arm, ...]] = {
    **{f"m={m}": tuple(replace(arm, microbatches=m) for arm in (MEGATRON, TWO_BW, AHEAD)) for m in MICROBATCHES},
    "interleaved": (INTERLEAVED[0], TWO_BW, INTERLEAVED[1]),
    "flush": (MEGATRON, FLUSH),
    "log": (TWO_BW, CHATTY),
}
"""What runs side by side, at m = 2 unless the name says otherwise."""


@dataclass(slots=True)
class Measured:
    """What the runs of one arm showed; all times in seconds, one entry per repetition."""

    iteration_s: list[float] = field(default_factory=list)
    ran: list[dict[Action, float]] = field(default_factory=list)
    """Duration of every forward, backward and update, for our schedules."""
    stolen: list[float] = field(default_factory=list)
    """Share of the busy processor time that the machine's host gave to others."""

    def median_s(self) -> float:
        return statistics.median(self.iteration_s)

    def stage_s(self, type_: ActionType) -> tuple[float, ...]:
        """Duration on each stage: the median over a run, then over the repetitions."""
        return tuple(
            statistics.median(
                statistics.median(s for action, s in run.items() if (action.type, action.stage) == (type_, stage))
                for run in self.ran
            )
            for stage in range(STAGES)
        )


def run_arm(arm: Arm, iterations: int, result: Measured) -> None:
    """Train once; add the median iteration time and, for our schedules, the stages' durations."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(_free_port()), "-m", "megatron_2bw", str(ROOT / "examples/pretrain_gpt.py"), *GPT),
            *("--global-batch-size", str(SAMPLES_PER_MICROBATCH * arm.microbatches)),
            *("--train-iters", str(iterations), "--log-interval", str(arm.log_interval)),
            *("--pipeline-schedule", arm.schedule, "--pipeline-extra-in-flight", str(arm.extra_in_flight), *arm.flags),
            *(() if arm.schedule == "megatron" else ("--pipeline-trace", str(trace))),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        before = _busy_and_stolen()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        times_ms = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", done.stdout)]
        # The first iteration is logged by itself; the first full interval warms up.
        settled = times_ms[1 + LOG_INTERVAL // arm.log_interval :]
        result.iteration_s.append(statistics.median(settled) / 1000)
        busy, stolen = (after - start for after, start in zip(_busy_and_stolen(), before, strict=True))
        result.stolen.append(stolen / max(busy + stolen, 1))
        if trace.exists():
            result.ran.append(_durations(json.loads(trace.read_text())))


def _busy_and_stolen() -> tuple[int, int]:
    """Processor time so far, in ticks; zeros where the kernel does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    user, nice, system, _, _, irq, softirq, stolen, *_ = map(int, stat.read_text().split("\n")[0].split()[1:])
    return user + nice + system + irq + softirq, stolen


def _durations(trace: dict) -> dict[Action, float]:
    """Seconds that every forward, backward and update took, from a trace file."""
    return {
        Action.parse(event["name"]): event["dur"] / 1e6
        for event in trace["traceEvents"]
        if event["ph"] == "X" and re.match(r"\d+(F|B|UPDATE)", event["name"])
    }


def replayed_period_s(schedule: Schedule, ran: dict[Action, float]) -> float:
    """Simulated seconds per batch with every action as long as it was in a run, transfers and reductions free."""
    batches = 1 + max(action.batch for action in ran)
    taken = {action._replace(version=None): s for action, s in ran.items()}
    free = Durations(forward_s=0, backward_s=0)
    delays = {
        (rank, event.action): taken[event.action._replace(version=None)]
        for rank, events in enumerate(simulate(schedule, free, batches).events)
        for event in events
    }
    timeline = simulate(schedule, free, batches, delays=delays)
    ends_s = [
        max(e.end_s for e in timeline.events[0] if e.action.type is ActionType.BACKWARD and e.action.batch == batch)
        for batch in (LOG_INTERVAL, batches - 1)
    ]
    return (ends_s[1] - ends_s[0]) / (batches - 1 - LOG_INTERVAL)


Results = dict[str, dict[str, Measured]]
"""By comparison and label of the arm."""


def report_gpt(results: Results) -> list[str]:
    """Lines of part one."""
    title = "Real GPT: PP=2, 8 layers, hidden 256, sequence 128, microbatch 4, fp32, clipping on, one thread per rank"
    lines = ["", title, ""]
    lines.append(f"{'compared':<12} {'arm':<32} {'ms/iteration':>12} {'min':>8} {'max':>8} {'stolen':>7}")
    for comparison, arms in results.items():
        for label, measured in arms.items():
            times = [1000 * s for s in measured.iteration_s]
            lines.append(
                f"{comparison:<12} {label:<32} {statistics.median(times):>12.1f} {min(times):>8.1f} {max(times):>8.1f} "
                f"{statistics.median(measured.stolen):>7.1%}"
            )
    return [*lines, *_bounds(results), *_other_ratios(results)]


def _bounds(results: Results) -> list[str]:
    lines = [
        "",
        "bound: simulated from the median F, B and update of each stage, transfers free",
        "replayed: the same from every single F, B and update of the run, so with the waits that uneven ones cause",
        "own: simulated over measured time per batch of the 2bw run itself",
        "stolen: share of the busy processor time that the machine's host gave to others",
        "",
        f"{'2bw over 1f1b':<30} {'measured':>9} {'min':>6} {'max':>6} {'bound':>7} {'share':>6} {'own':>6} "
        f"{'replayed':>9} {'share':>6} {'own':>6}   F, B, update per stage (ms)",
    ]
    for m in MICROBATCHES:
        stock, *ours = COMPARISONS[f"m={m}"]
        lines += (_bound(arm, results[f"m={m}"][stock.label], results[f"m={m}"][arm.label]) for arm in ours)
    return lines


def _bound(arm: Arm, stock: Measured, ours: Measured) -> str:
    spent_s = {type_: ours.stage_s(type_) for type_ in COMPUTED}
    durations = Durations(
        forward_s=spent_s[ActionType.FORWARD],
        backward_s=spent_s[ActionType.BACKWARD],
        update_s=spent_s[ActionType.UPDATE],
    )
    flush = build("1f1b-flush", stages=STAGES, microbatches=arm.microbatches)
    two_bw = build("2bw", stages=STAGES, microbatches=arm.microbatches, extra_in_flight=arm.extra_in_flight)
    mine_s = steady_state(two_bw, durations).period_s
    bound = steady_state(flush, durations).period_s / mine_s
    replayed_s = [replayed_period_s(two_bw, ran) for ran in ours.ran]
    replayed = statistics.median(
        replayed_period_s(flush, ran) / own_s for ran, own_s in zip(ours.ran, replayed_s, strict=True)
    )
    own = statistics.median(a / b for a, b in zip(replayed_s, ours.iteration_s, strict=True))
    ratios = [a / b for a, b in zip(stock.iteration_s, ours.iteration_s, strict=True)]
    speed = statistics.median(ratios)
    spent = " / ".join(", ".join(f"{1000 * s[stage]:.1f}" for s in spent_s.values()) for stage in range(STAGES))
    label = f"m={arm.microbatches}, {arm.label}"
    return (
        f"{label:<30} {speed:>9.3f} {min(ratios):>6.3f} {max(ratios):>6.3f} {bound:>7.3f} {speed / bound:>6.3f} "
        f"{mine_s / ours.median_s():>6.3f} {replayed:>9.3f} {speed / replayed:>6.3f} {own:>6.3f}   {spent}"
    )


def _other_ratios(results: Results) -> list[str]:
    ours = results["m=2"]["2bw"]
    stages = [f + b for f, b in zip(ours.stage_s(ActionType.FORWARD), ours.stage_s(ActionType.BACKWARD), strict=True)]
    interleaved = results["interleaved"]
    best = min((arm.label for arm in INTERLEAVED), key=lambda label: interleaved[label].median_s())
    rows = (
        (f"2bw over {best}", _ratio(interleaved[best], interleaved["2bw"])),
        ("1f1b-flush over megatron 1f1b", _ratio(*results["flush"].values())),
        ("2bw logging every iteration over every 4th", _ratio(*results["log"].values())),
        ("slower over faster stage, 2bw", max(stages) / min(stages)),
    )
    return ["", "at m = 2:", *(f"{label:<50} {ratio:.3f}" for label, ratio in rows)]


def _ratio(slow: Measured, fast: Measured) -> float:
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
                        Run(
                            schedule=name,
                            stages=stages,
                            microbatches=stages,
                            batches=batches,
                            forward_s=forward_s,
                            backward_s=backward_s,
                        )
                    ),
                    stages,
                )
                for _ in range(repetitions)
            )
            lines.append(
                f"{name:<14} {stages:>2} {stages:>2} {ideal:>18.3f} {measured:>9.3f} {ideal / measured:>15.3f}"
            )
    return lines


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=24, help="per run; at least 9")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {name: {arm.label: Measured() for arm in arms} for name, arms in COMPARISONS.items()}
    for repetition in range(options.repetitions):
        for name, arms in COMPARISONS.items():
            for arm in arms if repetition % 2 == 0 else reversed(arms):
                measured = results[name][arm.label]
                run_arm(arm, options.iterations, measured)
                print(
                    f"{repetition + 1}/{options.repetitions} {name}, {arm.label}: {measured.iteration_s[-1]:.3f} s",
                    flush=True,
                )
    about = f"medians of {options.repetitions} repetitions; what is compared runs in turn, in alternating order"
    timed = report_timed(max(1, options.repetitions // 2))
    report = "\n".join([*heading("numpy"), about, *report_gpt(results), *timed, ""])
    print(report)
    if options.output is not None:
        options.output.write_text(report)


if __name__ == "__main__":
    main()
