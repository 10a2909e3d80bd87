"""The thread of the reductions and the computation's stream wait for each other's work on the device."""

from __future__ import annotations

import pytest
import torch

from megatron_2bw.runtime.background import Background
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Action

pytestmark = pytest.mark.gpu
CYCLES = 200_000_000
"""Of the device's clock: about a tenth of a second."""


def test_the_background_sees_what_was_computed_before_and_the_caller_what_it_computed() -> None:
    device = torch.device("cuda")
    background = Background(device, "test")
    tensor = torch.zeros(1, device=device)

    def double() -> None:
        torch.cuda._sleep(CYCLES)
        tensor.mul_(2)

    for _ in range(3):
        torch.cuda._sleep(CYCLES)
        tensor.add_(1)
        background.result(background.submit(double))
        tensor.add_(1)
    assert tensor.item() == 21  # x becomes 2 (x + 1) + 1, three times.


def test_the_caller_computes_while_the_background_does() -> None:
    """Both streams are busy at once: the events of one lie between those of the other."""
    device = torch.device("cuda")
    background = Background(device, "test")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]

    def slow() -> None:
        torch.cuda._sleep(4 * CYCLES)
        events[2].record()

    events[0].record()
    future = background.submit(slow)
    torch.cuda._sleep(CYCLES)
    events[1].record()
    background.result(future)
    torch.cuda.synchronize()
    assert events[0].elapsed_time(events[1]) < events[0].elapsed_time(events[2])


def test_actions_are_timed_on_the_device() -> None:
    recorder = Recorder(torch.device("cuda"))
    action = Action.parse("0F0v0")
    start = recorder.mark()
    torch.cuda._sleep(CYCLES)
    recorder.note(action, start, recorder.mark())
    (event,) = recorder.events()
    assert event.action == action
    assert event.end_s - event.start_s > 0.01
