"""When every action of a rank ran, on the device that ran it."""

from __future__ import annotations

import time
from collections import deque

import torch

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.timeline import Event


class Recorder:
    """Collects marks: host times on a CPU, stream events on a GPU, resolved when asked for.

    Args:
        device: where the stage computes.
        limit: actions kept, the newest ones.
    """

    def __init__(self, device: torch.device, limit: int = 100_000) -> None:
        self._notes: deque[tuple[Action, object, object]] = deque(maxlen=limit)
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

    def events(self) -> list[Event]:
        """All kept actions in the order in which they ran, in seconds of the host's clock; waits for the device."""
        if self._origin is None:
            return [Event(action, start, end) for action, start, end in self._notes]
        torch.cuda.synchronize()
        event, host_s = self._origin

        def seconds(mark: torch.cuda.Event) -> float:
            return host_s + event.elapsed_time(mark) / 1000

        return [Event(action, seconds(start), seconds(end)) for action, start, end in self._notes]

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
