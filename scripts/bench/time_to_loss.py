"""What gradients one step old cost in loss, and what corrections give back: the same model with each, tuned alike.

    python scripts/bench/time_to_loss.py train [--minutes 30] [--jobs 2]
    python scripts/bench/time_to_loss.py report [--output scripts/bench/results/time_to_loss.txt]

``train`` goes on where it was stopped; each finished trial is a line of the file ``--trials``. First every arm
tries its grid with one seed, then its three best with more of them: near the limit of stability, seeds differ
by more than arms do. An arm whose best is at the edge of its grid says so in the report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from delayed_gpt import Size, Trial, train
from report import heading

TRIALS = Path(__file__).parent / "results" / "time_to_loss.jsonl"
SIZES = {
    "0.36M": Size(layers=3, hidden=96, sequence=64, batch=16, steps=1000),
    "0.85M": Size(layers=4, hidden=128, sequence=128, batch=16, steps=1500),
}
SEEDS = (0, 1, 2)
FINALISTS = 3
RATES = tuple(2.5e-4 * 2**power for power in range(6))
T_95 = 4.30
"""Student's t for a two-sided 95% and three seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to train, and what is tried for it: as many learning rates and decays for each."""

    name: str
    delay: int
    lead: float
    decays: tuple[float, ...]
    """beta1."""

    def grid(self, size: Size) -> list[Trial]:
        """Of one seed."""
        return [
            Trial(size=size, delay=self.delay, lead=self.lead, beta1=beta1, lr=lr)
            for lr, beta1 in itertools.product(RATES, self.decays)
        ]


ARMS = (
    Arm(name="no delay", delay=0, lead=0.0, decays=(0.9, 0.95)),
    Arm(name="delay, as it is", delay=1, lead=0.0, decays=(0.8, 0.9)),
    Arm(name="delay, lead of 2 steps", delay=1, lead=2.0, decays=(0.9, 0.93)),
)


class Trials:
    """What has been tried, in a file.

    Args:
        path: one JSON object per line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._losses = {_key(row["trial"]): row["losses"] for row in map(json.loads, lines)}

    def add(self, trial: Trial, losses: list[float]) -> None:
        """Keep a finished trial."""
        self._losses[_key(asdict(trial))] = losses
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"trial": asdict(trial), "losses": losses}) + "\n")

    def loss(self, trial: Trial) -> float | None:
        """At the end: infinite for a run that diverged, None for one that has not been tried."""
        losses = self._losses.get(_key(asdict(trial)))
        if losses is None:
            return None
        return losses[-1] if len(losses) == 5 else math.inf

    def missing(self) -> Iterator[Trial]:
        """In the order in which they are to be tried, as far as it is known now."""
        for size in SIZES.values():
            in_turn = itertools.chain(*itertools.zip_longest(*(arm.grid(size) for arm in ARMS)))
            yield from (trial for trial in in_turn if trial is not None and self.loss(trial) is None)
            for arm, seed in itertools.product(ARMS, SEEDS):
                with_seed = (replace(trial, seed=seed) for trial in self.finalists(arm, size))
                yield from (trial for trial in with_seed if self.loss(trial) is None)

    def finalists(self, arm: Arm, size: Size) -> list[Trial]:
        """Of the arm's grid, the best with the first seed; none while some of it is missing."""
        found = {trial: self.loss(trial) for trial in arm.grid(size)}
        return [] if None in found.values() else sorted(found, key=lambda trial: found[trial])[:FINALISTS]

    def losses(self, trial: Trial) -> list[float]:
        """Of all seeds that have been tried."""
        losses = (self.loss(replace(trial, seed=seed)) for seed in SEEDS)
        return [loss for loss in losses if loss is not None]

    def best(self, arm: Arm, size: Size) -> Trial | None:
        """The finalist with the lowest mean over all seeds; None while none has been tried with all of them."""
        complete = [trial for trial in self.finalists(arm, size) if len(self.losses(trial)) == len(SEEDS)]
        return min(complete, key=lambda trial: statistics.mean(self.losses(trial)), default=None)


def _key(trial: dict[str, Any]) -> str:
    return json.dumps(trial, sort_keys=True)


def train_for(trials: Trials, minutes: float, jobs: int) -> None:
    """Train what is missing until nothing is, or the time is up; what is running then is finished."""
    end_s = time.monotonic() + 60 * minutes
    running: dict[Trial, Any] = {}
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while True:
            if time.monotonic() < end_s:
                for trial in itertools.islice((t for t in trials.missing() if t not in running), jobs - len(running)):
                    running[trial] = pool.apply_async(train, (trial,))
            if not running:
                return
            time.sleep(0.5)
            for trial in [trial for trial, result in running.items() if result.ready()]:
                losses = running.pop(trial).get()
                trials.add(trial, losses)
                print(f"{_settings(trial)}: {' '.join(f'{loss:.3f}' for loss in losses)}", flush=True)


def report(trials: Trials) -> list[str]:
    """A table per size."""
    lines = heading()
    for name, size in SIZES.items():
        if all(trials.loss(trial) is None for arm in ARMS for trial in arm.grid(size)):
            continue
        tokens = size.steps * size.batch * size.sequence
        lines += [
            "",
            f"{name} parameters, {size.layers} layers of {size.hidden}, {size.steps} batches of {size.batch} x "
            f"{size.sequence} bytes ({tokens / 1e6:.1f}M), AdamW, clipping at 1",
            f"{'':<24} {'grid':>6} {'finalists':>9} {'best':<28} {'loss':>6} {'95%':>6}  of each seed",
        ]
        lines += [_line(trials, arm, size) for arm in ARMS]
        lines += ["", *_by_rate(trials, size)]
    return lines


def _line(trials: Trials, arm: Arm, size: Size) -> str:
    best, grid = trials.best(arm, size), arm.grid(size)
    done = sum(trials.loss(trial) is not None for trial in grid)
    finalists = sum(len(trials.losses(trial)) == len(SEEDS) for trial in trials.finalists(arm, size))
    counts = f"{arm.name:<24} {f'{done}/{len(grid)}':>6} {f'{finalists}/{FINALISTS}':>9}"
    if best is None:
        return counts
    losses = trials.losses(best)
    mean, half = statistics.mean(losses), T_95 * statistics.stdev(losses) / math.sqrt(len(losses))
    edge = " (edge)" if best.lr in (RATES[0], RATES[-1]) else ""
    settings = f"lr {best.lr:g}, beta1 {best.beta1:g}{edge}"
    return f"{counts} {settings:<28} {mean:>6.3f} {half:>6.3f}  {' '.join(f'{loss:.3f}' for loss in losses)}"


def _by_rate(trials: Trials, size: Size) -> list[str]:
    """The best over decays for every learning rate."""
    lines = [f"{'lr':<24}" + "".join(f"{lr:>8g}" for lr in RATES)]
    for arm in ARMS:
        losses = [[trials.loss(t) for t in arm.grid(size) if t.lr == lr] for lr in RATES]
        cells = [min((loss for loss in of_rate if loss is not None), default=None) for of_rate in losses]
        lines.append(f"{arm.name:<24}" + "".join(f"{'' if cell is None else f'{cell:.3f}':>8}" for cell in cells))
    return lines


def _settings(trial: Trial) -> str:
    return f"delay {trial.delay}, lead {trial.lead:g}, beta1 {trial.beta1:g}, lr {trial.lr:g}, seed {trial.seed}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "report"])
    parser.add_argument("--trials", type=Path, default=TRIALS)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    trials = Trials(options.trials)
    if options.command == "train":
        train_for(trials, options.minutes, options.jobs)
        return
    text = "\n".join([*report(trials), ""])
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
