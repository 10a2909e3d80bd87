"""BERT: two heads, token types and padding that every stage masks out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case
from .compare import differing
from .harness import run
from .matrix import compared
from .oracle import oracle

CASES = [Case(kind="bert", schedule="2bw", stages=d, microbatches=d, batches=20) for d in (2, 4)]
depths = pytest.mark.parametrize("case", CASES, ids=[f"d{case.stages}" for case in CASES])


@depths
def test_equal_to_the_last_bit_untied_without_clipping(case: Case) -> None:
    assert compared(replace(case, tied=False)).problems() == []


@depths
def test_equal_to_the_last_bit_tied_and_clipped_by_an_exact_norm(case: Case) -> None:
    threshold = oracle(case, delay=1).norms.median().item()
    comparison = compared(replace(case, clip=threshold, record_gradients=True))
    assert comparison.problems() == []
    assert 0.25 <= comparison.clipped <= 0.75


@depths
def test_a_flush_is_equal_to_megatrons_own_schedule(case: Case) -> None:
    case = replace(case, schedule="1f1b-flush", clip=1.0)
    assert differing(run(case), run(replace(case, schedule=None))) == []
