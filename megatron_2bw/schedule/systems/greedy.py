"""Finds the order of passes on ranks that are part of two pipelines, by running all of them together."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.clock import SLOTS
from megatron_2bw.schedule.systems.directions import Pass, stage_of


class Limits(NamedTuple):
    """How many forwards a rank runs ahead."""

    each_way: tuple[int, int]
    """Before its first backward: so many down and up."""
    in_flight: int
    """At most, at any time."""
    twice: int = 0
    """After so many backwards two forwards follow."""
    fills: bool = False
    """Two forwards follow for as long as `in_flight` allows, however many backwards there were."""
    yields: bool = False
    """A backward that is ready takes the turn of a forward that is not; `each_way` holds all the time, and one more."""


class Rank:
    """What one rank has done, and what it has to do next."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.passes: list[Pass] = []
        self.free_at = 0
        self._forwards = self._backwards = 0
        self._open = [0, 0]
        """Forwards without their backward, down and up."""
        self.most_open = 0
        self._due = sum(limits.each_way)
        """Forwards before the next backward."""

    def wanted(self, microbatches: int) -> ActionType:
        return ActionType.FORWARD if self._due and self._forwards < microbatches else ActionType.BACKWARD

    @property
    def yields(self) -> bool:
        """Whether a backward that is ready may take the turn of a forward that is not."""
        return self.limits.yields and self._backwards > 0

    def allows(self, type_: ActionType, way: int) -> bool:
        """Whether there is room for another pass down (0) or up (1)."""
        if type_ is ActionType.BACKWARD:
            return True
        room = self.limits.each_way[way] - self._open[way]
        if not self._backwards:
            return room > 0
        return not self.limits.yields or (room >= 0 and sum(self._open) < self.limits.in_flight)

    def run(self, one: Pass, now: int) -> int:
        """Returns when it ends."""
        self.passes.append(one)
        if one.type is ActionType.FORWARD:
            self._forwards += 1
            self._open[one.microbatch % 2] += 1
            self.most_open = max(self.most_open, sum(self._open))
            self._due -= 1
            self.free_at = now + SLOTS[ActionType.FORWARD]
        else:
            self._backwards += 1
            self._open[one.microbatch % 2] -= 1
            self._due = 2 if self._takes_two() else 1
            self.free_at = now + SLOTS[ActionType.BACKWARD]
        return self.free_at

    def _takes_two(self) -> bool:
        if self.limits.fills:
            return sum(self._open) + 2 <= self.limits.in_flight
        return self._backwards <= self.limits.twice


class _Ready(NamedTuple):
    """A pass whose input is there."""

    since: int
    one: Pass
    stage: int


_Queued = tuple[tuple[int, ...], _Ready]
"""What is ready, behind what its preference says; no two of a rank and type say the same."""
Preference = Callable[[_Ready], tuple[int, ...]]
"""The least goes first."""


def _longest_ready(ready: _Ready) -> tuple[int, ...]:
    return ready.since, ready.one.microbatch // 2, -ready.stage


def _oldest(ready: _Ready) -> tuple[int, ...]:
    return ready.one.microbatch // 2, -ready.stage, ready.since


def _longest_way_to_go(ready: _Ready) -> tuple[int, ...]:
    return -ready.stage, ready.one.microbatch // 2, ready.since


def _earliest_due(ready: _Ready) -> tuple[int, ...]:
    """Of an endless run in which no rank is ever idle: every microbatch takes three slots from stage to stage, down and
    back, and every six slots one begins in each direction. Pass after pass fits beside those of the other direction, for
    a rank's two stages are an odd number apart."""
    way = ready.stage if ready.one.type is ActionType.FORWARD else -ready.stage
    return (2 * (ready.one.microbatch // 2) + way,)


PREFERENCES = tuple(product((_longest_ready, _oldest), (_longest_ready, _longest_way_to_go, _oldest)))
"""Of forwards, of backwards."""
PREFERENCES_OF_MANY = ((_oldest, _oldest), (_oldest, _earliest_due), (_earliest_due, _earliest_due))
"""The same, of more microbatches than stages."""


class Greedy:
    """Runs all ranks together; each takes the preferred one of what is ready, of the type that it wants.

    Args:
        stages: as many as ranks.
        microbatches: half of them go down, half up.
        limits: of each rank.
        preferences: among forwards, and among backwards.
    """

    def __init__(
        self, stages: int, microbatches: int, limits: list[Limits], preferences: dict[ActionType, Preference]
    ) -> None:
        self.now = 0
        """In slots; after a run, when it ended."""
        self.ranks = [Rank(limit) for limit in limits]
        self._stages, self._microbatches, self._preferences = stages, microbatches, preferences
        self._ready: list[dict[ActionType, tuple[list[_Queued], list[_Queued]]]] = [
            {type_: ([], []) for type_ in SLOTS} for _ in limits
        ]
        """By rank, type and way: heaps."""
        self._touched = set(range(len(limits)))
        """Ranks that may start something now, having ended a pass or got an input."""
        self._ends: dict[int, list[tuple[int, Pass]]] = {}
        """By time: rank and pass."""
        for microbatch in range(min(2, microbatches)):
            self._let_in(microbatch)

    def run(self) -> bool:
        """Whether all passes ran; False if ranks wait for each other."""
        self._start()
        while self._ends:
            self.now = min(self._ends)
            for rank, one in self._ends.pop(self.now):
                self._touched.add(rank)
                self._hand_on(rank, one)
            self._start()
        return all(len(rank.passes) == 2 * self._microbatches for rank in self.ranks)

    def _start(self) -> None:
        for number in sorted(self._touched):
            rank = self.ranks[number]
            if rank.free_at > self.now:
                continue
            wanted = rank.wanted(self._microbatches)
            ready = self._ready_of(wanted, number)
            if not ready and rank.yields:
                wanted = ActionType.BACKWARD
                ready = self._ready_of(wanted, number)
            if ready:
                _, first = heappop(min(ready))
                if first.stage == 0 and wanted is ActionType.FORWARD:
                    self._let_in(first.one.microbatch + 2)
                self._ends.setdefault(rank.run(first.one, self.now), []).append((number, first.one))
        self._touched.clear()

    def _ready_of(self, type_: ActionType, number: int) -> list[list[_Queued]]:
        """Both ways, as far as there is something, and room for it."""
        heaps = self._ready[number][type_]
        return [heap for way, heap in enumerate(heaps) if heap and self.ranks[number].allows(type_, way)]

    def _let_in(self, microbatch: int) -> None:
        """The next one of its direction: all are ready from the beginning, and none is preferred to one before it."""
        if microbatch < self._microbatches:
            self._make_ready(stage_of(0, microbatch, self._stages), Pass(ActionType.FORWARD, microbatch), 0)

    def _hand_on(self, rank: int, one: Pass) -> None:
        """To the next stage, or back from the last one."""
        stage = stage_of(rank, one.microbatch, self._stages)
        if one.type is ActionType.FORWARD and stage == self._stages - 1:
            self._make_ready(rank, Pass(ActionType.BACKWARD, one.microbatch), self.now)
            return
        following = stage + (1 if one.type is ActionType.FORWARD else -1)
        if following >= 0:
            # The rank of a stage is the stage of a rank, seen in the same direction.
            self._make_ready(stage_of(following, one.microbatch, self._stages), one, self.now)

    def _make_ready(self, rank: int, one: Pass, since: int) -> None:
        ready = _Ready(since, one, stage_of(rank, one.microbatch, self._stages))
        heap = self._ready[rank][one.type][one.microbatch % 2]
        heappush(heap, (self._preferences[one.type](ready), ready))
        self._touched.add(rank)
