"""Spoiled Programs are refused; those that are as good as before are not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from megatron_2bw.schedule.calls import lowered
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.validation.listing import MARK
from megatron_2bw.schedule.validation.rules import Rule
from megatron_2bw.schedule.validation.validate import validate

from .interpreter import is_right
from .mutations import ALWAYS_WRONG, SOMETIMES_WRONG, random_mirrored_schedule, random_schedule, with_actions

SEEDS_PER_KIND = 120
RUNS = (5, 1, 2)


def refusal(schedule: Schedule) -> ScheduleError | None:
    try:
        validate(schedule)
    except ScheduleError as error:
        return error
    return None


@pytest.mark.parametrize("kind", ALWAYS_WRONG)
@pytest.mark.parametrize("draw", [random_schedule, random_mirrored_schedule])
def test_what_is_always_wrong_is_always_refused(kind: str, draw: Callable[..., Schedule]):
    for seed in range(SEEDS_PER_KIND):
        rng = random.Random(f"{kind} {seed}")
        schedule = draw(rng, most_stages=6, most_microbatches=8)
        rank = rng.randrange(schedule.stages)
        actions = list(schedule.programs[rank].steady)
        ALWAYS_WRONG[kind](rng, actions)
        error = refusal(with_actions(schedule, rank, actions))
        assert error is not None, f"seed {seed}: {schedule.name}, rank {rank}: {' '.join(map(str, actions))}"
        assert MARK in error.grid
        assert any(f": {rule}: " in error.message for rule in Rule)


@pytest.mark.parametrize("authored", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lowered", "authored"])
def test_a_changed_program_is_refused_exactly_when_it_computes_something_else(authored: bool):
    """The judge is the interpreter, which carries the Program out and knows no rule of the validator."""
    verdicts: Counter[tuple[str, bool]] = Counter()
    for kind, mutate in SOMETIMES_WRONG.items():
        for seed in range(SEEDS_PER_KIND):
            rng = random.Random(f"{kind} {seed}")
            schedule = random_schedule(rng)
            if authored:
                schedule = build(schedule.name, stages=schedule.stages, microbatches=schedule.microbatches)
            rank = rng.randrange(schedule.stages)
            actions = list(schedule.programs[rank].steady)
            mutate(rng, actions)
            spoiled = with_actions(schedule, rank, actions)
            error = refusal(spoiled)
            right = computes_the_right_thing(spoiled, seed)
            assert (error is None) == right, f"{kind}, seed {seed}, rank {rank}: {' '.join(map(str, actions))}\n{error}"
            assert error is None or MARK in error.grid
            verdicts[kind, right] += 1
    # The test says something only if both verdicts occur.
    assert all(verdicts[kind, False] >= 20 for kind in SOMETIMES_WRONG)
    assert all(verdicts[kind, True] >= 5 for kind in SOMETIMES_WRONG if kind != "batch"), verdicts


def computes_the_right_thing(schedule: Schedule, seed: int) -> bool:
    try:
        schedule = lowered(schedule)
    except ScheduleError:  # No order of transfers brings a tensor to its use.
        return False
    return is_right(schedule, RUNS, seed)
