"""Measured runs: their files, and where the time goes, on runs whose causes are known because they were simulated."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_2bw.cli import main
from megatron_2bw.schedule.action import Action, ActionType
from megatron_2bw.schedule.commands.measured import beside_each_other
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.pictures.measured import Run
from megatron_2bw.schedule.pictures.run_file import read_run, trace_of
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate, steady_state
from megatron_2bw.schedule.timeline import DATA, Event, Timeline

EVEN = Durations(forward_s=1.0, backward_s=2.0)


def recorded(schedule: str = "2bw", durations: Durations = EVEN, batches: int = 30, **size: int) -> Run:
    built = build(schedule, **({"stages": 3, "microbatches": 4} | size))
    return Run(schedule=built, timeline=simulate(built, durations, batches))


def written(run: Run, folder: Path) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps(trace_of(run)))
    return path


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush", "gpipe", "gems", "chimera", "mixpipe"])
def test_a_file_is_read_back(schedule: str, tmp_path: Path):
    run = recorded(schedule, replace(EVEN, update_s=0.5), stages=4)
    again = read_run(written(run, tmp_path))
    assert again.schedule == run.schedule
    assert [[e.action for e in events] for events in again.timeline.events] == [
        [e.action for e in events] for events in run.timeline.events
    ]
    assert again.timeline.makespan_s == pytest.approx(run.timeline.makespan_s)
    assert again.bubble == pytest.approx(run.bubble)


@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    [("2bw", 2, {"extra_in_flight": 1, "delayed_microbatches": 3}), ("mixpipe", 4, {"k": 2, "gamma": 1})],
)
def test_options_are_read_back(schedule: str, stages: int, options: dict[str, int], tmp_path: Path):
    built = build(schedule, stages=stages, microbatches=4, **options)
    run = Run(schedule=built, timeline=simulate(built, EVEN, 9))
    assert read_run(written(run, tmp_path)).schedule == built != build(schedule, stages=stages, microbatches=4)


def test_batches_before_the_delay_began_are_left_out():
    """Ten of them, and then as many of 2BW: times and bubble are those of 2BW alone."""
    before, run = recorded("1f1b-flush", batches=10), recorded(batches=20)
    pause_s = before.timeline.makespan_s
    events = tuple(
        (*first, *(Event(action.shifted(10), start_s + pause_s, end_s + pause_s) for action, start_s, end_s in later))
        for first, later in zip(before.timeline.events, run.timeline.events, strict=True)
    )
    both = replace(run, timeline=replace(run.timeline, events=events))
    both.check_long_enough()
    assert both.batches == 21, "the first one begins where another ends"
    assert both.bubble == pytest.approx(run.bubble)
    assert both.replayed_bubble == pytest.approx(run.replayed_bubble)
    assert both.causes() == pytest.approx(run.causes())


def test_too_few_batches_after_the_delay_began():
    before, run = recorded("1f1b-flush", batches=20), recorded(batches=5)
    events = tuple(
        (*first, *(event._replace(action=event.action.shifted(20)) for event in later))
        for first, later in zip(before.timeline.events, run.timeline.events, strict=True)
    )
    with pytest.raises(ScheduleError, match="holds 6 batches of 2bw with 4 microbatches, too few"):
        replace(run, timeline=replace(run.timeline, events=events)).check_long_enough()


def test_a_rank_with_two_stages(tmp_path: Path):
    """Durations are those of stages, waits those of ranks."""
    durations = Durations(forward_s=(1.0, 2.0, 1.0, 1.0), backward_s=(2.0, 2.0, 2.0, 3.0))
    run = read_run(written(recorded("chimera", durations, stages=4), tmp_path))
    assert run.duration_s(ActionType.FORWARD) == pytest.approx(durations.forward_s)
    assert run.duration_s(ActionType.BACKWARD) == pytest.approx(durations.backward_s)
    assert run.replayed_bubble == pytest.approx(run.simulated_bubble) == pytest.approx(run.bubble)
    assert len(run.waits()) == 4


def test_of_two_updates_of_a_rank_one_is_done(tmp_path: Path):
    """The update of the stage that a rank lends takes no time there."""
    run = recorded("chimera", replace(EVEN, update_s=0.5), stages=4)
    own = tuple(
        tuple(e if e.action.type != "U" or e.action.stage == rank else e._replace(end_s=e.start_s) for e in events)
        for rank, events in enumerate(run.timeline.events)
    )
    again = read_run(written(replace(run, timeline=replace(run.timeline, events=own)), tmp_path))
    assert again.duration_s(ActionType.UPDATE) == pytest.approx((0.5,) * 4)
    assert again.causes()["updates"] == pytest.approx(0.5)


def test_after_a_flush_an_update_is_part_of_the_bubble():
    """No stage can compute beside it."""
    run = recorded("1f1b-flush", replace(EVEN, update_s=0.5))
    assert run.bubble == pytest.approx(1 - 4 * 3 / run.period_s)


AWAITED = {
    ActionType.FORWARD: ActionType.RECV_FORWARD,
    ActionType.BACKWARD: ActionType.RECV_BACKWARD,
    ActionType.UPDATE: ActionType.REDUCE_WAIT,
}
CAUSES = {
    "even": (EVEN, 0.0),
    "stages": (replace(EVEN, forward_s=(1.0, 1.5)), 4 * (3.5 - 3.25)),
    "updates": (replace(EVEN, update_s=0.5), 0.5),
    # The two microbatches in flight share a way there and back, with two transfers.
    "rest": (replace(EVEN, send_s=0.25), 4 * ((2 * 3 + 2 * 0.25) / 2 - 3)),
}
"""What makes a batch of four microbatches on two stages take longer than forwards and backwards, and by how much."""


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told_apart(cause: str, tmp_path: Path):
    durations, cause_s = CAUSES[cause]
    run = read_run(written(recorded(durations=durations, stages=2), tmp_path))
    causes = run.causes()
    assert sum(causes.values()) == pytest.approx(run.period_s)
    assert causes.pop("even") == pytest.approx(4 * (sum(run.duration_s(ActionType.FORWARD)) / 2 + 2.0))
    assert causes == pytest.approx(dict.fromkeys(causes, 0.0) | ({} if cause == "even" else {cause: cause_s}), abs=1e-3)


def test_moments_in_which_one_stage_is_slow(tmp_path: Path):
    """Each stage is slow in one microbatch of every batch, each in another one; 2BW has no slack to hide it."""
    built = build("2bw", stages=3, microbatches=4)
    delays = {
        (stage, Action(ActionType.FORWARD, stage, stage, batch, batch - 1)): 0.5
        for stage in range(3)
        for batch in range(30)
    }
    run = Run(schedule=built, timeline=simulate(built, EVEN, 30, delays=delays))
    causes = read_run(written(run, tmp_path)).causes()
    assert run.period_s > 12.4
    assert causes["moments"] == pytest.approx(run.period_s - 12.0, abs=1e-3)
    assert run.simulated_bubble == pytest.approx(0.0)
    assert run.replayed_bubble == pytest.approx(run.bubble) == pytest.approx(1 - 12.5 / run.period_s)


def test_time_spent_reading_data(tmp_path: Path):
    run = recorded(durations=replace(EVEN, forward_s=(1.25, 1.0, 1.0)))
    reads = [Event(e.action, e.start_s, e.start_s + 0.25) for e in run.timeline.events[0] if e.action.type == "F"]
    timeline = replace(run.timeline, beside={DATA: (tuple(reads), (), ())})
    again = read_run(written(replace(run, timeline=timeline), tmp_path))
    assert again.data_s() == pytest.approx((0.25, 0.0, 0.0))
    causes = again.causes()
    assert causes["data"] == pytest.approx(1.0)
    assert causes["stages"] == pytest.approx(0.0, abs=1e-6)


def test_waits_of_a_stage():
    """A rank that stands still is idle, and says for what."""
    run = recorded("1f1b-flush")
    events = []
    for of_rank in run.timeline.events:
        waited, end_s = [], 0.0
        for event in of_rank:
            if event.start_s > end_s:
                waiting = event.action._replace(type=AWAITED[event.action.type], version=None)
                waited.append(Event(waiting, end_s, event.start_s))
            waited.append(event)
            end_s = event.end_s
        events.append(tuple(waited))
    with_waits = replace(run, timeline=Timeline(events=tuple(events)))
    assert with_waits.bubble == pytest.approx(run.bubble) == pytest.approx(with_waits.flush_bubble)
    first, _, last = with_waits.waits()
    assert first == pytest.approx((0.0, 6.0, 0.0, 0.0))
    assert last == pytest.approx((2.0, 0.0, 4.0, 0.0))


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
def test_bubble_of_a_run_without_overhead_is_the_simulated_one(schedule: str):
    run = recorded(schedule)
    expected = float(steady_state(run.schedule, EVEN).bubble_ratio)
    assert run.bubble == pytest.approx(expected)
    assert run.simulated_bubble == pytest.approx(expected)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = written(recorded(durations=replace(EVEN, update_s=0.5)), tmp_path)
    picture = tmp_path / "a.svg"
    assert main(["show", "--measured", str(trace), "--svg", str(picture), "--trace", str(tmp_path / "both.json")]) == 0
    out = capsys.readouterr().out
    assert "2bw: 3 stages, 4 microbatches, 30 batches measured" in out
    assert re.search(r"^  updates +\+500\.00 ms$", out, re.MULTILINE)
    assert re.search(r"^  measured +12500\.00 ms$", out, re.MULTILINE)
    drawn = ElementTree.parse(picture).getroot()
    assert {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")} >= {
        "2bw, measured",
        "2bw, simulated",
    }
    assert {event["pid"] for event in json.loads((tmp_path / "both.json").read_text())["traceEvents"]} == {0, 1}


def test_the_shortest_run_that_is_explained():
    """Too short a replay would count transfers as something else."""
    durations, cause_s = CAUSES["rest"]
    runs = [recorded(durations=durations, stages=2, batches=batches) for batches in (11, 12)]
    with pytest.raises(ScheduleError, match="holds 11 batches of 2bw with 4 microbatches, too few"):
        runs[0].check_long_enough()
    runs[1].check_long_enough()
    causes = runs[1].causes()
    assert (causes["rest"], causes["moments"]) == pytest.approx((cause_s, 0.0), abs=1e-3)


def test_panels_show_the_same_batches():
    for schedule in ("2bw", "1f1b-flush"):
        run = recorded(schedule)
        waits = tuple(
            (Event(of_rank[0].action._replace(type=ActionType.RECV_FORWARD, version=None), 0.0, 0.0), *of_rank)
            for of_rank in run.timeline.events
        )
        measured, simulated = beside_each_other(replace(run, timeline=Timeline(events=waits)), 3)
        numbers = [
            {e.action.batch for e in timeline.events[0] if e.action.type == "B"} for timeline in (measured, simulated)
        ]
        assert numbers[0] == numbers[1]


def test_times_of_a_simulation_say_nothing_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = written(recorded(), tmp_path)
    assert main(["show", "--measured", str(trace), "--forward-time", "2"]) == 2
    assert "leave out forward-time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no file that --pipeline-trace wrote"),
        ("{}", "is no file that --pipeline-trace wrote: KeyError"),
        ('{"otherData": {"schedule": "x", "stages": 2, "microbatches": 2, "options": {}}}', "unknown schedule"),
        (
            json.dumps(trace_of(recorded(batches=2))).replace('"name": "', '"name": 0, "was": "'),
            "wrote: AttributeError",
        ),
        (json.dumps(trace_of(recorded(batches=2))), "holds 2 batches of 2bw with 4 microbatches, too few"),
    ],
)
def test_bad_files(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main(["show", "--measured", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_is_read_from_the_right_place_or_refused(tmp_path: Path):
    with pytest.raises(ScheduleError, match=r"--measured .*none\.json cannot be read"):
        read_run(tmp_path / "none.json")


def test_pixels_need_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert main(["show", "2bw", "--stages", "2", "--microbatches", "2", "--png", str(tmp_path / "a.png")]) == 2
    assert "--png needs a package that draws SVG: pip install resvg-py" in capsys.readouterr().err


def test_pixels_need_a_font(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    without_fonts = SimpleNamespace(svg_to_bytes=lambda *, svg_string, zoom: b"the same")
    monkeypatch.setitem(sys.modules, "resvg_py", without_fonts)
    assert main(["show", "2bw", "--stages", "2", "--microbatches", "2", "--png", str(tmp_path / "a.png")]) == 2
    assert "--png finds no font" in capsys.readouterr().err


def test_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawing = SimpleNamespace(svg_to_bytes=lambda *, svg_string, zoom: svg_string.encode())
    monkeypatch.setitem(sys.modules, "resvg_py", drawing)
    png, picture = tmp_path / "a.png", tmp_path / "a.svg"
    assert main(["show", "2bw", "--stages", "2", "--microbatches", "2", "--png", str(png), "--svg", str(picture)]) == 0
    assert png.read_bytes() == picture.read_bytes()
