"""The executor, on clocks that only computations, transfers and reductions move, takes what the simulator says."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.runtime.links import Boundary
from megatron_2bw.schedule.action import ACTIVATIONS, Action, ActionType
from megatron_2bw.schedule.calls import groups
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.engine import Model, run
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build

RUNS = (3, 1, 5)
"""Batches until the pipeline drains, again and again."""
_PATIENCE_S = 20
"""For another rank, of real time: what it never does is a deadlock."""


class Meeting(NamedTuple):
    """Both ends of a transfer, or all members of a reduction: it begins once all have come, each from another one."""

    members: int
    takes_s: Any
    comers: list[tuple[Any, Any]]
    """When each came, and the key of what it has to have behind it, if anything."""


class Meetings:
    """Of all ranks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all: dict[Any, Meeting] = {}
        self._ended_s: dict[Any, Any] = {}

    def come(self, key: Any, now_s: Any, before: Any, members: int, takes_s: Any) -> None:
        with self._changed:
            self._all.setdefault(key, Meeting(members, takes_s, [])).comers.append((now_s, before))
            self._changed.notify_all()

    def ended_s(self, key: Any) -> Any:
        with self._changed:
            if key not in self._ended_s:
                is_full = self._changed.wait_for(
                    lambda: key in self._all and len(self._all[key].comers) == self._all[key].members, _PATIENCE_S
                )
                assert is_full, f"nobody else comes to {key}"
                _, takes_s, comers = self._all[key]
                begin_s = max(max(now_s, 0 if before is None else self.ended_s(before)) for now_s, before in comers)
                self._ended_s[key] = begin_s + takes_s
            return self._ended_s[key]


class VirtualRank:
    """A clock, and what the executor asks of a worker and of links."""

    def __init__(self, rank: int, schedule: Schedule, durations: Durations, meetings: Meetings) -> None:
        self.boundary = Boundary(shape=(1,), dtype=torch.float32, device=torch.device("cpu"))
        self._done: list[tuple[Action, Any, Any]] = []
        self._rank, self._schedule, self._durations, self._meetings = rank, schedule, durations, meetings
        self._groups = groups(schedule)
        self._now_s: Any = 0
        self._crossed: dict[tuple[int, int, bool], int] = {}
        """Transfers by (sender, receiver, whether activations)."""
        self._receives: dict[Action, Any] = {}
        self._reduced: Any = None
        """The reduction that it started last."""
        self._updated: set[tuple[int, int]] = set()

    def run(self) -> list[tuple[Action, Any, Any]]:
        """Forwards, backwards and updates, from and until when."""
        executor, batch = Executor(self._schedule, self._rank, self, self), 0
        executor.abandon()  # A job's first calls have late receives, whatever comes later.
        for count in RUNS:
            for left in reversed(range(count)):
                executor.run(batch, left=left)
                batch += 1
        return self._done

    def _compute(self, action: Action) -> None:
        start_s = self._now_s
        self._now_s += self._durations.of_stage(action.type, action.stage, self._schedule.stages)
        self._done.append((action, start_s, self._now_s))

    def use_weights(self, version: int) -> None:
        """They take no time to change."""

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        self._compute(action)
        return torch.zeros(1)

    def backward(self, action: Action, received: Any, output: Any, grad: Any) -> torch.Tensor | None:
        self._compute(action)
        return None if received is None else torch.zeros(1)

    def sent(self, output: torch.Tensor) -> None:
        """Its memory does not matter here."""

    def _cross(self, action: Action, sender: int, receiver: int) -> Any:
        is_forward = action.type in ACTIVATIONS
        channel = sender, receiver, is_forward
        index = self._crossed[channel] = self._crossed.get(channel, -1) + 1
        is_upwards = is_forward == (action.type in (ActionType.SEND_FORWARD, ActionType.SEND_BACKWARD))
        boundary = action.stage if is_upwards else action.stage - 1
        takes_s = self._durations.of_transfer(boundary, self._schedule.stages)
        before = (*channel, index - 1) if index else None
        self._meetings.come((*channel, index), self._now_s, before, 2, takes_s)
        return *channel, index

    def post_receive(self, action: Action, peer: int, boundary: Boundary) -> None:
        self._receives[action] = self._cross(action, peer, self._rank)

    def take(self, receive: Action) -> torch.Tensor:
        self._now_s = max(self._now_s, self._meetings.ended_s(self._receives.pop(receive)))
        return torch.zeros(1)

    def send(self, action: Action, peer: int, tensor: torch.Tensor) -> None:
        self._cross(action, self._rank, peer)

    def flush(self) -> None:
        """Nothing is under way when the pipeline is empty."""

    def _reduction(self, action: Action) -> tuple[Any, tuple[int, ...]]:
        members = self._groups[action.reduction, self._rank]
        return (action.reduction, members[0], action.batch), members

    def reduce_start(self, action: Action) -> None:
        key, members = self._reduction(action)
        takes_s = self._durations.of_reduction(action.reduction)
        self._meetings.come(key, self._now_s, self._reduced, len(members), takes_s)
        self._reduced = key

    def reduce_wait(self, action: Action) -> None:
        self._now_s = max(self._now_s, self._meetings.ended_s(self._reduction(action)[0]))

    def update(self, action: Action) -> None:
        if (action.stage, action.batch) not in self._updated:
            self._updated.add((action.stage, action.batch))
            self._compute(action)


@pytest.mark.parametrize("late_receives", [False, True])
@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "options"),
    [
        ("2bw", 4, 6, {}),
        ("2bw", 3, 4, {"extra_in_flight": 1}),
        ("2bw", 4, 8, {"delayed_microbatches": 4}),
        ("pipedream", 4, 1, {}),
        ("1f1b-flush", 4, 6, {}),
        ("gpipe", 3, 4, {}),
        ("inter-layer", 3, 2, {}),
        ("gems", 4, 4, {}),
        ("chimera", 4, 8, {}),
        ("mixpipe", 4, 4, {"k": 2, "gamma": 1}),
    ],
    ids=str,
)
def test_every_action_runs_when_the_simulator_says(
    name: str, stages: int, microbatches: int, options: dict[str, int], late_receives: bool
):
    rng = random.Random(f"{name}{options}")
    schedule = replace(
        lower(build(name, stages=stages, microbatches=microbatches, **options)), late_receives=late_receives
    )
    durations = Durations(
        forward_s=tuple(rng.randint(6, 14) for _ in range(stages)),
        backward_s=tuple(rng.randint(12, 28) for _ in range(stages)),
        update_s=3,
        send_s=tuple(rng.randint(1, 9) for _ in range(stages - 1)),
        gradients_s=5,
        embedding_s=2,
        norm_s=4,
    )
    meetings = Meetings()
    ranks = [VirtualRank(rank, schedule, durations, meetings) for rank in range(len(schedule.programs))]
    with ThreadPoolExecutor(len(ranks)) as threads:
        runs = [threads.submit(rank.run) for rank in ranks]
    outcome = run(schedule, RUNS, durations, model=Model.POSTED)
    assert not outcome.blocked
    for of_rank, timed in zip(runs, outcome.timed, strict=True):
        expected = [(one.action.shifted(one.call), one.start_s, one.end_s) for one in timed]
        assert of_rank.result() == expected
