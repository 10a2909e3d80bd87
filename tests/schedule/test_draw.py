"""Pictures: text grids against goldens, SVG and Chrome traces for what they contain."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from megatron_2bw.schedule.action import Action, ActionType
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.pictures.draw import LEGEND, grid
from megatron_2bw.schedule.pictures.svg import svg
from megatron_2bw.schedule.pictures.trace import chrome_trace
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate
from megatron_2bw.schedule.timeline import Event, Timeline
from megatron_2bw.schedule.validation.listing import MARK, listing

from .goldens import FOLDER, goldens
from .others import PIPELINED

ROOT = Path(__file__).parents[2]
ONE_TWO = Durations(forward_s=1, backward_s=2)
SVG = "{http://www.w3.org/2000/svg}"


def timelines(batches: int = 3) -> list[Timeline]:
    return [simulate(build(name, stages=4, microbatches=4), ONE_TWO, batches) for name in PIPELINED]


def test_goldens():
    """If a change is meant, ``python -m tests.schedule.goldens`` writes them again."""
    kept = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.txt")}
    assert kept == goldens()


def test_grid_shows_every_action_where_it_is():
    rows = grid(build("2bw", stages=2, microbatches=12), batches=2).splitlines()
    assert rows[-1] == LEGEND
    words = Counter(word.rstrip("-") for row in rows[:-1] for word in row.replace("|", " ").split()[2:] if word != ".")
    names = {f"{letter}{microbatch}" for letter in "abAB" for microbatch in range(12)}
    assert words == dict.fromkeys(names, 2)
    assert [row.count("|") for row in rows[:-1]] == [2, 2]


def test_grid_of_other_durations():
    rows = grid(build("gpipe", stages=2, microbatches=1), batches=1, forward_slots=2, backward_slots=3)
    assert rows.splitlines()[:2] == [
        "rank 0  a0--- .  .  .  .  .  A0------|",
        "rank 1  .  .  a0--- A0------ .  .  . |",
    ]


def test_more_batches_than_letters():
    assert "z0 Z0---|a0 A0---|b0 B0---" in grid(build("gpipe", stages=1, microbatches=1), batches=28)


def test_listing_marks_the_last_of_equal_actions_or_the_rank():
    schedule = build("2bw", stages=2, microbatches=1)
    lines = listing(schedule, marks={(0, Action.parse("0B0v-1")), (1, None)}).splitlines()
    assert lines == [
        f"steady  rank 0                rank 1{MARK}",
        "     0  0UPDATE@-1            1F0v-1",
        "     1  0F0@1v0               1B0v-1",
        f"     2  0B0v-1{MARK} 1UPDATE@-1",
    ]


def test_error_carries_the_grid():
    error = ScheduleError("what", "the grid")
    assert (error.message, error.grid, str(error)) == ("what", "the grid", "what\nthe grid")


def test_svg_shows_every_event():
    shown = timelines()
    root = ElementTree.fromstring(svg(*shown, title="a < b", notes=["", ", never idle", ""]))
    tips = Counter(title.text for title in root.iter(f"{SVG}title"))
    for timeline in shown:
        for events in timeline.events:
            for event in events:
                if event.action.type is not ActionType.UPDATE:
                    assert tips[str(event.action)] >= 1
    cells = 3 * 4 * 3 * 4 * 2  # schedules, ranks, batches, microbatches, directions
    assert sum(tips.values()) == cells + 1
    updates = sum(path.get("fill") == "#d1242f" for path in root.iter(f"{SVG}path"))
    assert updates == 3 * 4 * 3 + 1  # and one in the legend
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for expected in (
        "a < b",
        "2bw",
        "gpipe",
        "bubble 20.0%",
        "bubble 42.9%, never idle",
        "batch 2 with W1",
        "1.40\u00d7",
    ):
        assert expected in texts


def test_svg_stays_inside_its_card():
    root = ElementTree.fromstring(svg(*timelines(batches=7)))
    _, _, width, height = map(float, root.get("viewBox").split())
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x")) >= 0
        assert float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) + float(box.get("height")) <= height


def test_svg_names_all_versions_of_a_batch():
    events = ((Event(Action.parse("0F0v-1"), 0, 1),), (Event(Action.parse("1F0v2"), 1, 2),))
    assert "batch 0 with W0\u2013W2" in svg(Timeline(events=events))


def test_svg_of_nothing():
    for nothing in ((), (Timeline(events=((),)),)):
        with pytest.raises(ValueError, match="draws one or more"):
            svg(*nothing)


def test_the_picture_in_the_readme_is_the_one_the_code_draws():
    """``megatron-2bw show 2bw 1f1b-flush gpipe --stages 4 --microbatches 4 --svg assets/schedules.svg``."""
    kept = (ROOT / "assets" / "schedules.svg").read_text(encoding="utf-8")
    title = "3 batches of 4 microbatches on 4 stages"
    assert kept == svg(*timelines(), title=title, notes=[", 0.0% in an endless run", "", ""])


def test_trace_has_a_slice_per_event_and_an_arrow_per_transfer():
    shown = timelines()
    trace = json.loads(json.dumps(chrome_trace(*shown)))["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    for pid, timeline in enumerate(shown):
        mine = {(e["tid"], e["name"]): (e["ts"], e["dur"]) for e in slices if e["pid"] == pid}
        assert mine == {
            (rank, str(event.action)): (event.start_s * 1e6, (event.end_s - event.start_s) * 1e6)
            for rank, events in enumerate(timeline.events)
            for event in events
        }
    arrows = Counter((event["pid"], event["ph"]) for event in trace if event["ph"] in "sf")
    transfers = 3 * 4 * 3 * 2  # batches, microbatches, boundaries, directions
    assert arrows == {(pid, ph): transfers for pid in range(3) for ph in "sf"}
    names = {(e["pid"], e["args"]["name"]) for e in trace if e["name"] == "process_name"}
    assert names == set(enumerate(PIPELINED))


def test_an_arrow_starts_inside_its_slice_and_ends_where_the_user_starts():
    trace = chrome_trace(*timelines())["traceEvents"]
    slices = {}
    for event in trace:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for event in trace:
        if event["ph"] == "s":
            assert any(start < event["ts"] < end for start, end in slices[event["pid"], event["tid"]])
        if event["ph"] == "f":
            assert any(start == event["ts"] for start, _ in slices[event["pid"], event["tid"]])


def test_trace_of_measured_events_starts_at_zero():
    events = [(Event(Action.parse(f"{rank}F0v0"), 1e5 + rank, 1e5 + rank + 0.5),) for rank in range(2)]
    slices = [e for e in chrome_trace(Timeline(events=tuple(events)))["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in slices] == [(0.0, 5e5), (1e6, 5e5)]
    assert slices[0]["args"] == {"stage": 0, "microbatch": 0, "batch": 0, "version": 0}
