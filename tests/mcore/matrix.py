"""Every combination of precision, layout, recomputation and tying, each to be held against its oracle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .case import Case
from .compare import FLOOR, differing, norm_deviation
from .harness import run
from .oracle import cached, oracle

PRECISIONS = ("fp32", "bf16", "fp16")
RECOMPUTE = ("no", "selective", "full")
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "PP2": {"stages": 2, "microbatches": 4},
    "PP4": {"stages": 4, "microbatches": 4},
    "PP2xTP2": {"stages": 2, "microbatches": 4, "tensor_parallel": 2},
    "PP2xDP2": {"stages": 2, "microbatches": 2, "replicas": 2},
    "PP2xDP2 distributed optimizer": {"stages": 2, "microbatches": 2, "replicas": 2, "distributed_optimizer": True},
}


class Cell(NamedTuple):
    """One place in the matrix."""

    layout: str
    precision: str
    recompute: str
    tied: bool

    def __str__(self) -> str:
        return ", ".join(
            [self.layout, self.precision, f"{self.recompute} recompute", "tied" if self.tied else "untied"]
        )

    def case(self) -> Case:
        """Twelve batches, of which clipping changes about half."""
        return Case(
            schedule="2bw",
            layers=4,
            batches=12,
            clip=1.0,
            precision=self.precision,
            recompute=self.recompute,
            tied=self.tied,
            record_gradients=True,
            **LAYOUTS[self.layout],
        )


ALL = tuple(itertools.starmap(Cell, itertools.product(LAYOUTS, PRECISIONS, RECOMPUTE, (True, False))))
COVERING = tuple(
    Cell(layout, precision, RECOMPUTE[(i + j) % 3], tied=(i + j) % 2 == 0)
    for i, layout in enumerate(LAYOUTS)
    for j, precision in enumerate(PRECISIONS)
)
"""Every layout in every precision; every other value several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside its oracle, which clips by the run's norms."""

    different: list[str]
    """What is not equal to the last bit: losses, gradients of every update, final weights."""
    norms: float
    """Largest relative difference of a batch's norm from what the oracle computes itself."""
    same_rates: bool
    """Learning rates and weight decays."""
    clipped: float
    """Share of updates that clipping changed."""

    def problems(self) -> list[str]:
        """Everything that keeps the two from being the same; norms may differ by rounding."""
        return [
            *(f"{name} differ" for name in self.different),
            *([f"norms differ by {self.norms:.1e}"] if not self.norms <= FLOOR else []),
            *([] if self.same_rates else ["learning rates differ"]),
        ]


def compared(case: Case, *, delay: int = 1) -> Comparison:
    """Run ``case`` and its oracle."""
    found = run(case)
    expected = oracle(case, delay=delay, clipped_as=found)
    return Comparison(
        different=differing(found, expected, norms=False),
        norms=norm_deviation(found, expected),
        same_rates=found.rates == expected.rates,
        clipped=(expected.norms > case.clip).double().mean().item() if case.clip else 0.0,
    )


def forget() -> None:
    """Drop the results of all runs and oracles so far, which are kept to be shared."""
    run.cache_clear()
    cached.cache_clear()
