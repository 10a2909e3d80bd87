"""The yardstick: the oracle and Megatron's own runs against each other, our schedules not involved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .case import Case
from .compare import FLOOR, deviation, differing
from .harness import run
from .matrix import LAYOUTS, PRECISIONS, compared
from .oracle import oracle

MEGATRON = Case(schedule=None, layers=4, microbatches=4)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_ordinary_oracle_is_megatron_to_the_last_bit(stages: int) -> None:
    case = replace(MEGATRON, stages=stages, tied=False)
    found, expected = run(case), oracle(case, delay=0)
    assert differing(found, expected, norms=False) == []
    assert deviation(found, expected).norms <= FLOOR
    assert found.rates == expected.rates


def test_ordinary_oracle_is_megatron_with_data_parallelism() -> None:
    case = replace(MEGATRON, stages=2, replicas=2, microbatches=2, tied=False)
    assert differing(run(case), oracle(case, delay=0), norms=False) == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["PP1", "PP4", "PP2xTP2", "PP2xDP2 distributed optimizer"])
def test_ordinary_oracle_is_megatron_in_every_precision(layout: str, precision: str) -> None:
    """Tied and clipped, gradients of every update included; the oracle clips by Megatron's norms."""
    ranks = LAYOUTS.get(layout, {"stages": 1, "microbatches": 4})
    case = Case(schedule=None, precision=precision, clip=1.0, batches=12, record_gradients=True, **ranks)
    assert compared(case, delay=0).problems() == []


def test_tensor_parallel_oracle_differs_from_one_process_by_rounding_only() -> None:
    case = Case(batches=12, clip=1.0, tensor_parallel=2, record_gradients=True)
    assert max(deviation(oracle(case, delay=1), oracle(replace(case, tensor_parallel=1), delay=1))) <= 5e-6


def test_loss_scale_is_megatrons() -> None:
    """Overflows, tolerance and growth: the scale of every batch."""
    case = Case(schedule=None, microbatches=2, precision="fp16", batches=14, model=("--initial-loss-scale", "67108864"))
    assert compared(case, delay=0).problems() == []
    assert run(case).norms.isnan().sum() >= 3


def test_runs_start_from_the_same_weights_in_every_layout() -> None:
    one, four = run(replace(MEGATRON, clip=1.0)), run(replace(MEGATRON, stages=4, clip=1.0))
    assert one.initial.keys() == four.initial.keys()
    assert all(torch.equal(one.initial[name], four.initial[name]) for name in one.initial)


def test_what_the_comparisons_must_notice_is_large() -> None:
    """Delay, tying and clipping each change the run by far more than any tolerance."""
    case = replace(MEGATRON, clip=1.0, record_gradients=True)
    delayed = oracle(case, delay=1)
    for other in (oracle(case, delay=0), oracle(case, delay=2), oracle(replace(case, clip=0.0), delay=1)):
        assert min(deviation(other, delayed)) > 1e-4
