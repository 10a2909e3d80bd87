"""When every action of a rank ran, on the device that ran it."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice

import torch

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.timeline import REDUCTIONS, Event

_Note = tuple[Action, object, object]


class Recorder:
    """Collects marks: host times on a CPU, stream events on a GPU, resolved when asked for.

    Marks made on another thread or stream belong to what runs beside the actions.

    Args:
        device: where the stage computes.
        limit: actions kept, the newest ones.
    """

    def __init__(self, device: torch.device, *, limit: int = 100_000) -> None:
        self._notes: deque[_Note] = deque(maxlen=limit)
        self._beside: defaultdict[str, deque[_Note]] = defaultdict(lambda: deque(maxlen=limit))
        self._origin: tuple[torch.cuda.Event, float] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = self._event(), time.perf_counter()

    def mark(self) -> object:
        """This moment, as the device sees it."""
        return time.perf_counter() if self._origin is None else self._event()

    def note(self, action: Action, start: object, end: object) -> None:
        """Keep that ``action`` ran between two marks."""
        self._notes.append((action, start, end))

    def note_beside(self, row: str, action: Action, start: object, end: object) -> None:
        """Keep what ran beside the actions, or within one of them, between two marks."""
        self._beside[row].append((action, start, end))

    def timed[Result](self, row: str, action: Action, function: Callable[[], Result]) -> Callable[[], Result]:
        """``function``, kept as something that runs beside the actions."""

        def run() -> Result:
            start = self.mark()
            result = function()
            self.note_beside(row, action, start, self.mark())
            return result

        return run

    def events(self) -> list[Event]:
        """All kept actions in the order in which they ran, in seconds of the host's clock; waits for the device."""
        return self._resolved(self._notes)

    def beside(self) -> dict[str, list[Event]]:
        """What ran beside them, by row."""
        return {row: self._resolved(notes) for row, notes in self._beside.items()}

    def newest(self, count: int) -> Callable[[], tuple[list[Event], list[Event]]]:
        """The newest ``count`` actions and the reductions kept so far, as something to call from any thread."""
        notes, reductions = (
            list(islice(reversed(kept), count))[::-1] for kept in (self._notes, self._beside[REDUCTIONS])
        )
        return lambda: (self._resolved(notes), self._resolved(reductions))

    def _resolved(self, notes: Iterable[_Note]) -> list[Event]:
        if self._origin is None:
            return [Event(action, start, end) for action, start, end in notes]
        torch.cuda.synchronize()
        event, host_s = self._origin

        def seconds(mark: torch.cuda.Event) -> float:
            return host_s + event.elapsed_time(mark) / 1000

        return [Event(action, seconds(start), seconds(end)) for action, start, end in notes]

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
