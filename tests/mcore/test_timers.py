"""Timers inside a call mark the device's work; they do not wait for it."""

from __future__ import annotations

import itertools

import pytest
import torch


def test_no_timer_waits_for_the_device_inside_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_2bw.mcore.monitoring import timers as ours

    waits: list[None] = []
    clock_s = itertools.count(0.0, 7.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    monkeypatch.setattr(ours, "_mark", lambda: next(clock_s))
    timers = ours.CallTimers(2, "all")
    timers("optimizer", log_level=1).start()
    timers("optimizer").stop()
    assert len(waits) == 2  # Megatron's own.
    for _ in range(2):
        with timers.inside_call():
            timers("forward-compute", log_level=2).start(barrier=False)
            timers("forward-compute").stop()
    assert len(waits) == 2
    assert timers("forward-compute").elapsed() == 14.0


def test_on_a_device_a_call_is_added_at_the_end_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_2bw.mcore.monitoring import timers as ours

    clock_s = itertools.count(0.0, 7.0)
    monkeypatch.setattr(ours, "_mark", lambda: next(clock_s))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timers = ours.CallTimers(2, "all")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    elapsed_s = []
    for _ in range(3):
        with timers.inside_call():
            timers("forward-compute", log_level=2).start()
            timers("forward-compute").stop()
        elapsed_s.append(timers("forward-compute").elapsed(reset=False))
    assert elapsed_s == [0.0, 7.0, 14.0]


def test_timers_above_the_log_level_stay_silent_inside_a_call() -> None:
    from megatron_2bw.mcore.monitoring.timers import CallTimers

    timers = CallTimers(1, "all")
    with timers.inside_call():
        timers("forward-compute", log_level=2).start()
        timers("forward-compute", log_level=2).stop()
    assert "forward-compute" not in timers._timers


def test_the_time_between_log_lines_waits_neither_for_the_device_nor_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_2bw.mcore.monitoring.timers import CallTimers

    def fail(*args: object, **keywords: object) -> None:
        raise AssertionError("waits")

    clock_s = itertools.count(0.0, 7.0)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(torch.distributed, "barrier", fail)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock_s))
    timers = CallTimers(0, "all")
    interval = timers("interval-time", log_level=0)
    interval.start(barrier=True)
    assert interval.elapsed(barrier=True, reset=False) == 7.0
    assert interval.elapsed(barrier=True) == 14.0  # Of a line, and of what follows.
    assert interval.elapsed(barrier=True) == 7.0
    interval.stop()
    interval.start()  # After evaluation.
    interval.stop()
    assert timers("interval-time").elapsed() == 14.0
    assert interval.active_time() == 35.0
