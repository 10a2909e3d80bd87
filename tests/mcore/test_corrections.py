"""Corrected updates of pipelined runs against the single-process oracle with the same correction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .case import Case, Fault
from .compare import differing
from .faults import INFINITE_GRADIENT
from .harness import run
from .matrix import compared
from .saved import DROPOUT, assert_continues, save

CASE = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=12, lead=2.0)
CASES = {
    "d2": CASE,
    "d4": replace(CASE, stages=4, microbatches=4),
    "bf16, distributed optimizer": replace(CASE, precision="bf16", replicas=2, distributed_optimizer=True),
    "update-lead, d2": replace(CASE, correction="update-lead", precision="bf16"),
    "update-lead, d4, distributed optimizer": replace(
        CASE, correction="update-lead", precision="bf16", stages=4, microbatches=4, distributed_optimizer=True
    ),
    "muon": replace(CASE, optimizer="muon", lead=0.0),
    "muon, lead, d4": replace(CASE, optimizer="muon", lead=1.0, stages=4, microbatches=4),
    "muon, update-lead, bf16, 2 replicas": replace(
        CASE, optimizer="muon", correction="update-lead", lead=1.0, precision="bf16", replicas=2
    ),
    "muon, tensor parallel": replace(CASE, optimizer="muon", lead=0.0, tensor_parallel=2),
    "lion": replace(CASE, optimizer="lion", lead=0.0),
    "sgd": replace(CASE, optimizer="sgd", lead=1.0),
    "tensor parallel": replace(CASE, tensor_parallel=2),
    "update-lead, bf16, tensor parallel": replace(CASE, correction="update-lead", precision="bf16", tensor_parallel=2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    assert compared(CASES[name]).problems() == []


@pytest.mark.parametrize("correction", ["lead", "update-lead"])
def test_clipped_and_skipped_updates(correction: str) -> None:
    """The oracle clips by the run's norms."""
    overflows = (Fault(kind=INFINITE_GRADIENT, rank=0, call=2 * batch) for batch in (3, 4, 8))
    case = replace(
        CASE, correction=correction, precision="fp16", clip=1.0, record_gradients=True, faults=tuple(overflows)
    )
    assert compared(case).problems() == []
    assert run(case).norms.isnan().nonzero().flatten().tolist() == [3, 4, 8]


@pytest.mark.parametrize("correction", ["lead", "update-lead"])
def test_it_changes_the_training(correction: str) -> None:
    case = replace(CASE, correction=correction, precision="bf16")
    plain = replace(case, lead=0.0, model=("--adam-beta1", "0.95"))
    assert "losses" in differing(run(case), run(plain), norms=False)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Main weights and the model's, which are ahead of them, are in Megatron's checkpoint as they are."""
    case = replace(CASES["muon, update-lead, bf16, 2 replicas"], replicas=1, model=DROPOUT)
    whole = save(case, tmp_path, "torch_dist", interval=5)
    assert_continues(whole.resumed(5), whole.results, 5)
