"""What gradients one step old cost in loss, and what corrections give back: the same model with each, tuned alike.

    python scripts/bench/time_to_loss.py train [--minutes 30] [--jobs 2]
    python scripts/bench/time_to_loss.py report [--output scripts/bench/results/time_to_loss.txt]

``train`` goes on where it was stopped; each finished trial is a line of the file ``--trials``. For one optimizer
after the other, every arm tries its grid with one seed, the best of it with other warm-ups, then its three best with
two more seeds, for near the limit of stability seeds differ by more than arms do, then the best of those with another
three. Grids are as large for each, and where its best is inside; an arm for which it is not says so in the report.
Last, what trains without delay is cut to fewer batches: what ends with the loss of 90% of them needs 1/0.9 as many.
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
from delayed_gpt import CPP, Size, Trial, train
from report import heading

TRIALS = Path(__file__).parent / "results" / "time_to_loss.jsonl"
SIZES = {
    "0.36M": Size(layers=3, hidden=96, sequence=64, batch=16, steps=1000),
    "0.12M": Size(layers=2, hidden=64, sequence=64, batch=16, steps=1000, corpus=CPP),
}
SEEDS = (0, 1, 2, 3, 4, 5)
FINALISTS, FINALIST_SEEDS = 3, 3
"""So many of an arm's grid get so many seeds; the best of them gets all."""
WARMUPS = (50, 200, 400)
"""Of the learning rate, in batches, around the 100 of the grid."""
CUTS = (0.9, 0.8, 0.7)
"""Shares of the batches."""
STAGES, CHUNKS, RATIOS = 8, 4, (1, 2, 4, 8)
"""Of the pipelines whose times to a loss are compared: d, chunks of the interleaved schedule, and m/d."""
T_95 = {3: 4.303, 6: 2.571}
"""Student's t for a two-sided 95%, by seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to train, and what is tried for it: as many combinations for each."""

    name: str
    baseline: str
    """The arm without delay that it is compared with."""
    delay: int
    rates: tuple[float, ...]
    decays: tuple[float, ...]
    """Of the first moment: beta1 of AdamW, momentum of Muon."""
    muon_beta1: float | None = None
    """Beside Muon, beta1 of AdamW for what Muon leaves to it; None for AdamW alone."""
    nesterov: bool = True
    correction: str = "none"
    lead: float = 0.0
    synchronous: float = 0.0
    """Share of the steps without a delay, before it begins."""

    def grid(self, size: Size) -> list[Trial]:
        """Of one seed and one warm-up."""
        return [
            Trial(
                size=size,
                delay=self.delay,
                lr=lr,
                beta1=decay if self.muon_beta1 is None else self.muon_beta1,
                momentum=None if self.muon_beta1 is None else decay,
                nesterov=self.nesterov,
                correction=self.correction,
                lead=self.lead,
                synchronous=round(self.synchronous * size.steps),
            )
            for lr, decay in itertools.product(self.rates, self.decays)
        ]

    def is_at_edge(self, trial: Trial) -> bool:
        """Whether the best may be outside of what was tried."""
        decay = trial.beta1 if trial.momentum is None else trial.momentum
        outer = (self.decays[0], self.decays[-1]) if len(self.decays) > 2 else ()
        return (
            trial.lr in (self.rates[0], self.rates[-1]) or decay in outer or trial.warmup in (WARMUPS[0], WARMUPS[-1])
        )


def _by_adamw(name: str, delay: int, first: float, decays: tuple[float, float], **correction: Any) -> Arm:
    rates = tuple(first * 2**power for power in range(6))
    return Arm(name=f"AdamW, {name}", baseline="AdamW, no delay", delay=delay, rates=rates, decays=decays, **correction)


def _by_muon(name: str, delay: int, first: float, decays: tuple[float, ...], beta1: float = 0.9, **rest: Any) -> Arm:
    return Arm(
        name=f"Muon, {name}",
        baseline="Muon, no delay",
        delay=delay,
        rates=tuple(first * 2**power for power in range(4)),
        decays=decays,
        muon_beta1=beta1,
        **rest,
    )


SHORTER, LONGER = (0.7, 0.8, 0.9), (0.8, 0.9, 0.95)
"""Memory of Muon's momentum: its decays."""
LEAD: dict[str, Any] = {"beta1": 0.93, "nesterov": False, "correction": "lead", "lead": 2.0}
ARMS = (
    _by_adamw("no delay", 0, 5e-4, (0.9, 0.95)),
    _by_adamw("delay, as it is", 1, 2.5e-4, (0.8, 0.9)),
    _by_adamw("delay, lead 2", 1, 2.5e-4, (0.9, 0.93), correction="lead", lead=2.0),
    _by_adamw("delay, update-lead 2", 1, 2.5e-4, (0.93, 0.95), correction="update-lead", lead=2.0),
    _by_muon("no delay", 0, 8e-3, SHORTER),
    _by_muon("delay, as it is", 1, 4e-3, LONGER),
    _by_muon("delay, lead 2", 1, 4e-3, LONGER, **LEAD),
    _by_muon("delay, update-lead 1", 1, 4e-3, SHORTER, correction="update-lead", lead=1.0),
    _by_muon("delay, lead 2, after 20%", 1, 4e-3, LONGER, **LEAD, synchronous=0.2),
)
"""Muon beside AdamW for vectors and the embedding; with Nesterov momentum, but where a lead takes its place. After 20%:
the first fifth of the batches without a delay."""


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
        baselines = [arm for arm in reversed(ARMS) if arm.name == arm.baseline]  # Muon's before AdamW's.
        for baseline, size in itertools.product(baselines, SIZES.values()):
            arms = [arm for arm in ARMS if arm.baseline == baseline.name]
            in_turn = itertools.chain(*itertools.zip_longest(*(arm.grid(size) for arm in arms)))
            yield from (trial for trial in in_turn if trial is not None and self.loss(trial) is None)
            for arm in arms:
                yield from (trial for trial in self.warmups(arm, size) if self.loss(trial) is None)
            for arm, seed in itertools.product(arms, SEEDS):
                seeded = self.finalists(arm, size) if seed < FINALIST_SEEDS else [self.best(arm, size)]
                with_seed = (replace(trial, seed=seed) for trial in seeded if trial is not None)
                yield from (trial for trial in with_seed if self.loss(trial) is None)
            for trial, seed in itertools.product(self.cuts(baseline, size), SEEDS):
                if self.loss(replace(trial, seed=seed)) is None:
                    yield replace(trial, seed=seed)

    def cuts(self, arm: Arm, size: Size) -> list[Trial]:
        """Its best, with fewer batches; none before that is known."""
        best = self.best(arm, size)
        if best is None:
            return []
        return [replace(best, size=replace(size, steps=round(share * size.steps))) for share in CUTS]

    def warmups(self, arm: Arm, size: Size) -> list[Trial]:
        """The best of the grid with other warm-ups; none while some of the grid has not been tried."""
        losses = {trial: self.loss(trial) for trial in arm.grid(size)}
        if None in losses.values():
            return []
        best = min(losses, key=lambda trial: losses[trial])
        return [replace(best, warmup=warmup) for warmup in WARMUPS]

    def finalists(self, arm: Arm, size: Size) -> list[Trial]:
        """The best with the first seed; none while something has not been tried."""
        found = {trial: self.loss(trial) for trial in [*arm.grid(size), *self.warmups(arm, size)]}
        return [] if None in found.values() else sorted(found, key=lambda trial: found[trial])[:FINALISTS]

    def losses(self, trial: Trial) -> list[float]:
        """Of all seeds, if all have been tried, or else of those of a finalist, as far as they have been."""
        losses = [self.loss(replace(trial, seed=seed)) for seed in SEEDS]
        return [loss for loss in losses[:FINALIST_SEEDS] if loss is not None] if None in losses else losses

    def best(self, arm: Arm, size: Size) -> Trial | None:
        """The finalist with the lowest mean over the seeds of finalists; None while some have not been tried."""
        finalists = self.finalists(arm, size)
        if any(len(self.losses(trial)) < FINALIST_SEEDS for trial in finalists):
            return None
        return min(finalists, key=lambda trial: statistics.mean(self.losses(trial)[:FINALIST_SEEDS]), default=None)


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
            f"{size.sequence} bytes ({tokens / 1e6:.1f}M) of {size.corpus}, clipping at 1",
            f"{'':<27} {'grid':>6} {'finalists':>9} {'best':<26} {'loss':>6} {'95%':>6} {'gap':>6} {'95%':>6} "
            f"{'closed':>6} {'worth':>6}  of each seed",
        ]
        lines += [_line(trials, arm, size) for arm in ARMS]
        lines += [
            _cut(trials, trial, size)
            for arm in ARMS
            if arm.name == arm.baseline
            for trial in trials.cuts(arm, size)
            if len(trials.losses(trial)) == len(SEEDS)
        ]
        lines += ["", *_by_rate(trials, size), "", *_by_depth(trials, size)]
    lines += [
        "",
        "gap: loss minus that of the same optimizer without delay, seed by seed; closed: share of the gap of the delay",
        "as it is; worth: share of the batches after which training without delay has that loss. best: learning",
        "rate, decay of the first moment, and warm-up if it is not 100 batches; (edge): at the edge of what was tried.",
        "95%: Student's interval of the seeds; the first has chosen the finalists, and the first three the best of",
        "them, so that their losses are a little low, in all arms alike. Validation loss in nats per byte. time to",
        "loss: batches until the loss of training without a delay, each as long as the schedule's bubble makes it in",
        "theory, over the time that the stages work without one; what a schedule really takes is in schedules.txt.",
    ]
    return lines


def _line(trials: Trials, arm: Arm, size: Size) -> str:
    best, tried = trials.best(arm, size), [*arm.grid(size), *trials.warmups(arm, size)]
    done = sum(trials.loss(trial) is not None for trial in tried)
    finalists = sum(len(trials.losses(trial)) >= FINALIST_SEEDS for trial in trials.finalists(arm, size))
    counts = f"{arm.name:<27} {f'{done}/{len(arm.grid(size)) + len(WARMUPS)}':>6} {f'{finalists}/{FINALISTS}':>9}"
    if best is None:
        return counts
    losses = trials.losses(best)
    edge = " (edge)" if arm.is_at_edge(best) else ""
    decay = best.beta1 if best.momentum is None else best.momentum
    warmup = f", {best.warmup}" if best.warmup in WARMUPS else ""
    settings = f"lr {best.lr:g}, decay {decay:g}{warmup}{edge}"
    seeds = " ".join(f"{loss:.3f}" for loss in losses)
    gap = _gap(trials, arm, size, losses)
    worth = "" if arm.name == arm.baseline else _worth_text(_worth(trials, arm, size, losses))
    return f"{counts} {settings:<26} {_interval(losses)} {gap} {worth:>6}  {seeds}"


def _worth(trials: Trials, arm: Arm, size: Size, losses: list[float]) -> float | None:
    """Share of the batches after which training without a delay has the same loss: between the cuts, on a line.

    At most 1, and 0 below the last cut; None while there are no cuts.
    """
    (baseline,) = (other for other in ARMS if other.name == arm.baseline)
    best, loss = trials.best(baseline, size), statistics.mean(losses)
    cuts = [cut for cut in trials.cuts(baseline, size) if len(trials.losses(cut)) == len(SEEDS)]
    if best is None or not cuts:
        return None
    known = [(cut.size.steps / size.steps, statistics.mean(trials.losses(cut))) for cut in (best, *cuts)]
    if loss <= known[0][1]:
        return 1.0
    for (more, lower), (fewer, higher) in itertools.pairwise(known):
        if lower < loss <= higher:
            return more - (more - fewer) * (loss - lower) / (higher - lower)
    return 0.0


def _worth_text(worth: float | None) -> str:
    if worth is None:
        return ""
    return ">=100%" if worth == 1 else f"{worth:.0%}" if worth else f"<{CUTS[-1]:.0%}"


def _cut(trials: Trials, trial: Trial, size: Size) -> str:
    name = f"{'AdamW' if trial.momentum is None else 'Muon'}, {trial.size.steps / size.steps:.0%} of the batches"
    losses = trials.losses(trial)
    return f"{name:<71} {_interval(losses)} {'':>27}  {' '.join(f'{loss:.3f}' for loss in losses)}"


def _interval(values: list[float]) -> str:
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):>6.3f} {half:>6.3f}"


def _gap(trials: Trials, arm: Arm, size: Size, losses: list[float]) -> str:
    """To the baseline, and how much of the plain delay's it leaves."""
    by_name = {other.name: trials.best(other, size) for other in ARMS if other.baseline == arm.baseline}
    without = by_name[arm.baseline]
    plain = next((best for name, best in by_name.items() if name.endswith("as it is")), None)
    if without is None or arm.name == arm.baseline:
        return f"{'':>20}"
    gaps = [loss - other for loss, other in zip(losses, trials.losses(without), strict=False)]
    if plain is None or arm.correction == "none":
        return f"{_interval(gaps)} {'':>6}"
    whole = statistics.mean(trials.losses(plain)) - statistics.mean(trials.losses(without))
    return f"{_interval(gaps)} {1 - statistics.mean(gaps) / whole:>6.0%}"


def _by_rate(trials: Trials, size: Size) -> list[str]:
    """The best over decays for every learning rate, first seed."""
    rates = sorted({lr for arm in ARMS for lr in arm.rates})
    lines = [f"{'lr':<27}" + "".join(f"{lr:>8g}" for lr in rates)]
    for arm in ARMS:
        losses = [[trials.loss(t) for t in arm.grid(size) if t.lr == lr] for lr in rates]
        cells = [min((loss for loss in of_rate if loss is not None), default=None) for of_rate in losses]
        lines.append(f"{arm.name:<27}" + "".join(f"{'' if cell is None else f'{cell:.3f}':>8}" for cell in cells))
    return lines


def _by_depth(trials: Trials, size: Size) -> list[str]:
    """Time to the loss of training without a delay, where its pipeline idles (d-1)/m longer than it works."""
    bubbles = [(STAGES - 1) / (STAGES * ratio) for ratio in RATIOS]
    rows = {
        "1F1B": [1 + bubble for bubble in bubbles],
        f"interleaved, {CHUNKS} chunks": [1 + bubble / CHUNKS for bubble in bubbles],
    }
    for arm in (arm for arm in ARMS if arm.delay):
        best = trials.best(arm, size)
        worth = _worth(trials, arm, size, trials.losses(best)) if best is not None else None
        if worth:
            rows[f"2bw, {arm.name}"] = [(1 + arm.synchronous * bubble) / worth for bubble in bubbles]
    lines = [f"{f'time to loss, d = {STAGES}, m/d':<33}" + "".join(f"{ratio:>7}" for ratio in RATIOS)]
    for name, times in rows.items():
        lines.append(f"{name:<33}" + "".join(f"{time:>7.2f}" for time in times))
    return lines


def _settings(trial: Trial) -> str:
    by = "AdamW" if trial.momentum is None else f"Muon {trial.momentum:g}"
    corrected = "" if trial.correction == "none" else f", {trial.correction} {trial.lead:g}"
    if trial.synchronous:
        corrected += f" after {trial.synchronous} steps"
    return f"{by}, delay {trial.delay}{corrected}, beta1 {trial.beta1:g}, lr {trial.lr:g}, seed {trial.seed}"


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
