"""What the validator is asked, and how often."""

import pytest

from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.program import GradientCopy
from megatron_2bw.schedule.registry import DELAYED, SCHEDULES
from megatron_2bw.schedule.validation import feasible
from megatron_2bw.schedule.validation.feasible import chain_of, lowered_as, refusal


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of schedules that the validator was asked about."""
    names: list[str] = []
    monkeypatch.setattr(feasible, "validate", lambda schedule: names.append(schedule.name))
    feasible._refusal.cache_clear()
    yield names
    feasible._refusal.cache_clear()


def test_the_validator_is_asked_once_of_each_size(asked: list[str]):
    """However many batch sizes a run has, and whatever comes first in the call."""
    how = {"stages": 4, "copy": GradientCopy.SHARD, "reductions": chain_of(tied=True)}
    for _ in range(3):
        for microbatches in range(3, 60):
            assert refusal("2bw", microbatches=microbatches, **how) is None
            assert refusal("2bw", **how, k=None, microbatches=microbatches) is None
    assert asked == ["2bw"] * 57
    refusal("2bw", microbatches=8, stages=4)
    assert len(asked) == 58


LOWERED = [
    *((name, copy, tied) for name in sorted(DELAYED) for copy in GradientCopy for tied in (False, True)),
    *((name, None, False) for name in SCHEDULES if name not in DELAYED),
]


@pytest.mark.parametrize(("name", "copy", "tied"), LOWERED)
def test_every_way_to_lower_what_works_is_right(name: str, copy: GradientCopy | None, tied: bool):
    """A run has one of these: none is refused that the validator lets pass with all reductions."""
    sizes = [(stages, microbatches) for stages in (2, 3, 4) for microbatches in range(1, 9)]
    work = [size for size in sizes if refusal(name, stages=size[0], microbatches=size[1]) is None]
    assert work
    for stages, microbatches in work:
        how = {"copy": copy, "reductions": chain_of(tied=tied)}
        assert refusal(name, stages=stages, microbatches=microbatches, **how) is None


def test_lowered_with_what_is_there():
    programs = lowered_as("2bw", stages=2, microbatches=2, copy=GradientCopy.NONE, reductions=chain_of(tied=False))
    reductions = {action.reduction for program in programs.programs for action in program.steady}
    assert reductions == {None, Reduction.GRADIENTS, Reduction.NORM}
    assert programs.gradient_copy is GradientCopy.NONE
