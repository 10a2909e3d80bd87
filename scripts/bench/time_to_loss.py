"""What gradients one step old cost in loss, and what corrections give back: the same model with each, tuned alike.

    python scripts/bench/time_to_loss.py train [--minutes 30] [--jobs 2]
    python scripts/bench/time_to_loss.py report [--output scripts/bench/results/time_to_loss.txt] [--plot FILE.svg]

``train`` goes on where it was stopped; each finished trial is a line of the file ``--trials``. For one optimizer
after the other, every arm tries its grid with one seed, the best of it with other warm-ups, then its three best with
two more seeds, for near the limit of stability seeds differ by more than arms do, and the best of those with six or 24
others, by which nothing has been chosen. Grids are as large for each, and where its best learning rate is inside; an
arm for which something is at the edge says so in the report. Last, what trains without delay is cut to fewer batches:
what ends with the loss of 90% of them needs 1/0.9 as many. What is recommended is trained for 5% more batches, too.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from delayed_training import Trial, train
from loss_report import report
from loss_trials import SIZES, Trials
from report import heading, put

TRIALS = Path(__file__).parent / "results" / "time_to_loss.jsonl"


def train_for(trials: Trials, sizes: Sequence[str], minutes: float, jobs: int) -> None:
    """Train what is missing until nothing is, or the time is up; what is running then is finished."""
    end_s = time.monotonic() + 60 * minutes
    running: dict[Trial, Any] = {}
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while True:
            if time.monotonic() < end_s:
                for trial in itertools.islice(
                    (t for t in trials.missing(sizes) if t not in running), jobs - len(running)
                ):
                    running[trial] = pool.apply_async(train, (trial,))
            if not running:
                return
            time.sleep(0.5)
            for trial in [trial for trial, result in running.items() if result.ready()]:
                found = running.pop(trial).get()
                trials.add(trial, found)
                print(f"{_settings(trial)}: {' '.join(f'{loss:.3f}' for loss in found.losses)}", flush=True)


def _settings(trial: Trial) -> str:
    by = "AdamW" if trial.momentum is None else f"Muon {trial.momentum:g}"
    corrected = "" if trial.delayed is None else f" of {trial.delayed} sequences"
    corrected += "" if trial.correction == "none" else f", {trial.correction} {trial.lead:g}"
    if trial.synchronous:
        corrected += f" after {trial.synchronous} steps"
    model = f"{trial.size.kind} on {trial.size.corpus}, {trial.size.steps} steps"
    training = f"beta1 {trial.beta1:g}, lr {trial.lr:g}, warm-up {trial.warmup}"
    return f"{model}, {by}, delay {trial.delay}{corrected}, {training}, seed {trial.seed}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "report"])
    parser.add_argument("--trials", type=Path, default=TRIALS)
    here = [name for name, size in SIZES.items() if size.device == "cpu" or torch.cuda.is_available()]
    parser.add_argument("--sizes", nargs="+", choices=here, default=here, help="to train, in this order; 128M on a GPU")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture; needs scripts/bench/requirements.txt")
    options = parser.parse_args(argv)
    trials = Trials(options.trials)
    if options.command == "train":
        train_for(trials, options.sizes, options.minutes, options.jobs)
        return
    put([*heading(), *report(trials)], options.output)
    if options.plot is not None:
        from loss_plot import plot

        plot(trials, options.plot)


if __name__ == "__main__":
    main()
