"""Evaluation between batches: on the newest weights, and without a trace in the training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .case import EVALUATION_ITERATIONS, Case
from .compare import differing
from .harness import run
from .oracle import oracle

EVERY = 5
EVALUATING = ("--eval-interval", str(EVERY), "--eval-iters", str(EVALUATION_ITERATIONS))

cases = pytest.mark.parametrize(
    "case",
    [Case(schedule="2bw", stages=d, microbatches=m, tied=False, batches=18) for d, m in [(2, 2), (4, 3)]],
    ids=["d2-m2", "d4-m3"],
)


@cases
def test_evaluation_uses_the_newest_weights(case: Case) -> None:
    """W(t+1) after batch t; Megatron's own schedule computes it, with our forwards still in flight."""
    found = run(replace(case, flags=EVALUATING)).validation_losses
    expected = oracle(case, delay=1, evaluate_every=EVERY).validation_losses
    assert found.numel() > 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize("every", [1, EVERY])
@cases
def test_evaluation_changes_no_number_of_the_training(case: Case, every: int) -> None:
    case = replace(case, tied=True, clip=1.0)
    evaluating = ("--eval-interval", str(every), "--eval-iters", str(EVALUATION_ITERATIONS))
    assert differing(run(replace(case, flags=evaluating)), run(case)) == []
