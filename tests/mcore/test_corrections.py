"""Corrected updates of pipelined runs against the single-process oracle with the same correction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case
from .compare import differing
from .harness import run
from .matrix import compared
from .oracle import oracle

CASE = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=12, lead=2.0)
CASES = {
    "d2": CASE,
    "d4": replace(CASE, stages=4, microbatches=4),
    "bf16, distributed optimizer": replace(CASE, precision="bf16", replicas=2, distributed_optimizer=True),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    found, expected = run(CASES[name]), oracle(CASES[name], delay=1)
    assert differing(found, expected, norms=False) == []


def test_clipped_and_skipped_updates() -> None:
    """In fp16, where some updates are skipped; the oracle clips by the run's norms."""
    comparison = compared(replace(CASE, precision="fp16", clip=1.0, record_gradients=True))
    assert comparison.problems() == []


def test_it_changes_the_training() -> None:
    plain = replace(CASE, lead=0.0, model=("--adam-beta1", "0.95"))
    assert "losses" in differing(run(CASE), run(plain), norms=False)
