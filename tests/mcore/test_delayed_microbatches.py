"""Some microbatches of a batch with the newest weights: ``--pipeline-delayed-microbatches``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from . import custom_loop
from .case import LOSS_SCALE, Case, Fault
from .compare import differing
from .faults import INFINITE_GRADIENT
from .features import ALL_TO_ALL
from .harness import collect, merge, run
from .matrix import compared
from .saved import DROPOUT, assert_continues, save
from .test_overflow import _loss_scales

CASE = Case(schedule="2bw", stages=2, microbatches=4, tied=False, batches=12, delayed=2, record_gradients=True)
SHARDED = replace(CASE, replicas=2, distributed_optimizer=True, precision="bf16")
EXACT = {
    "an update that nothing hides": replace(CASE, delayed=1, clip=1.0),
    "PP4, tied, bf16, full recompute": replace(
        CASE, stages=4, microbatches=6, delayed=4, tied=True, clip=1.0, precision="bf16", recompute="full"
    ),
    "PP3, more in flight": replace(
        CASE,
        stages=3,
        layers=4,
        microbatches=6,
        delayed=4,
        flags=("--pipeline-extra-in-flight", "1", "--pipeline-model-parallel-layout", "Et|tt|tL"),
    ),
    "fp16, distributed optimizer, lead, after batches without a delay": replace(
        SHARDED, precision="fp16", lead=2.0, clip=1.0, synchronous=4
    ),
    "one buffer, update-lead, distributed optimizer": replace(
        SHARDED, correction="update-lead", lead=1.0, flags=("--pipeline-gradient-buffers", "1")
    ),
    "muon, lead": replace(CASE, optimizer="muon", lead=1.0),
    "as many as there are": replace(CASE, microbatches=2, delayed=2, clip=1.0),
}


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_oracle(name: str) -> None:
    assert compared(EXACT[name]).problems() == []


def test_it_changes_the_training() -> None:
    assert "losses" in differing(run(CASE), run(replace(CASE, delayed=0)), norms=False)
    assert "losses" in differing(run(CASE), run(replace(CASE, delayed=0, schedule="1f1b-flush")), norms=False)


def test_microbatches_of_a_batch_have_one_loss_scale() -> None:
    """That of the older weights, which is halved two batches after an infinity; with experts, for their loss too."""
    overflows = tuple(Fault(kind=INFINITE_GRADIENT, rank=0, call=4 * batch + 3) for batch in (0, 3, 7, 11))
    case = replace(CASE, precision="fp16", clip=1.0, faults=overflows)
    assert compared(case).problems() == []
    assert run(case).norms.isnan().nonzero().flatten().tolist() == [0, 3, 7, 11]
    assert _loss_scales(run(case)) == [LOSS_SCALE / 2**n for n in (0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3)]
    assert compared(replace(case, model=ALL_TO_ALL)).problems() == []


def test_evaluation_changes_no_number() -> None:
    case = replace(CASE, precision="fp16", faults=(Fault(kind=INFINITE_GRADIENT, rank=0, call=4 * 5),))
    evaluating = ("--eval-interval", "1", "--eval-iters", "2")
    assert differing(run(replace(case, flags=evaluating)), run(case)) == []


@pytest.mark.parametrize("format_", ["torch_dist", "torch"])
def test_a_resumed_run_is_the_uninterrupted_one(format_: str, tmp_path: Path) -> None:
    whole = save(replace(CASE, precision="fp16", lead=2.0, model=DROPOUT, record_gradients=False), tmp_path, format_, 5)
    for iteration in (5, 10):
        assert_continues(whole.resumed(iteration), whole.results, iteration)


def test_order() -> None:
    """The first stage updates one microbatch after the last backward, the last one right before it is needed."""
    actions = run(replace(CASE, record_actions=True, record_gradients=False)).actions
    first, last = ([text for text, *_ in of_rank if "F" in text or "UPDATE" in text] for of_rank in actions)
    assert [text for text in first if not text.startswith("0RECV")][:7] == (
        "0F0v-1 0F1v-1 0F2v0 0F3v0 0F0@1v0 0F1@1v0 0UPDATE".split()
    )
    assert [text for text in last if not text.startswith("1RECV")][:8] == (
        "1F0v-1 1F1v-1 1F2v0 1F3v0 1F0@1v0 1F1@1v0 1UPDATE 1F2@1v1".split()
    )


def test_a_training_loop_of_ones_own() -> None:
    case = replace(CASE, record_gradients=False)
    found = merge(collect(custom_loop.main, case), case)
    assert differing(found, run(case), norms=False) == []
