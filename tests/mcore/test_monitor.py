"""``--log-pipeline``: what is logged, and that it changes no number."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate

from .case import Case, Fault
from .compare import differing
from .harness import launch, run
from .worker import main

if TYPE_CHECKING:
    from megatron_2bw.mcore.monitoring.monitor import PipelineMonitor

CASE = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=8, flags=("--log-interval", "1"))
LOGGED = re.compile(r"iteration +(\d+)/.*\| pipeline bubble: (\S+) \|(?: stage imbalance: (\S+) \|)?(.*)")


def logged(case: Case, folder: Path) -> dict[int, tuple[float, float | None, str]]:
    """Bubble, imbalance, which may be missing, and the rest of the line by iteration."""
    case = replace(case, flags=(*case.flags, "--log-pipeline"))
    ended = launch(main, case, folder)
    assert not any(ended.exit_codes), ended.tails()
    found = LOGGED.findall(ended.outputs[-1])
    return {
        int(iteration): (float(bubble), float(above) if above else None, rest)
        for iteration, bubble, above, rest in found
    }


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
def test_every_line_has_them_from_the_third_batch_on(schedule: str, tmp_path: Path) -> None:
    # A line has what is known by then: batches take a while, so that it is known on a busy machine, too.
    pauses = tuple(Fault(kind="sleep before forward", rank=0, call=call, seconds=0.1) for call in range(16))
    lines = logged(replace(CASE, schedule=schedule, faults=pauses), tmp_path)
    assert set(range(4, 9)) <= set(lines)
    assert all(0.0 < bubble < 1.0 for bubble, _, _ in lines.values())
    assert all(lines[iteration][1] >= 0.0 for iteration in range(4, 9))
    assert all(("update slack (s): " in rest) == (schedule == "2bw") for _, _, rest in lines.values())


def test_no_number_changes() -> None:
    case = replace(CASE, replicas=2)
    assert differing(run(replace(case, flags=(*case.flags, "--log-pipeline"))), run(case)) == []


def test_a_slow_stage_shows(tmp_path: Path) -> None:
    """In batches 3 to 5: the first stage is busy for another second, and the second one waits.

    A line has the newest numbers that are known, and may skip those of one batch.
    """
    slow = tuple(Fault(kind="sleep before forward", rank=0, call=call, seconds=1.0) for call in (6, 8, 10))
    lines = logged(replace(CASE, faults=slow), tmp_path)
    imbalances = [above for _, above, _ in lines.values() if above is not None]
    assert max(imbalances) > 3.0 > min(imbalances)


def test_what_is_logged_is_what_ran() -> None:
    from megatron_2bw.mcore.monitoring.monitor import Busy, busy, numbers

    schedule = build("2bw", stages=2, microbatches=2)
    durations = Durations(forward_s=(1.0, 1.5), backward_s=2.0, update_s=0.5)
    timeline = simulate(schedule, durations, 9)
    before_the_drain = [[event for event in events if event.end_s < 50.0] for events in timeline.events]
    stages = [busy(events, [], schedule) for events in before_the_drain]
    assert stages == [Busy(6.5, 7.5, 0.0), Busy(7.5, 7.5, 0.0)]
    found = numbers(stages, delayed=True)
    assert found["pipeline bubble"] == pytest.approx(1 - (6.5 + 7.5) / (2 * 7.5))
    assert found["stage imbalance"] == pytest.approx(7.5 / 6.5 - 1)
    assert busy([], [], schedule) is None


@pytest.fixture
def monitor(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> PipelineMonitor:
    from megatron_2bw.mcore.monitoring import monitor

    monkeypatch.setattr(monitor.parallel_state, "get_pipeline_model_parallel_group", lambda: world)
    return monitor.PipelineMonitor(Recorder(torch.device("cpu")), timedelta(seconds=10))


def test_iterations_before_anything_is_known_do_not_dilute_the_mean(
    monitor: PipelineMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--log-interval 4``: Megatron divides the total by all four."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monitor._newest = {"pipeline bubble": 0.5}
    losses, totals = {}, {}
    monitor.add_to(losses, totals, 3)
    total = totals["pipeline bubble"] + losses["pipeline bubble"]
    assert total.item() / 4 == 0.5


def test_a_batch_that_began_in_another_order_is_not_logged(monitor: PipelineMonitor) -> None:
    """As where the batch size grows."""
    told = []
    monitor._gather = lambda take, schedule, *, interrupted: told.append(interrupted)
    small, large = (build("2bw", stages=2, microbatches=microbatches) for microbatches in (2, 4))
    for schedule in (small, small, large, large):
        monitor.after(schedule)
    monitor.close()
    assert told == [True, False, True, False]


def test_an_error_ends_the_job_and_not_the_numbers_alone(monitor: PipelineMonitor) -> None:
    def fail(take: object, schedule: object, *, interrupted: bool) -> None:
        raise RuntimeError("no stage answers")

    monitor._gather = fail
    schedule = build("2bw", stages=2, microbatches=2)
    monitor.after(schedule)
    monitor._gathering[0].exception(10.0)
    with pytest.raises(RuntimeError, match="no stage answers"):
        monitor.after(schedule)
