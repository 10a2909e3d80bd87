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
from language_models import BERT, CPP, GPT, PYTHON, Size

LARGER = Size(layers=3, hidden=96, sequence=64, batch=16, steps=1000)
SMALLER = Size(layers=2, hidden=64, sequence=64, batch=16, steps=1000, corpus=CPP)
IN_64 = replace(SMALLER, batch=64, steps=250)
SIZES = {
    "0.36M": LARGER,
    "0.12M": SMALLER,
    "0.12M in batches of 64": IN_64,
    "0.12M BERT": replace(SMALLER, corpus=PYTHON, kind=BERT, steps=4000),
    "128M": Size(layers=18, hidden=768, sequence=1024, batch=32, steps=1000, device="cuda"),
}
"""In 1,000 batches, BERT learns little more than how often each byte comes."""
FINALISTS, CHOOSING = 3, (0, 1, 2)
"""So many of what an arm has tried with the first seed get these seeds, which choose the best of them."""
SEEDS, MORE_SEEDS = tuple(range(3, 9)), tuple(range(3, 27))
"""Of the best: nothing has been chosen by them."""
WARMUP, WARMUPS, LONG_WARMUPS = 0.1, (0.001, 0.01, 0.025, 0.05, 0.2, 0.4, 0.6), (0.8, 0.95)
"""Of the learning rate, as shares of the batches: of the grid, around it, and where BERT's best lie, beyond that. The
first is none at all; the last is as good as the whole run, in which a cosine takes the rate down before the middle."""
RATES_AROUND = (0.5, 2.0)
"""Of BERT's best, whose warm-up is not that of the grid."""
CUTS, LONGER = (0.9, 0.8, 0.7), (1.05,)
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
    decays_in_64: tuple[float, ...] | None = None
    """The same with batches of 64, if they have to be others: then there are fewer to average over."""
    decays_of_bert: tuple[float, ...] | None = None
    """Fewer: its trials are long."""
    shares: tuple[float, ...] = ()
    """Of the batches, for which the best is trained, too."""
    sizes: tuple[Size, ...] = (LARGER, SMALLER)
    """That it is tried on."""
    loud: tuple[Size, ...] = ()
    """Those on which its best gets more seeds, with all batches and with more."""
    muon_beta1: float | None = None
    """Beside Muon, beta1 of AdamW for what Muon leaves to it; None for AdamW alone."""
    nesterov: bool = True
    correction: str = "none"
    lead: float = 0.0
    delayed: float = 1.0
    """Share of a batch."""
    synchronous: float = 0.0
    """Share of the steps without a delay, before it begins."""

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it."""
        return self.name == self.baseline

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
                warmup=batches_of(WARMUP, size),
            )
            for lr, decay in itertools.product(self.rates_on(size), self.decays_on(size))
        ]

    def rates_on(self, size: Size) -> list[float]:
        """Larger for larger batches, as their root (Malladi et al., arXiv 2205.10287)."""
        return [rate * math.sqrt(size.batch / SMALLER.batch) for rate in self.rates]

    def decays_on(self, size: Size) -> tuple[float, ...]:
        """As many for each size."""
        others = self.decays_in_64 if size == IN_64 else self.decays_of_bert if size.kind == BERT else None
        return self.decays if others is None else others

    def seeds(self, size: Size) -> tuple[int, ...]:
        """Of its best."""
        return MORE_SEEDS if size in self.loud else SEEDS


def warmups_on(size: Size) -> tuple[float, ...]:
    """As many for every arm."""
    return (*WARMUPS, *LONG_WARMUPS) if size.kind == BERT else WARMUPS


def batches_of(share: float, size: Size) -> int:
    """At least one."""
    return max(1, round(share * size.steps))


def decay_of(trial: Trial) -> float:
    """Of the first moment."""
    return trial.beta1 if trial.momentum is None else trial.momentum


def _by_adamw(name: str, delay: int, first: float, decays: tuple[float, float, float], **rest: Any) -> Arm:
    rates = tuple(first * 2**power for power in range(6))
    return Arm(name=f"AdamW, {name}", baseline="AdamW, no delay", delay=delay, rates=rates, decays=decays, **rest)


def _by_muon(
    name: str, delay: int, first: float, decays: tuple[float, ...] = (0.7, 0.8, 0.9, 0.95), **rest: Any
) -> Arm:
    rates = tuple(first * 2**power for power in range(4))
    settings = {"muon_beta1": 0.9, **rest}
    return Arm(name=f"Muon, {name}", baseline="Muon, no delay", delay=delay, rates=rates, decays=decays, **settings)


LEAD: dict[str, Any] = {"correction": "lead", "lead": 2.0}
MUON_LEAD: dict[str, Any] = {**LEAD, "muon_beta1": 0.93, "nesterov": False}
HALF: dict[str, Any] = {"delayed": 0.5, "shares": LONGER}
EIGHTH: dict[str, Any] = {"delayed": 0.125, "shares": LONGER, "sizes": (IN_64,)}
EVERYWHERE: dict[str, Any] = {"sizes": tuple(SIZES.values())}
EVERY_GPT: dict[str, Any] = {"sizes": tuple(size for size in SIZES.values() if size.kind == GPT)}
ARMS = (
    _by_adamw("no delay", 0, 5e-4, (0.8, 0.9, 0.95), decays_of_bert=(0.9, 0.95), shares=CUTS, **EVERYWHERE),
    _by_adamw("no delay, lead 2", 0, 5e-4, (0.9, 0.93, 0.95), sizes=(SMALLER,), **LEAD),
    _by_adamw("delay, as it is", 1, 2.5e-4, (0.7, 0.8, 0.9), decays_of_bert=(0.8, 0.9), **EVERYWHERE),
    _by_adamw("delay, lead 2", 1, 5e-4, (0.9, 0.93, 0.95), **LEAD),
    _by_adamw("delay, update-lead 2", 1, 5e-4, (0.93, 0.95, 0.97), correction="update-lead", lead=2.0),
    _by_adamw(
        "delay of half, lead 2", 1, 5e-4, (0.9, 0.93, 0.95), decays_of_bert=(0.9, 0.93), **LEAD, **HALF, **EVERYWHERE
    ),
    _by_adamw("delay of an eighth, lead 2", 1, 5e-4, (0.9, 0.93, 0.95), **LEAD, **EIGHTH),
    _by_muon(
        "no delay", 0, 8e-3, decays_in_64=(0.5, 0.6, 0.7, 0.8), shares=CUTS, loud=(LARGER, SMALLER, IN_64), **EVERY_GPT
    ),
    _by_muon("delay, as it is", 1, 4e-3, (0.6, 0.7, 0.8, 0.9), **EVERY_GPT),
    _by_muon("delay, lead 2", 1, 4e-3, **MUON_LEAD),
    _by_muon("delay, update-lead 1", 1, 4e-3, correction="update-lead", lead=1.0),
    _by_muon("delay, lead 2, after 20%", 1, 8e-3, **MUON_LEAD, synchronous=0.2),
    _by_muon("delay of half, as it is", 1, 8e-3, delayed=0.5, sizes=(SMALLER,)),
    _by_muon("delay of half, lead 2", 1, 4e-3, **MUON_LEAD, **HALF, loud=(LARGER, SMALLER), **EVERY_GPT),
    _by_muon("delay of an eighth, as it is", 1, 8e-3, (0.6, 0.7, 0.8, 0.9), **EIGHTH, loud=(IN_64,)),
    _by_muon("delay of an eighth, lead 2", 1, 8e-3, **MUON_LEAD, **EIGHTH),
)
"""Muon beside AdamW for vectors and the embedding; with Nesterov momentum, but where a lead takes its place. After 20%:
the first fifth of the batches without a delay. Of half: the other half of every batch has the newest weights. An eighth
of 64 is as many sequences as half of 16: what the stages hold then has not grown with the batch."""


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
        return result.losses[-1] if len(result.losses) == 5 and math.isfinite(result.losses[-1]) else math.inf

    def accuracies(self, trial: Trial | None) -> list[float]:
        """After fine-tuning, of SEEDS; none where there is no such task, or some are missing."""
        results = [] if trial is None else [self._results.get(replace(trial, seed=seed)) for seed in SEEDS]
        found = [result.accuracy for result in results if result is not None and result.accuracy is not None]
        return found if len(found) == len(SEEDS) else []

    def missing(self, names: Sequence[str]) -> Iterator[Trial]:
        """Of the sizes of these names, in the order in which they are to be tried, as far as it is known now."""
        baselines = [arm for arm in reversed(ARMS) if arm.is_baseline]  # Muon's before AdamW's.
        for name, baseline in itertools.product(names, baselines):
            arms = [arm for arm in ARMS if arm.baseline == baseline.name and SIZES[name] in arm.sizes]
            yield from self._missing_of(arms, SIZES[name])

    def _missing_of(self, arms: list[Arm], size: Size) -> Iterator[Trial]:
        in_turn = itertools.chain(*itertools.zip_longest(*(arm.grid(size) for arm in arms)))
        yield from (trial for trial in in_turn if trial is not None and self.loss(trial) is None)
        for more, arm in itertools.product((self.warmups, self.around), arms):
            yield from (trial for trial in more(arm, size) if self.loss(trial) is None)
        for arm, seed in itertools.product(arms, CHOOSING):
            yield from self._untried(self.finalists(arm, size), [seed])
        for arm in arms:
            best = self.best(arm, size)
            yield from self._untried([best] if best is not None else [], arm.seeds(size))
        for arm in arms:
            # What is cut only says what the others' losses are worth.
            yield from self._untried(self.resized(arm, size), SEEDS if arm.is_baseline else arm.seeds(size))

    def _untried(self, trials: list[Trial], seeds: Sequence[int]) -> Iterator[Trial]:
        with_seeds = (replace(trial, seed=seed) for trial in trials for seed in seeds)
        return (trial for trial in with_seeds if self.loss(trial) is None)

    def resized(self, arm: Arm, size: Size) -> list[Trial]:
        """Its best for its shares of the batches, and the same shares of the warm-up; none before that is known."""
        best = self.best(arm, size)
        if best is None:
            return []
        return [
            replace(best, size=replace(size, steps=round(share * size.steps)), warmup=round(share * best.warmup))
            for share in arm.shares
        ]

    def warmups(self, arm: Arm, size: Size) -> list[Trial]:
        """The best of the grid with other warm-ups; none while some of the grid has not been tried."""
        best = self._sorted(arm.grid(size))[:1]
        return [replace(one, warmup=batches_of(share, size)) for one in best for share in warmups_on(size)]

    def around(self, arm: Arm, size: Size) -> list[Trial]:
        """The best of those with other learning rates, of BERT; none while some of those have not been tried."""
        before = self.warmups(arm, size)
        best = self._sorted([*arm.grid(size), *before])[:1] if before and size.kind == BERT else []
        return [replace(one, lr=times * one.lr) for one in best for times in RATES_AROUND]

    def tried(self, arm: Arm, size: Size) -> list[Trial]:
        """What the first seed is for, as far as it is known."""
        return [*arm.grid(size), *self.warmups(arm, size), *self.around(arm, size)]

    def planned(self, arm: Arm, size: Size) -> int:
        """How many trials that will be."""
        return len(arm.grid(size)) + len(warmups_on(size)) + (len(RATES_AROUND) if size.kind == BERT else 0)

    def finalists(self, arm: Arm, size: Size) -> list[Trial]:
        """The best with the first seed; none while something has not been tried."""
        tried = self.tried(arm, size)
        return self._sorted(tried)[:FINALISTS] if len(tried) == self.planned(arm, size) else []

    def _sorted(self, trials: list[Trial]) -> list[Trial]:
        """The lowest loss first; none while some have not been tried."""
        found = {trial: self.loss(trial) for trial in trials}
        return [] if None in found.values() else sorted(found, key=lambda trial: found[trial])

    def is_at_edge(self, arm: Arm, best: Trial) -> bool:
        """Whether a better one may be outside of what was tried: of rates with its warm-up, if there are several."""
        tried = self.tried(arm, best.size)
        rates = {trial.lr for trial in tried if trial.warmup == best.warmup}
        rates = rates if len(rates) > 1 else {trial.lr for trial in tried}
        decays, longest = arm.decays_on(best.size), warmups_on(best.size)[-1]
        is_longest = longest not in LONG_WARMUPS and best.warmup == batches_of(longest, best.size)
        return is_longest or best.lr in (min(rates), max(rates)) or decay_of(best) in (decays[0], decays[-1])

    def chose(self, trial: Trial) -> list[float]:
        """Losses of the seeds that choose, as far as they have been tried."""
        losses = (self.loss(replace(trial, seed=seed)) for seed in CHOOSING)
        return [loss for loss in losses if loss is not None]

    def losses(self, trial: Trial | None) -> list[float]:
        """Of MORE_SEEDS, or else of SEEDS, with which those begin; none while some have not been tried."""
        for seeds in (MORE_SEEDS, SEEDS) if trial is not None else ():
            losses = [self.loss(replace(trial, seed=seed)) for seed in seeds]
            if None not in losses:
                return losses
        return []

    def best(self, arm: Arm, size: Size) -> Trial | None:
        """The finalist with the lowest mean over the seeds that choose; None while some have not been tried."""
        finalists = self.finalists(arm, size)
        if any(len(self.chose(trial)) < len(CHOOSING) for trial in finalists):
            return None
        return min(finalists, key=lambda trial: statistics.mean(self.chose(trial)), default=None)


def _read(row: dict[str, Any]) -> tuple[Trial, Result]:
    trial = Trial(**{**row["trial"], "size": Size(**row["trial"]["size"])})
    return trial, Result(losses=row["losses"], accuracy=row.get("accuracy"))
