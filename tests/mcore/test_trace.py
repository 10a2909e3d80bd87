"""``--pipeline-trace``: a file of what ran, for ``megatron-2bw show --measured``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_2bw.schedule.action import COMPUTE, Action, ActionType
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.pictures.run_file import read_run
from megatron_2bw.schedule.simulate import simulate
from megatron_2bw.schedule.timeline import Event

from .case import Case
from .harness import launch
from .worker import main

CASES = (
    Case(schedule="2bw", stages=2, microbatches=3, tied=False, batches=4, delayed=2),
    Case(schedule="1f1b-flush", stages=2, microbatches=2, batches=4),
    Case(schedule="chimera", stages=2, microbatches=2, batches=4),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.schedule)
def test_it_has_what_ran(case: Case, tmp_path: Path) -> None:
    """In the order of the schedule, on one clock."""
    path = tmp_path / "new" / "trace.json"
    ended = launch(main, replace(case, flags=("--pipeline-trace", str(path))), tmp_path)
    assert not any(ended.exit_codes), ended.tails()
    run = read_run(path)
    expected = simulate(run.schedule, Durations(forward_s=1, backward_s=2), case.batches)
    assert list(map(computed, run.timeline.events)) == list(map(computed, expected.events))
    assert {event.action.type for events in run.timeline.events for event in events} >= {
        *COMPUTE,
        ActionType.RECV_FORWARD,
    }
    for events in run.timeline.events:
        assert all(event.end_s <= after.start_s for event, after in itertools.pairwise(events))
    ran = {event.action: event for events in run.timeline.events for event in events}
    for action, event in ran.items():
        if action.type is ActionType.FORWARD and action.stage == 1:
            assert event.start_s > ran[action._replace(stage=0)].start_s


def computed(events: Iterable[Event]) -> list[Action]:
    return [event.action for event in events if event.action.type in COMPUTE]
