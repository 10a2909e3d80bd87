"""When every action of a rank ran, on the device that ran it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from threading import Lock
from typing import NamedTuple

import torch

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.timeline import DATA, REDUCTIONS, Event

_NOTES_PER_ORIGIN = 1024


class _Note(NamedTuple):
    """One action, or what ran beside it."""

    action: Action
    start: object
    end: object
    origin: int
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
        """Held where another thread may append."""
        self._origins: list[torch.cuda.Event] = []
        """CUDA counts milliseconds between two events in single precision: the distance must stay short."""
        self._origins_s: list[float] = []
        """Of those that were asked for, on the host's clock."""
        self._noted = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origins.append(self._event())
            self._origins_s.append(time.perf_counter())

    def mark(self) -> object:
        """This moment, as the device sees it."""
        return self._event() if self._origins else time.perf_counter()

    def note(self, action: Action, start: object, end: object) -> None:
        """Keep that ``action`` ran between two marks."""
        self._noted += 1
        if self._origins and self._noted % _NOTES_PER_ORIGIN == 0:
            self._origins.append(self._event())
        self._notes.append(_Note(action, start, end, len(self._origins) - 1))

    def note_beside(self, row: str, action: Action, start: object, end: object) -> None:
        """Keep what ran beside the actions, or within one of them, between two marks."""
        with self._appending:
            self._beside[row].append(_Note(action, start, end, len(self._origins) - 1))

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
        if not self._origins:
            return [Event(note.action, note.start, note.end) for note in notes]
        if not notes:
            return []
        with torch.cuda.device(self._device):
            for note in notes:  # On several streams; each start is before its end.
                note.end.synchronize()
            self._know_origins(max(note.origin for note in notes))

            def event(note: _Note) -> Event:
                origin, origin_s = self._origins[note.origin], self._origins_s[note.origin]
                start_s = origin_s + origin.elapsed_time(note.start) / 1000
                return Event(note.action, start_s, start_s + note.start.elapsed_time(note.end) / 1000)

            return [event(note) for note in notes]

    def _know_origins(self, last: int) -> None:
        """Add up the distances of the origins up to that one."""
        with self._appending:
            for before, after in itertools.pairwise(self._origins[len(self._origins_s) - 1 : last + 1]):
                after.synchronize()
                self._origins_s.append(self._origins_s[-1] + before.elapsed_time(after) / 1000)

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
