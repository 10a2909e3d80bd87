"""The first batches without a delay: ``--synchronous-warmup-iters``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_2bw.mcore.symbols import megatron_version

from . import custom_loop
from .case import Case, Fault
from .compare import differing
from .faults import INFINITE_GRADIENT
from .features import BIASED, DETACHED, EXPERTS, SEVERAL_TOKENS
from .harness import collect, merge, run
from .matrix import compared
from .saved import DROPOUT, assert_continues, save

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
    "biases of experts": replace(CASE, model=BIASED),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    assert compared(CASES[name]).problems() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": True, "tensor_parallel": 2},
        pytest.param(
            {"model": (*SEVERAL_TOKENS, *DETACHED), "precision": "bf16", "replicas": 2, "distributed_optimizer": True},
            marks=pytest.mark.skipif(megatron_version().startswith("0.18"), reason="Megatron 0.18 has no such heads"),
        ),
        # Megatron takes a norm of the norms of two optimizers, whose groups have the same ranks.
        {"precision": "bf16", "replicas": 2, "distributed_optimizer": True, "optimizer": "muon"},
        {
            "model": EXPERTS,
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
    ],
    ids=[
        "tied, tensor parallel",
        "further tokens that learn alone",
        "muon, distributed optimizer",
        "experts on tensor-parallel ranks",
    ],
)
def test_norms_are_megatrons_to_the_last_bit(changes: dict[str, object]) -> None:
    """The oracle clips by the norms that a run found; here, gradients are those of a flush."""
    case = replace(CASE, batches=6, synchronous=6, clip=1.0, **changes)
    found, expected = run(case), run(replace(case, schedule="1f1b-flush", synchronous=0))
    assert torch.equal(found.norms, expected.norms)
    assert torch.equal(found.norms_apart, expected.norms_apart)
    assert (found.norms_apart > 0).all() == ("model" in changes and set(DETACHED) <= set(changes["model"]))
    assert torch.equal(found.losses, expected.losses)


def test_clipped_and_skipped_updates() -> None:
    """Without a delay, right before it begins, and after."""
    overflows = tuple(Fault(kind=INFINITE_GRADIENT, rank=0, call=2 * batch) for batch in (1, 4, 5, 8))
    case = replace(CASE, precision="fp16", clip=1.0, tied=True, record_gradients=True, faults=overflows)
    assert compared(case).problems() == []
    assert run(case).norms.isnan().nonzero().flatten().tolist() == [1, 4, 5, 8]


def test_their_order_is_that_of_a_flush() -> None:
    first, *_ = run(replace(CASE, record_actions=True)).actions
    order = [text for text, *_ in first if text.startswith(("0F", "0B", "0UPDATE"))]
    assert order[:10] == "0F0v0 0F1v0 0B0v0 0B1v0 0UPDATE 0F0@1v1 0F1@1v1 0B0@1v1 0B1@1v1 0UPDATE@1".split()
    after = order[5 * CASE.synchronous :]
    assert after[:5] == "0F0@5v4 0F1@5v4 0B0@5v4 0UPDATE@4 0F0@6v5".split(), "that update was done before"


def test_evaluation_changes_no_number() -> None:
    evaluating = ("--eval-interval", "2", "--eval-iters", "2")
    assert differing(run(replace(CASE, flags=evaluating)), run(CASE)) == []


def test_after_batches_with_a_delay(tmp_path: Path) -> None:
    """From a checkpoint with two versions, each with a loss scale of its own: those of the newest one count."""
    overflow = (Fault(kind=INFINITE_GRADIENT, rank=0, call=2 * 5),)
    delayed = save(replace(CASE, precision="fp16", synchronous=0, faults=overflow), tmp_path, "torch_dist", 6)
    found, expected = (
        delayed.resumed(6, replace(CASE, precision="fp16", **changes))
        for changes in ({"synchronous": 9}, {"synchronous": 0, "schedule": "1f1b-flush"})
    )
    assert torch.equal(found.losses[:, :4], expected.losses[:, :4])
    assert torch.equal(found.norms[:3], expected.norms[:3])
    assert not torch.equal(found.losses, expected.losses)


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
    found = merge(collect(custom_loop.main, CASE), CASE)
    assert differing(found, run(CASE), norms=False) == []
