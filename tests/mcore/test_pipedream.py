"""PipeDream's weight stashing against a single-process loop with a delay per stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .case import Case, Fault
from .compare import differing
from .features import BIASED, IN_BF16
from .harness import run
from .oracle import oracle
from .saved import BATCHES, DROPOUT, assert_continues, save

PIPEDREAM = Case(schedule="pipedream", tied=False, record_gradients=True)


@pytest.mark.parametrize(
    "case",
    [
        replace(PIPEDREAM, stages=2),
        replace(PIPEDREAM, stages=4),
        replace(PIPEDREAM, stages=4, batches=2),
        replace(PIPEDREAM, stages=2, replicas=2, distributed_optimizer=True, precision="bf16"),
        replace(PIPEDREAM, stages=2, replicas=2, precision="bf16", model=IN_BF16),
        replace(PIPEDREAM, stages=2, tensor_parallel=2, recompute="full", precision="bf16"),
        replace(PIPEDREAM, stages=4, optimizer="muon"),
        replace(PIPEDREAM, stages=2, optimizer="lion"),
        replace(PIPEDREAM, stages=2, optimizer="soap"),
        replace(PIPEDREAM, stages=4, model=BIASED),
        replace(PIPEDREAM, stages=2, replicas=2, optimizer="muon", distributed_optimizer=True, precision="bf16"),
        replace(PIPEDREAM, stages=2, replicas=2, precision="bf16", clip_attention=0.2),
    ],
    ids=[
        "d2",
        "d4",
        "d4-shorter-than-its-delay",
        "d2-w2-distributed-bf16",
        "d2-w2-gradients-in-bf16",
        "d2-t2-recompute-bf16",
        "muon",
        "lion",
        "soap",
        "biases of experts",
        "muon, distributed",
        "clipped attention",
    ],
)
def test_equal_to_the_last_bit(case: Case) -> None:
    found, expected = run(case), oracle(case)
    assert differing(found, expected, norms=False) == []
    assert found.rates == expected.rates


def test_delays_differ_from_each_other() -> None:
    """The comparison above would see a delay that is wrong by one on one stage."""
    case = replace(PIPEDREAM, layers=4, stages=2)
    assert differing(oracle(case), oracle(replace(case, stages=4)), norms=False)
    assert differing(oracle(case), oracle(replace(case, schedule="2bw"), delay=1), norms=False)


def test_many_batches_under_random_waits() -> None:
    jitter = tuple(Fault(kind="jitter", rank=rank, seconds=0.002) for rank in range(4))
    case = replace(PIPEDREAM, stages=4, batches=60, faults=jitter, record_gradients=False)
    assert differing(run(case), oracle(case), norms=False) == []


def test_evaluation_changes_no_training_number() -> None:
    case = replace(PIPEDREAM, stages=4, batches=18)
    evaluating = replace(case, flags=("--eval-interval", "5", "--eval-iters", "2"))
    found, expected = run(evaluating), oracle(case, evaluate_every=5)
    assert differing(found, expected, norms=False) == []
    assert found.validation_losses.equal(expected.validation_losses)


@pytest.mark.parametrize(
    ("format_", "case"),
    [
        ("torch_dist", replace(PIPEDREAM, stages=4)),
        ("torch", replace(PIPEDREAM, stages=2, replicas=2, distributed_optimizer=True, precision="bf16")),
    ],
    ids=["torch_dist-d4", "torch-d2-w2-distributed-bf16"],
)
def test_a_resumed_run_is_the_uninterrupted_one(format_: str, case: Case, tmp_path: Path) -> None:
    """After 1 batch, when the first stage has fewer versions than it will have, and after all are there."""
    case = replace(case, batches=BATCHES, model=DROPOUT, record_gradients=False)
    whole = save(case, tmp_path, format_)
    for iteration in (1, 6):
        assert_continues(whole.resumed(iteration), whole.results, iteration)


def test_a_checkpoint_opens_under_other_schedules_and_layouts(tmp_path: Path) -> None:
    """With the newest weights; the older versions are of no use there."""
    case = replace(PIPEDREAM, layers=4, stages=4, batches=BATCHES, record_gradients=False)
    whole = save(case, tmp_path, "torch_dist", 6)
    stock, *others = (
        whole.resumed(6, replace(whole.case, schedule=schedule, stages=stages)).losses[0, 0]
        for schedule, stages in ((None, 4), ("pipedream", 2), ("2bw", 2))
    )
    assert all(loss.equal(stock) for loss in others)
    assert not stock.equal(whole.results.losses[0, 6])
