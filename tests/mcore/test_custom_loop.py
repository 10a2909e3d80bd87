"""A training loop that is not Megatron's, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from . import custom_loop
from .case import Case
from .compare import differing
from .harness import collect, merge, run
from .oracle import oracle

CASES = (Case(stages=2, microbatches=2, tied=False, batches=12), Case(stages=2, microbatches=2, replicas=2, batches=12))


@pytest.mark.parametrize("case", CASES, ids=["untied", "tied-w2"])
def test_equals_the_oracle(case: Case) -> None:
    found = looped(replace(case, schedule="2bw"))
    expected = oracle(replace(case, schedule="2bw"), delay=1)
    assert differing(found, expected, norms=False) == []
    assert found.rates == expected.rates


def test_synchronous_schedules_equal_megatrons_training_loop() -> None:
    found, expected = looped(replace(CASES[0], schedule="gpipe")), run(CASES[0])
    assert differing(found, expected) == []


def test_configs_that_do_not_work_are_refused() -> None:
    overlap, prediction, delayed, unknown = collect(custom_loop.refused, CASES[0], CASES[0].ranks)[0]
    assert "--overlap-grad-reduce sets must be off with 2bw" in overlap
    assert "--mtp-num-layers sets does not work with 2bw: its gradients have a norm of their own" in prediction
    assert "--delay-wgrad-compute sets does not work with gpipe" in delayed
    assert "unknown schedule 'unheard'; choose one of 2bw" in unknown


def looped(case: Case) -> object:
    return merge(collect(custom_loop.main, case, case.ranks), case.stages, case.microbatches)
