"""When every action of a rank ran, on the device that ran it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import NamedTuple

import torch

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.timeline import DATA, REDUCTIONS, Event

_NOTES_PER_ORIGIN = 1024


@dataclass(slots=True, eq=False)
class _Origin:
    """A moment of a GPU, for marks soon after it.

    CUDA counts milliseconds between two events in single precision: the distance must stay short.
    """

    event: torch.cuda.Event
    before: _Origin | None
    """From which its time is counted, as long as that is not known."""
    known_s: float = 0.0
    """On the host's clock, from when there is none before."""

    def time_s(self) -> float:
        """On the host's clock; waits for it where nobody has asked before."""
        unknown = [self]
        while unknown[-1].before is not None:
            unknown.append(unknown[-1].before)
        known = unknown.pop()
        while unknown:
            origin = unknown.pop()
            origin.event.synchronize()
            origin.known_s = known.known_s + known.event.elapsed_time(origin.event) / 1000
            origin.before, known = None, origin
        return known.known_s


class _Note(NamedTuple):
    """One action, or what ran beside it."""

    action: Action
    start: object
    end: object
    origin: _Origin | None
    """Of a GPU's marks: the newest origin when it was kept."""


class Recorder:
    """Collects marks: host times on a CPU, stream events on a GPU, resolved when asked for.

    Marks made on another thread or stream belong to what runs beside the actions.

    Args:
        device: where the stage computes.
        limit: actions kept, the newest ones.
    """

    def __init__(self, device: torch.device, *, limit: int = 100_000) -> None:
        self._device = device
        self._notes: deque[_Note] = deque(maxlen=limit)
        self._beside = {row: deque[_Note](maxlen=limit) for row in (REDUCTIONS, DATA)}
        self._appending = Lock()
        """Held where another thread may append, or ask for an origin's time."""
        self._origin: _Origin | None = None
        """The newest one, on a GPU."""
        self._noted = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = _Origin(event_now(), None, time.perf_counter())

    def mark(self) -> object:
        """This moment, as the device sees it."""
        return time.perf_counter() if self._origin is None else event_now()

    def note(self, action: Action, start: object, end: object) -> None:
        """Keep that ``action`` ran between two marks."""
        self._noted += 1
        if self._origin is not None and self._noted % _NOTES_PER_ORIGIN == 0:
            before, self._origin = self._origin, _Origin(event_now(), self._origin)
            if before.event.query():
                with self._appending:
                    before.time_s()  # It needs none before it any more: those without notes are let go.
        self._notes.append(_Note(action, start, end, self._origin))

    def note_beside(self, row: str, action: Action, start: object, end: object) -> None:
        """Keep what ran beside the actions, or within one of them, between two marks."""
        with self._appending:
            self._beside[row].append(_Note(action, start, end, self._origin))

    def timed[Result](self, row: str, action: Action, function: Callable[[], Result]) -> Callable[[], Result]:
        """``function``, kept as something that runs beside the actions."""

        def run() -> Result:
            start = self.mark()
            result = function()
            self.note_beside(row, action, start, self.mark())
            return result

        return run

    def events(self) -> list[Event]:
        """All kept actions in the order in which they ran, in seconds of the host's clock; waits for them."""
        return self._resolved(list(self._notes))

    def beside(self) -> dict[str, list[Event]]:
        """What ran beside them, by row."""
        with self._appending:
            rows = {row: list(notes) for row, notes in self._beside.items()}
        return {row: self._resolved(notes) for row, notes in rows.items()}

    def newest(self, actions: int, reductions: int) -> Callable[[], tuple[list[Event], list[Event]]]:
        """So many of the newest of both, as something to call from any thread; called by the thread that notes."""
        with self._appending:
            notes, beside = (
                list(islice(reversed(kept), count))[::-1]
                for kept, count in ((self._notes, actions), (self._beside[REDUCTIONS], reductions))
            )
        return lambda: (self._resolved(notes), self._resolved(beside))

    def _resolved(self, notes: list[_Note]) -> list[Event]:
        if self._origin is None:
            return [Event(note.action, note.start, note.end) for note in notes]
        with torch.cuda.device(self._device):
            for note in notes:  # On several streams; each start is before its end.
                note.end.synchronize()
            return [self._resolved_on_gpu(note) for note in notes]

    def _resolved_on_gpu(self, note: _Note) -> Event:
        with self._appending:
            origin_s = note.origin.time_s()
        start_s = origin_s + note.origin.event.elapsed_time(note.start) / 1000
        return Event(note.action, start_s, start_s + note.start.elapsed_time(note.end) / 1000)


def event_now() -> torch.cuda.Event:
    """Recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # Who waits gives its core away.
    event.record()
    return event
