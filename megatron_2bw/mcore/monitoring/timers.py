"""Megatron's timers, without waiting for the device in the middle of a call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.timers import DummyTimer, TimerBase, Timers

from megatron_2bw.runtime.recorder import event_now

_INTERVAL = "interval-time"
"""Megatron's name for the time since the last log line, without evaluation and checkpoints."""


class CallTimers(Timers):
    """Megatron's timers; inside a call of our executor they mark the stream where Megatron's wait for the device.

    To wait for the device is to wait for every receive that was posted early, and one of these may
    depend on what this rank has yet to send. What is marked in a call is added to Megatron's timers
    at the end of the next one, when the device has done it in any case; on CPUs, of the same one. The time between log
    lines is the host's, which is at most two computations ahead.
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        super().__init__(log_level, log_option)
        self._is_inside = False
        self._marked: dict[str, _MarkedTimer] = {}
        self._interval = _HostTimer(_INTERVAL)

    def __call__(self, name: str, log_level: int | None = None) -> TimerBase:
        if name == _INTERVAL:
            return self._interval
        timer = super().__call__(name, log_level)
        if not self._is_inside or isinstance(timer, DummyTimer):
            return timer
        return self._marked.setdefault(name, _MarkedTimer(timer))

    @contextmanager
    def inside_call(self) -> Iterator[None]:
        """The time of one call."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        for timer in self._marked.values():
            timer.add_to_megatrons()


class _MarkedTimer:
    """Takes the place of one of Megatron's timers inside a call."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer
        self._start: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._spans_before: list[tuple[Any, Any]] = []
        """Of the call before."""

    def start(self, barrier: bool = False) -> None:
        self._start = _mark()

    def stop(self, barrier: bool = False) -> None:
        self._spans.append((self._start, _mark()))

    def add_to_megatrons(self) -> None:
        if torch.cuda.is_available():
            self._spans, self._spans_before = self._spans_before, self._spans
        elapsed_s = sum(_seconds(start, end) for start, end in self._spans)
        self._timer.set_elapsed(self._timer.elapsed(reset=False) + elapsed_s)
        self._spans.clear()


class _HostTimer(TimerBase):
    """Waits neither for the device nor, as Megatron's does around every log line, for all ranks."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._elapsed_s = self._active_s = 0.0
        self._start_s: float | None = None

    def start(self, barrier: bool = False) -> None:
        self._start_s = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        span_s = time.perf_counter() - self._start_s
        self._elapsed_s += span_s
        self._active_s += span_s
        self._start_s = None

    def reset(self) -> None:
        self._elapsed_s = 0.0
        self._start_s = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        is_running = self._start_s is not None
        if is_running:
            self.stop()
        elapsed_s = self._elapsed_s
        if reset:
            self.reset()
        if is_running:
            self.start()
        return elapsed_s

    def active_time(self) -> float:
        """Seconds for which it has run so far."""
        return self._active_s


def _mark() -> Any:
    return event_now() if torch.cuda.is_available() else time.perf_counter()


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
