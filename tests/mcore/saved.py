"""Runs with checkpoints, and the same runs continued from one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .case import Case
from .compare import differing
from .harness import Results, run

BATCHES = 12
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
CASE = Case(schedule="2bw", stages=2, microbatches=2, batches=BATCHES, clip=1.0, model=DROPOUT)
DETERMINED = Case(schedule="2bw", layers=4, stages=2, microbatches=4, batches=BATCHES, tied=False)
"""Without dropout, whose numbers depend on the layout: equal to the oracle to the last bit."""
ASYNCHRONOUS = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
FORMATS = ["torch", "torch_dist"]
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Saved:
    """A finished run and its checkpoints."""

    case: Case
    folder: Path
    format: str
    results: Results

    def resumed(self, iteration: int, case: Case | None = None) -> Results:
        """``case``, by default that of the run, continued from ``iteration`` as if the run had stopped there."""
        (self.folder / TRACKER).write_text(str(iteration))
        return resume(case or self.case, self.folder, self.format)


def resume(case: Case, folder: Path, format_: str) -> Results:
    """``case``, continued from what the tracker file in ``folder`` names."""
    # Not from the cache: equal cases differ in what that file says.
    return run.__wrapped__(replace(case, flags=(*case.flags, "--load", str(folder), "--ckpt-format", format_)))


def saving(case: Case, folder: Path, format_: str, interval: int = 1, *flags: str) -> Case:
    where = ("--save", str(folder), "--save-interval", str(interval), "--ckpt-format", format_)
    return replace(case, flags=(*case.flags, *where, *flags))


def save(case: Case, folder: Path, format_: str, interval: int = 1) -> Saved:
    return Saved(case, folder, format_, run(saving(case, folder, format_, interval)))


def rest(whole: Results, batches: int, rows: int | None = None) -> Results:
    """What a run computed after its first ``batches``, which have so many ``rows`` of losses, or one each."""
    rows = batches if rows is None else rows
    updates = int((~whole.norms[:batches].isnan()).sum())  # Those that were skipped have no rates.
    return replace(
        whole,
        losses=whole.losses[:, rows:],
        seeds=whole.seeds[:, rows:],
        norms=whole.norms[batches:],
        norms_apart=whole.norms_apart[batches:],
        rates=whole.rates[updates:],
    )


def assert_continues(found: Results, whole: Results, iteration: int) -> None:
    """To the last bit: losses, norms, learning rates and weights."""
    expected = rest(whole, iteration)
    assert differing(found, expected) == []
    assert found.rates == expected.rates
