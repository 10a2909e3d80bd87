"""What every rank did and when, simulated or measured, and the numbers that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from megatron_2bw.schedule.action import COMPUTE, WORK, Action, ActionType
from megatron_2bw.schedule.durations import Seconds

REDUCTIONS, DATA = "reductions", "data"
"""Rows beside the actions: chains of reductions, and the reading of microbatches within forwards."""


class Event(NamedTuple):
    """One action; its batch and version count from the start of the run.

    Simulated ones are forwards, backwards and updates; measured ones also receives and waits for reductions, for as
    long as a rank stood still in them.
    """

    action: Action
    start_s: Seconds
    end_s: Seconds


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Events of all ranks, on one clock.

    >>> F, B = Action.parse("0F0v-1"), Action.parse("0B0v-1")
    >>> Timeline(events=((Event(F, 0, 1), Event(B, 1, 3)), (Event(F._replace(stage=1), 1, 2),))).bubble_ratio
    Fraction(1, 3)
    """

    events: tuple[tuple[Event, ...], ...]
    """Per rank, in the order in which they ran; measured events may be any (action, start_s, end_s)."""
    name: str = ""
    """For titles."""
    beside: Mapping[str, tuple[tuple[Event, ...], ...]] = field(default_factory=dict)
    """By row, then per rank: what ran beside these events, such as reductions in the background."""

    @cached_property
    def start_s(self) -> Seconds:
        """When the first event starts."""
        return min((event.start_s for events in self.events for event in events), default=0)

    @cached_property
    def end_s(self) -> Seconds:
        """When the last event ends."""
        return max((event.end_s for events in self.events for event in events), default=0)

    @property
    def makespan_s(self) -> Seconds:
        """From the first start to the last end over all ranks."""
        return self.end_s - self.start_s

    @cached_property
    def bubble_ratio(self) -> Seconds:
        """Idle share of all ranks' time: what is left of ``ranks * makespan`` after F, B and UPDATE.

        An update is work, not bubble; waiting for a transfer or a reduction is bubble.
        """
        total_s = len(self.events) * self.makespan_s
        return ratio(total_s - work_s(self), total_s) if total_s else 0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank: most forwards at once that had started and whose backward had not ended."""
        return tuple(_peak_in_flight(events) for events in self.events)

    @property
    def peak_versions(self) -> tuple[int, ...]:
        """Per rank: most weight versions of one stage that were alive at once.

        A version is alive from the update that creates it until its last forward or backward; the
        newest one is always alive.
        """
        return tuple(_peak_versions(events) for events in self.events)


def work_s(timeline: Timeline) -> Seconds:
    """Time spent in F, B and UPDATE, summed over ranks."""
    return sum(e.end_s - e.start_s for events in timeline.events for e in events if e.action.type in WORK)


def ratio(part: Seconds, whole: Seconds) -> Fraction | float:
    """``part / whole``, exact if both are."""
    return Fraction(part, whole) if isinstance(part, int) and isinstance(whole, int) else part / whole


def percent(share: Seconds) -> str:
    """With one decimal."""
    return f"{100 * float(share):.1f}%"


def _peak_in_flight(events: tuple[Event, ...]) -> int:
    peak = now = 0
    for event in events:
        if event.action.type is ActionType.FORWARD:
            now += 1
            peak = max(peak, now)
        elif event.action.type is ActionType.BACKWARD:
            now -= 1
    return peak


def _peak_versions(events: tuple[Event, ...]) -> int:
    last_use: dict[int, dict[int, int]] = defaultdict(dict)
    for index, event in enumerate(events):
        if event.action.type in COMPUTE:
            last_use[event.action.stage][max(event.action.version, 0)] = index
    peak = min(len(last_use), 1)
    for index, event in enumerate(events):
        if event.action.type is ActionType.UPDATE:
            created = event.action.batch + 1
            uses = last_use[event.action.stage].items()
            peak = max(peak, 1 + sum(version < created and used > index for version, used in uses))
    return peak
