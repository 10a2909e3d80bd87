"""The ways to train that time_to_loss.py compares, and what has been tried of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from delayed_training import Result, Trial
from kept import Kept
from language_models import BERT, CPP, GPT, Size

SIZES = {
    "0.36M": Size(layers=3, hidden=96, sequence=64, batch=16, steps=1000),
    "0.12M": Size(layers=2, hidden=64, sequence=64, batch=16, steps=1000, corpus=CPP),
    "0.12M BERT": Size(layers=2, hidden=64, sequence=64, batch=16, steps=1000, kind=BERT),
}
FINALISTS, CHOOSING = 3, (0, 1, 2)
"""So many of what an arm has tried with the first seed get these seeds, which choose the best of them."""
SEEDS = (3, 4, 5, 6, 7, 8)
"""Of the best: nothing has been chosen by them."""
WARMUPS = (10, 25, 50, 200, 400)
"""Of the learning rate, in batches, around the 100 of the grid."""
CUTS = (0.9, 0.8, 0.7)
"""Shares of the batches."""


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
    delayed: float = 1.0
    """Share of a batch."""
    is_last: bool = False
    """Whether it waits until the other arms are done."""
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
                delayed=None if self.delayed == 1 else round(self.delayed * size.batch),
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


def _by_muon(name: str, delay: int, first: float, beta1: float = 0.9, **rest: Any) -> Arm:
    return Arm(
        name=f"Muon, {name}",
        baseline="Muon, no delay",
        delay=delay,
        rates=tuple(first * 2**power for power in range(4)),
        decays=DECAYS,
        muon_beta1=beta1,
        **rest,
    )


DECAYS = (0.7, 0.8, 0.9, 0.95)
"""Of Muon's momentum."""
LEAD: dict[str, Any] = {"beta1": 0.93, "nesterov": False, "correction": "lead", "lead": 2.0}
ARMS = (
    _by_adamw("no delay", 0, 5e-4, (0.9, 0.95)),
    _by_adamw("delay, as it is", 1, 2.5e-4, (0.8, 0.9)),
    _by_adamw("delay, lead 2", 1, 2.5e-4, (0.9, 0.93), correction="lead", lead=2.0),
    _by_adamw("delay, update-lead 2", 1, 5e-4, (0.93, 0.95), correction="update-lead", lead=2.0),
    _by_adamw("delay of half, lead 2", 1, 5e-4, (0.9, 0.93), correction="lead", lead=2.0, delayed=0.5),
    _by_muon("no delay", 0, 8e-3),
    _by_muon("delay, as it is", 1, 4e-3),
    _by_muon("delay, lead 2", 1, 4e-3, **LEAD),
    _by_muon("delay, update-lead 1", 1, 4e-3, correction="update-lead", lead=1.0),
    _by_muon("delay, lead 2, after 20%", 1, 4e-3, **LEAD, synchronous=0.2),
    _by_muon("delay of half, as it is", 1, 4e-3, delayed=0.5, is_last=True),
    _by_muon("delay of half, lead 2", 1, 4e-3, **LEAD, delayed=0.5),
)
"""Muon beside AdamW for vectors and the embedding; with Nesterov momentum, but where a lead takes its place. After 20%:
the first fifth of the batches without a delay. Of half: the other half of every batch has the newest weights."""


class Trials:
    """What has been tried, in a file.

    Args:
        path: one JSON object per line.
    """

    def __init__(self, path: Path) -> None:
        self._kept = Kept(path)
        self._results = dict(map(_read, self._kept.rows()))

    def add(self, trial: Trial, result: Result) -> None:
        """Keep a finished trial."""
        self._results[trial] = result
        self._kept.add({"trial": asdict(trial), **asdict(result)})

    def loss(self, trial: Trial) -> float | None:
        """At the end: infinite for a run that diverged, None for one that has not been tried."""
        result = self._results.get(trial)
        if result is None:
            return None
        return result.losses[-1] if len(result.losses) == 5 else math.inf

    def accuracies(self, trial: Trial | None) -> list[float]:
        """After fine-tuning, of the seeds of `losses`; none where there is no such task, or some are missing."""
        results = [] if trial is None else [self._results.get(replace(trial, seed=seed)) for seed in SEEDS]
        found = [result.accuracy for result in results if result is not None and result.accuracy is not None]
        return found if len(found) == len(SEEDS) else []

    def missing(self) -> Iterator[Trial]:
        """In the order in which they are to be tried, as far as it is known now."""
        baselines = [arm for arm in reversed(ARMS) if arm.name == arm.baseline]  # Muon's before AdamW's.
        sizes = sorted(SIZES.values(), key=lambda size: size.hidden)
        for kind, is_last, baseline, size in itertools.product((GPT, BERT), (False, True), baselines, sizes):
            if size.kind != kind:
                continue
            arms = [arm for arm in ARMS if (arm.baseline, arm.is_last) == (baseline.name, is_last)]
            yield from self._missing_of(arms, size)
            if not is_last:
                yield from self._untried(self.cuts(baseline, size), SEEDS)

    def _missing_of(self, arms: list[Arm], size: Size) -> Iterator[Trial]:
        in_turn = itertools.chain(*itertools.zip_longest(*(arm.grid(size) for arm in arms)))
        yield from (trial for trial in in_turn if trial is not None and self.loss(trial) is None)
        for arm in arms:
            yield from (trial for trial in self.warmups(arm, size) if self.loss(trial) is None)
        for arm, seed in itertools.product(arms, CHOOSING):
            yield from self._untried(self.finalists(arm, size), [seed])
        for arm in arms:
            best = self.best(arm, size)
            yield from self._untried([best] if best is not None else [], SEEDS)

    def _untried(self, trials: list[Trial], seeds: Sequence[int]) -> Iterator[Trial]:
        with_seeds = (replace(trial, seed=seed) for trial in trials for seed in seeds)
        return (trial for trial in with_seeds if self.loss(trial) is None)

    def cuts(self, arm: Arm, size: Size) -> list[Trial]:
        """Its best with fewer batches, and as much less warm-up; none before that is known."""
        best = self.best(arm, size)
        if best is None:
            return []
        return [
            replace(best, size=replace(size, steps=round(share * size.steps)), warmup=round(share * best.warmup))
            for share in CUTS
        ]

    def warmups(self, arm: Arm, size: Size) -> list[Trial]:
        """The best of the grid with other warm-ups; none while some of the grid has not been tried."""
        losses = {trial: self.loss(trial) for trial in arm.grid(size)}
        if None in losses.values():
            return []
        best = min(losses, key=lambda trial: losses[trial])
        return [replace(best, warmup=warmup) for warmup in WARMUPS]

    def tried(self, arm: Arm, size: Size) -> list[Trial]:
        """What the first seed is for, as far as it is known."""
        return [*arm.grid(size), *self.warmups(arm, size)]

    def finalists(self, arm: Arm, size: Size) -> list[Trial]:
        """The best with the first seed; none while something has not been tried."""
        found = {trial: self.loss(trial) for trial in self.tried(arm, size)}
        return [] if None in found.values() else sorted(found, key=lambda trial: found[trial])[:FINALISTS]

    def chose(self, trial: Trial) -> list[float]:
        """Losses of the seeds that choose, as far as they have been tried."""
        losses = (self.loss(replace(trial, seed=seed)) for seed in CHOOSING)
        return [loss for loss in losses if loss is not None]

    def losses(self, trial: Trial | None) -> list[float]:
        """Of the other seeds; none while some have not been tried."""
        losses = [] if trial is None else [self.loss(replace(trial, seed=seed)) for seed in SEEDS]
        return [] if None in losses else losses

    def best(self, arm: Arm, size: Size) -> Trial | None:
        """The finalist with the lowest mean over the seeds that choose; None while some have not been tried."""
        finalists = self.finalists(arm, size)
        if any(len(self.chose(trial)) < len(CHOOSING) for trial in finalists):
            return None
        return min(finalists, key=lambda trial: statistics.mean(self.chose(trial)), default=None)


def _read(row: dict[str, Any]) -> tuple[Trial, Result]:
    trial = Trial(**{**row["trial"], "size": Size(**row["trial"]["size"])})
    return trial, Result(losses=row["losses"], accuracy=row.get("accuracy"))
