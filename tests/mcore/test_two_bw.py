"""2BW against the single-process oracle of delay-1 training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_2bw.schedule.validation import feasible

from .case import Case, Fault
from .compare import differing
from .features import BIASED
from .harness import collect, run
from .matrix import compared
from .oracle import oracle

LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 4, 1), (4, 3, 1), (4, 4, 1), (4, 8, 1), (2, 1, 2), (2, 2, 2)]
"""(d, m, data-parallel replicas) with m = d - 1, d, 2d."""

CASES = [Case(schedule="2bw", layers=4, stages=d, microbatches=m, replicas=w) for d, m, w in LAYOUTS]
layouts = pytest.mark.parametrize(
    "case", CASES, ids=[f"d{case.stages}-m{case.microbatches}-w{case.replicas}" for case in CASES]
)


@layouts
def test_equal_to_the_last_bit_untied_without_clipping(case: Case) -> None:
    assert compared(replace(case, tied=False)).problems() == []


@layouts
def test_equal_to_the_last_bit_tied_and_clipped_by_an_exact_norm(case: Case) -> None:
    """The oracle clips by the run's norms, and computes the same ones but for the order of additions."""
    case = replace(case, clip=clip_threshold(case), record_gradients=True)
    comparison = compared(case)
    assert comparison.problems() == []
    assert 0.25 <= comparison.clipped <= 0.75


def clip_threshold(case: Case) -> float:
    """The median norm of the unclipped oracle: clipping then acts in about half of the batches."""
    return oracle(case, delay=1).norms.median().item()


@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), (4, 3), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_many_batches_at_the_tightest_fit(stages: int, microbatches: int) -> None:
    """A wrong order of transfers and reductions hangs, or mixes versions, only now and then."""
    jitter = tuple(Fault(kind="jitter", rank=rank, seconds=0.002) for rank in range(stages))
    case = Case(schedule="2bw", stages=stages, microbatches=microbatches, tied=False, batches=30, faults=jitter)
    found, expected = run(case), oracle(case, delay=1)
    assert differing(found, expected, norms=False) == []


def _lowerings(case: Case, rank: int, port: int, folder: Path) -> None:
    from megatron_2bw.mcore.pipeline import Pipeline

    from .worker import main

    def start(pipeline: Pipeline, call: object) -> None:
        checked.append(feasible._refusal.cache_info().misses)
        started(pipeline, call)

    checked, started = [], Pipeline.start
    Pipeline.start = start
    main(case, rank, port, folder)
    torch.save([*checked, feasible._refusal.cache_info().misses], folder / f"rank{rank}.pt")


@pytest.mark.parametrize(
    "case",
    [
        CASES[1],
        replace(CASES[1], flags=("--pipeline-gradient-buffers", "1", "--pipeline-receives", "late")),
        replace(CASES[1], tied=False, replicas=2, distributed_optimizer=True, precision="bf16"),
        replace(CASES[1], tied=False, replicas=2, distributed_optimizer=True, precision="bf16", optimizer="muon"),
        replace(CASES[1], tied=False, model=BIASED),
        replace(CASES[1], synchronous=1),
    ],
    ids=["plain", "one buffer, late receives", "distributed optimizer", "muon, shards", "experts", "synchronous first"],
)
def test_a_run_finds_its_programs_proven(case: Case) -> None:
    """What the flags foretell of them is what is run; the validator takes its time, and all ranks would wait for it."""
    proven = 2 if case.synchronous else 1
    assert collect(_lowerings, replace(case, batches=2)) == [[proven, proven]] * case.ranks
