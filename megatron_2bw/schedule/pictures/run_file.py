"""Measured runs as files, in the Chrome trace format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.pictures.measured import Run
from megatron_2bw.schedule.pictures.trace import BESIDE, chrome_trace
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.timeline import Event, Timeline


def trace_of(run: Run) -> dict[str, Any]:
    """A Chrome/Perfetto trace that ``read_run`` reads back."""
    schedule = run.schedule
    return chrome_trace(run.timeline) | {
        "otherData": {
            "schedule": schedule.name,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "options": dict(schedule.options),
            "batches": run.batches,
            "bubble": run.bubble,
            "flush_bubble": run.flush_bubble,
        }
    }


def read_run(path: Path) -> Run:
    """Read a file that ``--pipeline-trace`` wrote.

    Raises:
        ScheduleError: it is no such file.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        about = trace["otherData"]
        schedule = build(
            about["schedule"],
            stages=about["stages"],
            microbatches=about["microbatches"],
            **about["options"],
        )
        events, beside = _events(trace["traceEvents"], schedule.stages)
    except OSError as error:
        raise ScheduleError(f"--measured {path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ScheduleError(f"--measured {path} is no file that --pipeline-trace wrote: {error!r}") from error
    timeline = Timeline(events=events, name=f"{schedule.name}, measured", beside=beside)
    return Run(schedule=schedule, timeline=timeline)


def _events(
    slices: list[dict[str, Any]], ranks: int
) -> tuple[tuple[tuple[Event, ...], ...], Mapping[str, tuple[tuple[Event, ...], ...]]]:
    rows: defaultdict[str, list[list[Event]]] = defaultdict(lambda: [[] for _ in range(ranks)])
    for slice_ in slices:
        if slice_["ph"] == "X":
            action = Action.parse(slice_["name"].split()[-1])
            start_s = slice_["ts"] / 1e6
            row = slice_["args"].get(BESIDE, "")
            rows[row][slice_["tid"] % ranks].append(Event(action, start_s, start_s + slice_["dur"] / 1e6))
    ordered = {
        row: tuple(tuple(sorted(events, key=lambda event: event.start_s)) for events in per_rank)
        for row, per_rank in rows.items()
    }
    return ordered.pop("", ((),) * ranks), ordered
