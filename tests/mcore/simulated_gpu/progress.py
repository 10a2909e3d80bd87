"""Whether ranks could wait for each other for ever, from what each has launched."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple


class Meeting(NamedTuple):
    """What ranks do together: none of them is done with it before all have begun."""

    group: str
    """The same on all its ranks."""
    ranks: tuple[int, ...]
    """Who takes part; of a transfer, source and destination."""
    number: int
    """Of the meetings of these ranks in this group, in the order in which one of them began them."""


class Step(NamedTuple):
    """Something that a rank has launched, on a line of its own."""

    line: str
    number: int
    """On that line, from 1."""
    after: dict[str, int]
    """By line of the same rank: the last step that is over when this one begins."""
    meeting: Meeting | None
    on_host: bool
    what: str


def stuck(ranks: Sequence[Sequence[Step]], *, one_queue: bool) -> list[str]:
    """What never begins, or never ends, one line per rank and line of it; empty if all ranks come to their end.

    Args:
        ranks: per rank, all its steps in the order in which they were launched.
        one_queue: as under ``CUDA_DEVICE_MAX_CONNECTIONS=1``: what is launched on a GPU cannot begin before all that
            was launched there before it has begun. What a host thread has yet to launch, as it waits, holds up nothing.
    """
    waiting = [_Rank(steps, one_queue=one_queue) for steps in ranks]
    present: Counter[Meeting] = Counter()
    attending: dict[Meeting, list[tuple[_Rank, Step]]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for rank in waiting:
            while (step := rank.begin()) is not None:
                moved = True
                if step.meeting is None:
                    rank.end(step)
                    continue
                present[step.meeting] += 1
                attending[step.meeting].append((rank, step))
                if present[step.meeting] == len(step.meeting.ranks):
                    for other, theirs in attending.pop(step.meeting):
                        other.end(theirs)
    return [f"rank {number}: {problem}" for number, rank in enumerate(waiting) for problem in rank.problems()]


class _Rank:
    """What one rank has yet to begin and to end."""

    def __init__(self, steps: Sequence[Step], *, one_queue: bool) -> None:
        self._lines: dict[str, deque[Step]] = defaultdict(deque)
        self._ended: Counter[str] = Counter()
        self._begun: dict[str, Step] = {}
        self._hosts = {step.line for step in steps if step.on_host}
        self._queue = [step for step in steps if not step.on_host] if one_queue else None
        for step in steps:
            self._lines[step.line].append(step)

    def begin(self) -> Step | None:
        """One that can begin; None if there is none."""
        for line in list(self._lines):
            step = self._lines[line][0]
            if not self._can_begin(step):
                continue
            self._lines[line].popleft()
            if not self._lines[line]:
                del self._lines[line]
            if self._queue is not None and not step.on_host:
                del self._queue[next(i for i, one in enumerate(self._queue) if one is step)]
            self._begun[line] = step
            return step
        return None

    def end(self, step: Step) -> None:
        self._ended[step.line] = step.number
        del self._begun[step.line]

    def problems(self) -> list[str]:
        ends = [f"{step.what} on {line} never ends" for line, step in self._begun.items()]
        return ends + [f"{steps[0].what} on {line} never begins" for line, steps in self._lines.items()]

    def _can_begin(self, step: Step) -> bool:
        if any(self._ended[line] < number for line, number in step.after.items()):
            return False
        # Last, as it takes longest to tell.
        return self._queue is None or step.on_host or next(filter(self._is_launched, self._queue)) is step

    def _is_launched(self, step: Step) -> bool:
        return all(self._ended[line] >= number for line, number in step.after.items() if line in self._hosts)
