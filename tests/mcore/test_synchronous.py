"""The first batches without a delay: ``--synchronous-warmup-iters``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from . import custom_loop
from .case import Case, Fault
from .compare import differing
from .faults import INFINITE_GRADIENT
from .harness import collect, merge, run
from .matrix import compared
from .oracle import oracle
from .test_resume import DROPOUT, assert_continues, save

CASE = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=12, synchronous=5)
CASES = {
    "d2": CASE,
    "PP4, more in flight": replace(CASE, stages=4, microbatches=6, flags=("--pipeline-extra-in-flight", "1")),
    "bf16, distributed optimizer, lead": replace(
        CASE, precision="bf16", replicas=2, distributed_optimizer=True, lead=2.0
    ),
    "one buffer, update-lead": replace(
        CASE, correction="update-lead", lead=2.0, precision="bf16", flags=("--pipeline-gradient-buffers", "1")
    ),
    "muon, lead": replace(CASE, optimizer="muon", lead=1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    found, expected = run(CASES[name]), oracle(CASES[name], delay=1)
    assert differing(found, expected, norms=False) == []
    assert found.rates == expected.rates


def test_clipped_and_skipped_updates() -> None:
    """Without a delay, right before it begins, and after."""
    overflows = tuple(Fault(kind=INFINITE_GRADIENT, rank=0, call=2 * batch) for batch in (1, 4, 5, 8))
    case = replace(CASE, precision="fp16", clip=1.0, tied=True, record_gradients=True, faults=overflows)
    assert compared(case).problems() == []
    assert run(case).norms.isnan().nonzero().flatten().tolist() == [1, 4, 5, 8]


def test_it_changes_the_training() -> None:
    assert "losses" in differing(run(CASE), run(replace(CASE, synchronous=0)), norms=False)


@pytest.mark.parametrize(("format_", "interval"), [("torch_dist", 5), ("torch", 3)])
def test_a_resumed_run_is_the_uninterrupted_one(format_: str, interval: int, tmp_path: Path) -> None:
    """From before the delay begins, and from where it does, where one version is all there is."""
    case = replace(CASE, precision="fp16", lead=2.0, model=DROPOUT)
    whole = save(case, tmp_path, format_, interval)
    for iteration in range(interval, 7, interval):
        assert_continues(whole.resumed(iteration), whole.results, iteration)


def test_a_training_loop_of_ones_own() -> None:
    found = merge(collect(custom_loop.main, CASE, CASE.ranks), CASE.stages, CASE.microbatches)
    assert differing(found, run(CASE), norms=False) == []
