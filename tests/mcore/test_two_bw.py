"""2BW against the single-process oracle of delay-1 training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case, Fault
from .compare import FLOOR, Deviation, deviation, differing
from .harness import run
from .oracle import oracle

LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 4, 1), (4, 3, 1), (4, 4, 1), (4, 8, 1), (2, 1, 2), (2, 2, 2)]
"""(d, m, data-parallel replicas) with m = d - 1, d, 2d."""
WITHIN = 5e-6

CASES = [Case(schedule="2bw", stages=d, microbatches=m, replicas=w) for d, m, w in LAYOUTS]
layouts = pytest.mark.parametrize(
    "case", CASES, ids=[f"d{case.stages}-m{case.microbatches}-w{case.replicas}" for case in CASES]
)


@pytest.fixture(scope="module")
def megatrons_own() -> Deviation:
    """How far Megatron's pipeline runs are from its runs without one, in the settings of the test below."""
    apart = []
    for case in CASES:
        stock = replace(case, schedule=None, clip=clip_threshold(case))
        apart.append(deviation(run(stock), run(replace(stock, stages=1))))
    return Deviation(*(max(values) for values in zip(*apart, strict=True)))


@layouts
def test_equal_to_the_last_bit_untied_without_clipping(case: Case) -> None:
    case = replace(case, tied=False)
    found, expected = run(case), oracle(case, delay=1)
    assert differing(found, expected, norms=False) == []
    assert deviation(found, expected).norms <= WITHIN
    assert found.rates == expected.rates


@layouts
def test_tied_and_clipped_no_further_off_than_megatron(case: Case, megatrons_own: Deviation) -> None:
    case = replace(case, clip=clip_threshold(case))
    found, expected = run(case), oracle(case, delay=1)
    clipped = (expected.norms > case.clip).double().mean().item()
    assert 0.25 <= clipped <= 0.75
    apart = deviation(found, expected)
    assert max(apart) <= WITHIN
    assert apart.within(megatrons_own.at_least(FLOOR))
    assert found.rates == expected.rates


def clip_threshold(case: Case) -> float:
    """The median norm of the unclipped oracle: clipping then acts in about half of the batches."""
    return oracle(case, delay=1).norms.median().item()


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 2), (4, 3), (4, 4)])
def test_many_batches_at_the_tightest_fit(stages: int, microbatches: int) -> None:
    """A wrong order of transfers and reductions hangs, or mixes versions, only now and then."""
    jitter = tuple(Fault(kind="jitter", rank=rank, seconds=0.002) for rank in range(stages))
    case = Case(schedule="2bw", stages=stages, microbatches=microbatches, tied=False, batches=150, faults=jitter)
    found, expected = run(case), oracle(case, delay=1)
    assert differing(found, expected, norms=False) == []
