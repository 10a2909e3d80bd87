"""Our executor's synchronous schedules against Megatron's own 1F1B, and Megatron untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case
from .compare import differing
from .harness import run

LAYOUTS = [(2, 1, 1), (2, 4, 1), (4, 2, 1), (4, 8, 1), (2, 2, 2)]


@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe", "inter-layer"])
@pytest.mark.parametrize(("stages", "microbatches", "replicas"), LAYOUTS)
def test_equal_to_megatrons_own_schedule(schedule: str, stages: int, microbatches: int, replicas: int) -> None:
    """gpipe and inter-layer too: their backwards add gradients in the same order."""
    case = Case(schedule=schedule, stages=stages, microbatches=microbatches, replicas=replicas, clip=1.0)
    found, expected = run(case), run(replace(case, schedule=None))
    assert differing(found, expected) == []
    assert found.rates == expected.rates


@pytest.mark.parametrize("alias", ["pipedream-flush", "dapple"])
def test_aliases_are_the_same_schedule(alias: str) -> None:
    case = Case(schedule=alias, stages=2, microbatches=4, clip=1.0)
    assert differing(run(case), run(replace(case, schedule="1f1b-flush"))) == []


@pytest.mark.parametrize(("stages", "microbatches", "replicas"), [(1, 2, 1), (2, 4, 1), (4, 8, 1), (2, 2, 2)])
def test_megatron_is_untouched_with_the_extension_loaded(stages: int, microbatches: int, replicas: int) -> None:
    case = Case(schedule="megatron", stages=stages, microbatches=microbatches, replicas=replicas, clip=1.0)
    found, expected = run(case), run(replace(case, schedule=None))
    assert differing(found, expected) == []
    assert found.losses.numpy().tobytes() == expected.losses.numpy().tobytes()
    assert found.rates == expected.rates


@pytest.mark.parametrize("distributed", [True, False])
def test_reductions_that_overlap_are_megatrons(distributed: bool) -> None:
    case = Case(
        schedule="1f1b-flush",
        stages=2,
        microbatches=2,
        replicas=2,
        clip=1.0,
        batches=4,
        flags=("--overlap-grad-reduce",),
        distributed_optimizer=distributed,
    )
    assert differing(run(case), run(replace(case, schedule=None))) == []
