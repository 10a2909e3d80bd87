"""Seconds per batch of pipelines in both directions, whatever stages and links are, by following the microbatches.

MixPipe's batch is followed as a whole. GEMS and Chimera run one unit of microbatches after the other, each in the same
order. How long one takes depends on when ranks and links were free of the one before. So once all of these are equally
much later than some units ago, the units since then repeat, and the rest is not followed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_2bw.planner.pipeline.followed import shift_of
from megatron_2bw.planner.pipeline.periods import Pipeline, flush_s
from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.clock import passes
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.systems.chimera import slots
from megatron_2bw.schedule.systems.directions import Pass, stage_of


class _Turn(NamedTuple):
    """One pass of a unit."""

    slot: int
    """Later than that of whatever it needs."""
    rank: int
    one: Pass


def gems_s(pipeline: Pipeline) -> float:
    """Exact; a unit is a microbatch down and one up.

    Source: Jain et al., "GEMS", SC 2020, section 3.

    >>> from megatron_2bw.planner.pipeline.periods import Stage
    >>> even = Stage(1, 2)
    >>> gems_s(Pipeline(stages=4, microbatches=4, first=even, middle=even, last=even))
    39
    """
    stages = pipeline.stages

    def turns() -> Iterator[_Turn]:
        for microbatch in range(2):
            for stage in range(stages):
                rank, start = stage_of(stage, microbatch, stages), 2 * stages * microbatch
                yield _Turn(start + stage, rank, Pass(ActionType.FORWARD, microbatch))
                yield _Turn(start + 2 * stages - 1 - stage, rank, Pass(ActionType.BACKWARD, microbatch))

    return _units_s(pipeline, turns(), microbatches=2, length=4 * stages)


def chimera_s(pipeline: Pipeline) -> float:
    """Exact; a unit is a microbatch per stage, and begins while the one before comes to an end.

    Source: Li and Hoefler, "Chimera", SC 2021, section 3.5 (direct concatenation).

    >>> from megatron_2bw.planner.pipeline.periods import Stage
    >>> even = Stage(1, 2)
    >>> chimera_s(Pipeline(stages=4, microbatches=4, first=even, middle=even, last=even))
    16
    """
    stages = pipeline.stages
    turns = (_Turn(slot, rank, one) for rank in range(stages) for slot, one in slots(rank, stages, stages))
    return _units_s(pipeline, turns, microbatches=stages, length=2 * stages)


def ordered_s(schedule: Schedule, pipeline: Pipeline) -> float:
    """Exact, in the order of the Programs of any ``schedule`` in both directions; all of a batch is one unit.

    >>> from megatron_2bw.planner.pipeline.periods import Stage
    >>> from megatron_2bw.schedule.registry import build
    >>> even = Stage(1, 2)
    >>> p = Pipeline(stages=4, microbatches=4, first=even, middle=even, last=even)
    >>> ordered_s(build("mixpipe", stages=4, microbatches=4, k=2, gamma=1), p)
    19
    """
    ends, stages = passes(schedule), pipeline.stages
    turns = (
        _Turn(end, stage_of(stage, microbatch, stages), Pass(type_, microbatch))
        for (type_, stage, microbatch, _), end in ends.items()
    )
    return _units_s(pipeline, turns, microbatches=pipeline.microbatches, length=max(ends.values()) + 1)


def least_both_ways_s(pipeline: Pipeline, *, in_flight: int = 0) -> float:
    """What Chimera and MixPipe take without waits: nowhere too long.

    Every rank has all passes of two stages to do. At least as many stages as there are between it and the nearer end
    are passed before its first forward, and again after its last backward. And none has more forwards ``in_flight``
    than that, if not 0: on the first rank, one of a microbatch down stays for a turn over all stages, one of a
    microbatch up for one over the last.
    """
    p, up, way_s, longest_s = pipeline, pipeline.microbatches // 2, 0.0, 0.0
    if in_flight:
        last = p.stages - 1
        longest_s = ((p.microbatches - up) * p.turn_s(0, last) + up * p.turn_s(last, last)) / in_flight
    stages = p.in_order
    for near in range(p.stages // 2):
        for rank in (near, p.stages - 1 - near):
            down_s, up_s = stages[rank].pair_s, stages[p.stages - 1 - rank].pair_s
            longest_s = max(longest_s, way_s + (p.microbatches - up) * down_s + up * up_s)
        way_s += stages[near].pair_s + 2 * p.links_s[near]
    return max(longest_s, p.turn_s(0, p.stages - 1)) + flush_s(p)


class _Step(NamedTuple):
    """A turn, by where the times are that it needs and that it changes."""

    ago: int
    """1 for a turn of the unit before."""
    microbatch: int
    """Of its unit."""
    rank: int
    awaits: int
    takes_s: float
    gives: int
    link: int
    """Which carries one tensor after the other; the rank itself where nothing is sent."""
    send_s: float


def _units_s(p: Pipeline, turns: Iterable[_Turn], *, microbatches: int, length: int) -> float:
    """Units of so many ``microbatches``, one begun every ``length`` slots.

    From one beginning to the next, a round has what is in these slots: of the unit that begins, and the end of the one
    before. The last round has that end alone.
    """
    steps, times_s = _steps(p, turns, microbatches, length)
    begun, later_s, full = 0, 0, p.microbatches // microbatches
    earlier = deque[list[float]](maxlen=p.stages)
    while True:
        left = p.microbatches - begun * microbatches
        present = [step for step in steps if step.ago <= begun and step.microbatch < left + step.ago * microbatches]
        if not present:
            return max(times_s[: p.stages]) + later_s + flush_s(p)
        for _, _, rank, awaits, takes_s, gives, link, send_s in present:
            times_s[rank] = end_s = max(times_s[rank], times_s[awaits]) + takes_s
            times_s[link] = times_s[gives] = max(end_s, times_s[link]) + send_s
        begun += 1
        earlier.appendleft(times_s[:-1])
        for units, before_s in enumerate(itertools.islice(earlier, 1, None), 1):
            repeats = (full - begun) // units
            shift_s = shift_of(before_s, earlier[0]) if repeats > 0 else None
            if shift_s is not None:
                begun, later_s = begun + repeats * units, later_s + repeats * shift_s
                break


def _steps(p: Pipeline, turns: Iterable[_Turn], microbatches: int, length: int) -> tuple[list[_Step], list[float]]:
    """In the order of time; and all times, 0 at first, and for good the last one, which is for what needs nothing.

    The others are of ranks, of each microbatch's forwards and backwards, and of links, each way and of each direction.
    """
    stages, last = p.in_order, p.stages - 1
    first_link = p.stages + 2 * microbatches

    def step(turn: _Turn) -> _Step:
        microbatch, is_backward = turn.one.microbatch, turn.one.type is ActionType.BACKWARD
        stage = stage_of(turn.rank, microbatch, p.stages)
        chain = p.stages + 2 * microbatch
        to_link = stage - is_backward
        sends = 0 <= to_link < last
        return _Step(
            ago=turn.slot // length,
            microbatch=microbatch,
            rank=turn.rank,
            awaits=-1 if not is_backward and stage == 0 else chain + is_backward,
            takes_s=stages[stage][is_backward],
            gives=chain + (is_backward or stage == last),
            link=first_link + 4 * to_link + 2 * (microbatch % 2) + is_backward if sends else turn.rank,
            send_s=p.links_s[to_link] if sends else 0,
        )

    steps = [step(turn) for turn in sorted(turns, key=lambda turn: turn.slot % length)]
    return steps, [0] * (first_link + 4 * last + 1)
