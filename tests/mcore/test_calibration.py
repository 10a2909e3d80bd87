"""The yardstick: the oracle and Megatron's own runs against each other, our schedules not involved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .case import Case
from .compare import FLOOR, deviation, differing
from .harness import run
from .oracle import oracle

MEGATRON = Case(schedule=None, microbatches=4)


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


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_clipping_and_tied_embeddings_cost_only_rounding(stages: int) -> None:
    case = replace(MEGATRON, stages=stages, clip=1.0)
    assert max(deviation(run(case), oracle(case, delay=0))) <= 5e-6


def test_runs_start_from_the_same_weights_in_every_layout() -> None:
    one, four = run(replace(MEGATRON, clip=1.0)), run(replace(MEGATRON, stages=4, clip=1.0))
    assert one.initial.keys() == four.initial.keys()
    assert all(torch.equal(one.initial[name], four.initial[name]) for name in one.initial)


def test_what_the_comparisons_must_notice_is_large() -> None:
    """Delay, tying and clipping each change the run by far more than any tolerance."""
    case = replace(MEGATRON, clip=1.0)
    delayed = oracle(case, delay=1)
    for other in (oracle(case, delay=0), oracle(case, delay=2), oracle(replace(case, clip=0.0), delay=1)):
        assert min(deviation(other, delayed)) > 1e-4
