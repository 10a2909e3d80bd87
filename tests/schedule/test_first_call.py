"""Where every action first loads what it needs, and for that waits for all that its rank has posted."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator

import pytest

from megatron_2bw.schedule.action import ACTIVATIONS, COMPUTE, RECEIVES, SENDS, Action, ActionType
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import _receive_of, first_call, lower
from megatron_2bw.schedule.program import Program, Schedule
from megatron_2bw.schedule.registry import SCHEDULES, build

RECEIVE_OF = {ActionType.FORWARD: ActionType.RECV_FORWARD, ActionType.BACKWARD: ActionType.RECV_BACKWARD}


def schedules(name: str) -> Iterator[Schedule]:
    for stages, microbatches in itertools.product((2, 3, 4), range(1, 9)):
        for options in ({}, {"extra_in_flight": 1}) if name == "2bw" else ({},):
            with contextlib.suppress(ScheduleError):
                yield lower(build(name, stages=stages, microbatches=microbatches, **options))


def stuck(schedule: Schedule, calls: list[tuple[Action, ...]]) -> list[str]:
    """What each rank that does not get through waits in."""
    left = [list(reversed(call)) for call in calls]
    posted: list[set[Action]] = [set() for _ in calls]  # By rank; a send as the receive at its other end.
    sent: set[Action] = set()
    received: set[Action] = set()

    def can_run(rank: int, action: Action) -> bool:
        if action.type not in COMPUTE:
            return True
        needed = set(posted[rank])
        receive = action._replace(type=RECEIVE_OF[action.type], version=None)
        if schedule.peer_of(receive) not in (None, rank):
            needed.add(receive)
        return needed <= sent & received

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            while actions and can_run(rank, actions[-1]):
                action = actions.pop()
                if action.type in SENDS | RECEIVES:
                    transfer = _receive_of(action) if action.type in SENDS else action
                    posted[rank].add(transfer)
                    (sent if action.type in SENDS else received).add(transfer)
                moved = True
    return [str(actions[-1]) for actions in left if actions]


@pytest.mark.parametrize("left", [None, 0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ranks_get_through(name: str, left: int | None) -> None:
    for schedule in schedules(name):
        calls = [first_call(schedule, rank, left) for rank in range(len(schedule.programs))]
        assert stuck(schedule, calls) == [], f"d={schedule.stages}, m={schedule.microbatches}"


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gems"])
def test_ranks_would_wait_for_each_other_with_receives_where_they_are_otherwise(name: str) -> None:
    found = [
        stuck(schedule, [(*program.fill(None), *program.steady) for program in schedule.programs])
        for schedule in schedules(name)
    ]
    assert any(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_ends_of_a_channel_keep_its_order(name: str) -> None:
    """First in, first out; up to the end of the second call, or of a run of one or two batches."""
    for schedule, left in itertools.product(schedules(name), [None, 0, 1]):
        calls = [
            (*first_call(schedule, rank, left), *_second_call(program, left))
            for rank, program in enumerate(schedule.programs)
        ]
        sent, received = (in_order(schedule, calls, types) for types in (SENDS, RECEIVES))
        assert {place: [*map(_receive_of, sends)] for place, sends in sent.items()} == received


def _second_call(program: Program, left: int | None) -> list[Action]:
    return [action.shifted(1) for action in (program.call(left - 1 if left else left) if left != 0 else ())]


def in_order(
    schedule: Schedule, calls: list[tuple[Action, ...]], types: frozenset[ActionType]
) -> dict[tuple[int, int, bool], list[Action]]:
    """By source, destination, and whether they are activations."""
    found: dict[tuple[int, int, bool], list[Action]] = defaultdict(list)
    for rank, call in enumerate(calls):
        for action in call:
            if action.type in types:
                ranks = (rank, schedule.peer_of(action)) if types is SENDS else (schedule.peer_of(action), rank)
                found[*ranks, action.type in ACTIVATIONS].append(action)
    return found
