"""What a recorder of a long run keeps, with events of a GPU that is not there."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import ClassVar

import pytest
import torch

from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Action


class Event:
    """In order, a millisecond apart."""

    alive: ClassVar[weakref.WeakSet[Event]] = weakref.WeakSet()
    now_ms = 0

    def __init__(self, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        self.alive.add(self)

    def record(self) -> None:
        self.at_ms = Event.now_ms = Event.now_ms + 1

    def query(self) -> bool:
        return self.at_ms < Event.now_ms - 2

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        assert abs(other.at_ms - self.at_ms) < 3 * 1024, "too far for single precision"
        return float(other.at_ms - self.at_ms)


def test_a_long_run_keeps_what_its_newest_notes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("Event", Event), ("synchronize", lambda _: None), ("device", contextlib.nullcontext)):
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = Recorder(torch.device("cuda"), limit=2000)
    action = Action.parse("0F0v0")
    for _ in range(50_000):
        recorder.note(action, recorder.mark(), recorder.mark())
    gc.collect()
    assert len(Event.alive) < 2 * 2000 + 8
    first, *_, last = recorder.events()
    assert last.end_s - last.start_s == pytest.approx(1e-3)
    # Two marks per note, and an origin every 1,024 notes.
    assert last.start_s - first.start_s == pytest.approx((1999 * 2 + 2) / 1000, abs=2e-3)
