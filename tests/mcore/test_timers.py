"""Timers inside a call mark the device's work; they do not wait for it."""

from __future__ import annotations

import time

import pytest
import torch


def test_no_timer_waits_for_the_device_inside_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_2bw.mcore.timers import CallTimers

    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    timers = CallTimers(2, "all")
    timers("optimizer", log_level=1).start()
    timers("optimizer").stop()
    assert len(waits) == 2  # Megatron's own.
    for _ in range(2):
        with timers.inside_call():
            timers("forward-compute", log_level=2).start(barrier=False)
            time.sleep(0.05)
            timers("forward-compute").stop()
    assert len(waits) == 2
    elapsed_s = timers("forward-compute").elapsed()
    assert 0.05 <= elapsed_s < 0.1  # The second call is added at the end of the third.


def test_timers_above_the_log_level_stay_silent_inside_a_call() -> None:
    from megatron_2bw.mcore.timers import CallTimers

    timers = CallTimers(1, "all")
    with timers.inside_call():
        timers("forward-compute", log_level=2).start()
        timers("forward-compute", log_level=2).stop()
