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


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_way_to_lower_what_works_is_right(name: str, copy: GradientCopy, tied: bool):
    """A run has one of these: none is refused that the validator lets pass with all reductions."""
    for stages in (2, 3, 4):
        for microbatches in range(1, 9):
            if refusal(name, stages=stages, microbatches=microbatches) is None:
                how = {"copy": copy if name in DELAYED else None, "reductions": chain_of(tied=tied)}
                assert refusal(name, stages=stages, microbatches=microbatches, **how) is None


def test_lowered_with_what_is_there():
    programs = lowered_as("2bw", stages=2, microbatches=2, copy=GradientCopy.NONE, reductions=chain_of(tied=False))
    reductions = {action.reduction for program in programs.programs for action in program.steady}
    assert reductions == {None, Reduction.GRADIENTS, Reduction.NORM}
    assert programs.gradient_copy is GradientCopy.NONE
