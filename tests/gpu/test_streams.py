"""The thread of the reductions and the computation's stream wait for each other's work on the device."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from megatron_2bw.runtime import recorder as recorder_module
from megatron_2bw.runtime.background import Background
from megatron_2bw.runtime.pace import MOST, Pace
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.timeline import REDUCTIONS

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

    for run in (background.submit, background.enqueue, background.submit):
        torch.cuda._sleep(CYCLES)
        tensor.add_(1)
        background.result(run(double))
        tensor.add_(1)
    assert tensor.item() == 21  # x becomes 2 (x + 1) + 1, three times.


def test_the_caller_computes_while_the_background_does() -> None:
    """Both together take less than one after the other."""
    device = torch.device("cuda")
    background = Background(device, "test")

    def busy() -> None:
        torch.cuda._sleep(4 * CYCLES)

    def seconds(future_first: bool) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        future = background.enqueue(busy)
        if not future_first:
            background.result(future)
        busy()
        background.result(future)
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    seconds(future_first=True)  # Loads the kernel.
    assert seconds(future_first=True) < 0.75 * seconds(future_first=False)


def test_a_link_waits_for_those_before_it_only() -> None:
    background = Background(torch.device("cuda"), "test")
    first, second = (torch.zeros(1, device="cuda") for _ in range(2))
    second.add_(first)  # Loads the kernel, which waits for all that runs.
    done = background.enqueue(lambda: first.add_(1))
    background.enqueue(lambda: torch.cuda._sleep(20 * CYCLES))
    background.result(done)
    second.add_(first)
    torch.cuda.current_stream().synchronize()
    assert not background._stream.query()
    assert second.item() == 1


def test_actions_are_timed_on_the_device() -> None:
    recorder = Recorder(torch.device("cuda"))
    action = Action.parse("0F0v0")
    start = recorder.mark()
    torch.cuda._sleep(CYCLES)
    recorder.note(action, start, recorder.mark())
    (event,) = recorder.events()
    assert event.action == action
    assert event.end_s - event.start_s > 0.01


def test_times_add_up_over_origins_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are placed by the newest origin before them, and resolved on another thread."""
    monkeypatch.setattr(recorder_module, "_NOTES_PER_ORIGIN", 2)
    recorder = Recorder(torch.device("cuda"))
    action, reduction = Action.parse("0F0v0"), Action.parse("0REDUCE_START:norm")
    for _ in range(5):
        start = recorder.mark()
        torch.cuda._sleep(CYCLES // 4)
        recorder.note(action, start, recorder.mark())
    with torch.cuda.stream(torch.cuda.Stream()):
        recorder.timed(REDUCTIONS, reduction, lambda: torch.cuda._sleep(CYCLES // 4))()
    background = Background(torch.device("cpu"), "test")
    events, beside = background.result(background.submit(recorder.newest(5, 1)))
    assert len({id(note.origin) for note in recorder._notes}) == 3
    assert all(later.start_s >= earlier.end_s - 1e-4 for earlier, later in itertools.pairwise(events))
    assert all(event.end_s - event.start_s > 0.005 for event in (*events, *beside))
    assert recorder.events() == events


def test_the_host_is_a_few_computations_ahead() -> None:
    pace = Pace(torch.device("cuda"))
    ends = [torch.cuda.Event() for _ in range(2 * MOST)]
    for number, end in enumerate(ends):
        torch.cuda._sleep(CYCLES)
        end.record()
        pace.computed()
        assert not end.query()
        assert number < MOST or ends[number - MOST].query()
