"""MixPipe: Chimera that injects fewer microbatches at first, for less memory, and more of them early, for fewer bubbles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.directions import Pass, bidirectional, check_even, stage_of
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule

FORWARD_SLOTS, BACKWARD_SLOTS = 1, 2
"""How long the order of passes takes them to be; the paper's section III-B draws them so."""


def mixpipe(stages: int, microbatches: int, *, k: int | None = None, gamma: int | None = None) -> Schedule:
    """Start with k microbatches in both directions together, then alternate; take in gamma more on the way.

    Activations at most ``k + gamma``. With ``k = d`` and ``gamma = 0`` it takes as long as Chimera. More than d
    microbatches keep up to ``3d/2 - 1`` in flight. Two copies of the weights, of one version; no delay.

    Args:
        stages: d, even.
        microbatches: d, or more without k and gamma; even.
        k: even, 2 to d (default: d).
        gamma: 0 to ``(d - k)/2`` (default: 0).

    Raises:
        ScheduleError: other numbers.

    Source: Zhang et al., "MixPipe", DAC 2023, sections III-B and III-C. Where several passes could run, the paper
    does not say which; of a few ways to choose we take the first that lasts as long as its formula says, or else
    the shortest.

    >>> from megatron_2bw.schedule.draw import grid
    >>> print(grid(mixpipe(4, 4, k=2, gamma=1), batches=1))
    rank 0  a0 .  .  a1 A1--- a2 .  .  .  a3 A3--- A0--- .  .  A2---|
    rank 1  .  a0 a1 .  .  .  A1--- a2 a3 A0--- .  A3--- A2--- .  . |
    rank 2  .  a1 a0 .  .  .  A0--- a3 a2 A1--- .  A2--- A3--- .  . |
    rank 3  a1 .  .  a0 A0--- a3 .  .  .  a2 A2--- A1--- .  .  A3---|
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    check_even("mixpipe", stages)
    if microbatches % 2 or microbatches < stages:
        raise ScheduleError(
            f"mixpipe sends as many microbatches up as down, at least {stages} in all, and got {microbatches}: "
            "use an even number, not below the depth"
        )
    if microbatches > stages:
        if k is not None or gamma is not None:
            raise ScheduleError(
                f"mixpipe got k or gamma with {microbatches} microbatches on {stages} stages: they say how to run one "
                "microbatch per stage; leave them out, or use as many microbatches as stages"
            )
        return _best(
            stages, microbatches, [[_Limits.most(rank, stages, microbatches // 2) for rank in range(stages)]], None
        )
    k, gamma = stages if k is None else k, gamma or 0
    if k % 2 or not 2 <= k <= stages:
        raise ScheduleError(f"mixpipe got k = {k} (--mixpipe-k); use an even number from 2 to the depth, {stages}")
    if not 0 <= gamma <= (stages - k) // 2:
        raise ScheduleError(
            f"mixpipe got gamma = {gamma} (--mixpipe-gamma); with k = {k}, use 0 to (d - k)/2 = {(stages - k) // 2}"
        )
    choices = [
        [_Limits.of(rank, stages, k, gamma, fills=fills) for rank in range(stages)]
        for fills in ((True, False) if k < stages else (False,))
    ]
    return _best(stages, microbatches, choices, claimed_span(stages, k, gamma))


def claimed_span(stages: int, k: int, gamma: int) -> int:
    """Slots of one batch, as the paper has it: ``3*(d + N_bubbles)``, ``N_bubbles = (5d - 3k - 4)/3 - gamma``.

    It cannot be reached everywhere: with at most ``k + gamma`` in flight, a batch takes at least
    ``3*d*(d+1) / (2*(k+gamma))``, which is more for d = 10, k = 2, for one.

    >>> claimed_span(4, 2, 1)
    19
    """
    return 8 * stages - 3 * k - 4 - 3 * gamma


class _Limits(NamedTuple):
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

    @classmethod
    def of(cls, rank: int, stages: int, k: int, gamma: int, *, fills: bool) -> _Limits:
        """Section III-B: the two ranks in the middle start with k in flight, the others with fewer."""
        is_middle = rank in (stages // 2 - 1, stages // 2)
        each_way = min(k // 2, stages - rank), min(k // 2, rank + 1)
        return cls(each_way, k + gamma, gamma, fills and not is_middle)

    @classmethod
    def most(cls, rank: int, stages: int, each_way: int) -> _Limits:
        """Section III-C: ``d + min(rank, d-1-rank)`` in flight, if there are so many."""
        far, near = min(stages - 1, each_way), 1 + min(rank, stages - 1 - rank)
        return cls((far, near) if rank < stages // 2 else (near, far), far + near, yields=True)


class _Rank:
    """What one rank has done, and what it has to do next."""

    def __init__(self, limits: _Limits) -> None:
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

    def allows(self, one: Pass) -> bool:
        """Whether there is room for it."""
        if one.type is ActionType.BACKWARD:
            return True
        room = self.limits.each_way[one.microbatch % 2] - self._open[one.microbatch % 2]
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
            self.free_at = now + FORWARD_SLOTS
        else:
            self._backwards += 1
            self._open[one.microbatch % 2] -= 1
            self._due = 2 if self._takes_two() else 1
            self.free_at = now + BACKWARD_SLOTS
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


Preference = Callable[[_Ready], tuple[int, ...]]
"""The least goes first."""


def _longest_ready(ready: _Ready) -> tuple[int, ...]:
    return ready.since, ready.one.microbatch // 2, -ready.stage


def _oldest(ready: _Ready) -> tuple[int, ...]:
    return ready.one.microbatch // 2, -ready.stage, ready.since


def _longest_way_to_go(ready: _Ready) -> tuple[int, ...]:
    return -ready.stage, ready.one.microbatch // 2, ready.since


_PREFERENCES = tuple(product((_longest_ready, _oldest), (_longest_ready, _longest_way_to_go, _oldest)))
"""Of forwards, of backwards."""


def _best(stages: int, microbatches: int, choices: Iterable[list[_Limits]], claimed: int | None) -> Schedule:
    """Choose in each of the ways; take the first that lasts as long as the paper says, or else the shortest."""
    found = []
    for limits, (forwards, backwards) in product(choices, _PREFERENCES):
        greedy = _Greedy(stages, microbatches, limits, {ActionType.FORWARD: forwards, ActionType.BACKWARD: backwards})
        if greedy.run():
            found.append((greedy.now != claimed, greedy.now, greedy))
    *_, best = min(found, key=lambda one: one[:2])
    in_flight = tuple(rank.most_open for rank in best.ranks)
    return bidirectional("mixpipe", stages, microbatches, [rank.passes for rank in best.ranks], in_flight)


class _Greedy:
    """Runs all ranks together; each takes what has been ready for longest of the type that it wants."""

    def __init__(
        self, stages: int, microbatches: int, limits: list[_Limits], preferences: dict[ActionType, Preference]
    ) -> None:
        self.now = 0
        self.ranks = [_Rank(limit) for limit in limits]
        self._stages, self._microbatches, self._preferences = stages, microbatches, preferences
        self._ready: list[list[_Ready]] = [[] for _ in limits]
        self._ends: dict[int, list[tuple[int, Pass]]] = {}
        """By time: rank and pass."""
        for microbatch in range(microbatches):
            self._make_ready(0 if microbatch % 2 == 0 else stages - 1, Pass(ActionType.FORWARD, microbatch), 0)

    def run(self) -> bool:
        """Whether all passes ran; False if ranks wait for each other."""
        self._start()
        while self._ends:
            self.now = min(self._ends)
            for rank, one in self._ends.pop(self.now):
                self._hand_on(rank, one)
            self._start()
        return all(len(rank.passes) == 2 * self._microbatches for rank in self.ranks)

    def _start(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.free_at > self.now:
                continue
            wanted = rank.wanted(self._microbatches)
            ready = self._ready_of(wanted, number)
            if not ready and rank.yields:
                wanted = ActionType.BACKWARD
                ready = self._ready_of(wanted, number)
            if ready:
                first = min(ready, key=self._preferences[wanted])
                self._ready[number].remove(first)
                self._ends.setdefault(rank.run(first.one, self.now), []).append((number, first.one))

    def _ready_of(self, type_: ActionType, number: int) -> list[_Ready]:
        return [r for r in self._ready[number] if r.one.type is type_ and self.ranks[number].allows(r.one)]

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
        self._ready[rank].append(_Ready(since, one, stage_of(rank, one.microbatch, self._stages)))
