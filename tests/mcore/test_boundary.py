"""No stage waits for another at a batch boundary, only for its inputs.

One rank sleeps. The simulator says which actions do not depend on the one that is delayed; all of
them must be done when the rank wakes up. Megatron logs every batch here: its own barriers count.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_2bw.schedule.action import Action, ActionType, Reduction
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate

from .case import Case, Fault
from .features import EXPERTS
from .harness import run

BATCH = 2
"""The sleep is in the call of this batch."""
SLEEP_S = 1.5
MARGIN_S = 0.3
FOREVER = 10**6
BEFORE_LAST_FORWARD = "sleep before forward"
AFTER_LAST_BACKWARD = "sleep before reduction"
PLACES = [BEFORE_LAST_FORWARD, AFTER_LAST_BACKWARD]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("stages", "microbatches", "sleeper"),
    [(2, 1, 0), (2, 2, 0), (2, 2, 1), (4, 3, 0), (4, 4, 0), (4, 4, 1), (4, 4, 3)],
)
def test_others_go_on_as_far_as_their_inputs_allow(stages: int, microbatches: int, sleeper: int, place: str) -> None:
    case = _sleeping(Case(schedule="2bw", stages=stages, microbatches=microbatches), sleeper, place)
    expected = independent(case)
    # Before its last forward, the last stage owes all others a gradient of this batch.
    assert _passed_boundary(case, expected) or (sleeper == stages - 1 and place == BEFORE_LAST_FORWARD)
    assert missing(case, expected) == []


@pytest.mark.parametrize("sleeper", [0, 1])
def test_early_exits_are_agreed_on_without_a_meeting(sleeper: int) -> None:
    case = _sleeping(Case(schedule="2bw", stages=2, microbatches=2), sleeper, AFTER_LAST_BACKWARD)
    case = replace(case, flags=(*case.flags, "--exit-signal-handler", "--exit-duration-in-mins", "1000"))
    assert missing(case, independent(case)) == []


@pytest.mark.parametrize("sleeper", [0, 1])
def test_experts_meet_only_where_their_losses_are_logged(sleeper: int) -> None:
    case = _sleeping(Case(schedule="2bw", stages=2, microbatches=2, model=EXPERTS), sleeper, AFTER_LAST_BACKWARD)
    case = replace(case, flags=("--log-interval", "1000"))
    assert missing(case, independent(case)) == []


@pytest.mark.parametrize("stages", [2, 4])
def test_a_blocking_step_would_be_noticed(stages: int) -> None:
    case = _sleeping(Case(schedule="2bw", stages=stages, microbatches=stages), 0, AFTER_LAST_BACKWARD)
    blocking = tuple(Fault(kind="blocking step", rank=rank) for rank in range(stages))
    late = missing(replace(case, faults=(*case.faults, *blocking)), independent(case))
    assert {rank for rank, _ in late} == set(range(1, stages))


def independent(case: Case) -> list[tuple[int, Action]]:
    """(rank, action) of all that does not wait, directly or not, for the delayed action."""
    schedule = lower(
        build("2bw", stages=case.stages, microbatches=case.microbatches),
        [Reduction.GRADIENTS, Reduction.EMBEDDING, Reduction.NORM],
    )
    sleeper = case.faults[0].rank
    durations = Durations(forward_s=1, backward_s=2)
    timeline = simulate(schedule, durations, case.batches, delays={(sleeper, _delayed(case)): FOREVER})
    return [(rank, e.action) for rank, events in enumerate(timeline.events) for e in events if e.end_s < FOREVER]


def missing(case: Case, expected: list[tuple[int, Action]]) -> list[tuple[int, str]]:
    """Those of ``expected`` that were not done when the sleeper woke up."""
    results = run(case)
    ((_, woke_s),) = results.sleeps[case.faults[0].rank]
    limit_s = woke_s - MARGIN_S
    done = {(rank, text) for rank, events in enumerate(results.actions) for text, _, end_s in events if end_s < limit_s}
    return [(rank, str(action)) for rank, action in expected if (rank, str(action)) not in done]


def _sleeping(case: Case, sleeper: int, place: str) -> Case:
    ahead = case.stages - 1 - sleeper  # By so much a call's forwards reach into the next batch.
    calls = {BEFORE_LAST_FORWARD: (BATCH + 1) * case.microbatches - 1 + ahead, AFTER_LAST_BACKWARD: BATCH}
    fault = Fault(kind=place, rank=sleeper, call=calls[place], seconds=SLEEP_S)
    return replace(case, batches=7, clip=1.0, faults=(fault,), flags=("--log-interval", "1"), record_actions=True)


def _delayed(case: Case) -> Action:
    """The action that the sleep prolongs, batch and version counted from the start of the run."""
    fault = case.faults[0]
    if fault.kind == AFTER_LAST_BACKWARD:
        return Action(ActionType.REDUCE_START, fault.rank, batch=fault.call, reduction=Reduction.GRADIENTS)
    batch, microbatch = divmod(fault.call, case.microbatches)
    return Action(ActionType.FORWARD, fault.rank, microbatch, batch, version=batch - 1)


def _passed_boundary(case: Case, expected: list[tuple[int, Action]]) -> bool:
    """Whether a rank that is awake does something after its last backward of the batch."""
    sleeper = case.faults[0].rank
    for rank in set(range(case.stages)) - {sleeper}:
        actions = [action for of_rank, action in expected if of_rank == rank]
        last = Action(ActionType.BACKWARD, rank, case.microbatches - 1, BATCH, version=BATCH - 1)
        if last in actions[:-1]:
            return True
    return False
