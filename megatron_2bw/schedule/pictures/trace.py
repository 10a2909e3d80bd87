"""Timelines in the Chrome trace format, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_2bw.schedule.action import COMPUTE, Action, ActionType
from megatron_2bw.schedule.timeline import Event, Timeline

BESIDE = "row"
"""Argument of a slice that is not on its rank's own row."""
_US_PER_S = 1_000_000


def chrome_trace(*timelines: Timeline) -> dict[str, Any]:
    """The trace of simulated or measured Timelines, ready for ``json.dump``.

    One process per Timeline, one thread per rank, one slice per event under the action's text form,
    and an arrow for every tensor that passes from stage to stage. Times count from the
    Timeline's first event, in microseconds.

    >>> from megatron_2bw.schedule.timeline import Event
    >>> event = Event(Action.parse("0F0v0"), 2, 5)
    >>> chrome_trace(Timeline(events=((event,),), name="one"))["traceEvents"][-1]["dur"]
    3000000.0
    """
    events = [event for pid, timeline in enumerate(timelines) for event in _process(pid, timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": timeline.name or f"timeline {pid}"}}
    ranks, rows = len(timeline.events), {"": timeline.events, **timeline.beside}
    for position, (row, per_rank) in enumerate(rows.items()):
        for rank, events in enumerate(per_rank):
            tid, title = position * ranks + rank, f"rank {rank} {row}".strip()
            sort = {"sort_index": rank * len(rows) + position}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": sort}
            for event in events:
                yield _slice(timeline, event, row) | {"pid": pid, "tid": tid}
    yield from _arrows(pid, timeline)


def _slice(timeline: Timeline, event: Event, row: str) -> dict[str, Any]:
    args = {
        name: value
        for name in ("stage", "microbatch", "batch", "version")
        if (value := getattr(event.action, name)) is not None
    }
    return {
        "ph": "X",
        "name": f"{row} {event.action}".strip(),
        "cat": row or str(event.action.type),
        "ts": _us(timeline, event.start_s),
        "dur": float(event.end_s - event.start_s) * _US_PER_S,
        "args": {**args, BESIDE: row} if row else args,
    }


def _arrows(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """From the end of what made a tensor to the start of what uses it, where that is another rank."""
    place = {
        _tensor(event.action): (rank, event)
        for rank, events in enumerate(timeline.events)
        for event in events
        if event.action.type in COMPUTE
    }
    for number, (rank, event) in enumerate(place.values()):
        towards = 1 if event.action.type is ActionType.FORWARD else -1
        user_rank, user = place.get(_tensor(event.action, stage=event.action.stage + towards), (rank, event))
        if user_rank == rank:
            continue
        common = {"name": "transfer", "cat": "transfer", "pid": pid, "id": f"{pid}.{number}"}
        # A flow starts inside its slice, not at its end, or the viewer binds it to the next one.
        middle_s = event.start_s + (event.end_s - event.start_s) / 2
        yield common | {"ph": "s", "tid": rank, "ts": _us(timeline, middle_s)}
        yield common | {"ph": "f", "bp": "e", "tid": user_rank, "ts": _us(timeline, user.start_s)}


def _tensor(action: Action, stage: int | None = None) -> tuple[ActionType, int, int | None, int]:
    return action.type, action.stage if stage is None else stage, action.microbatch, action.batch


def _us(timeline: Timeline, time_s: float) -> float:
    return float(time_s - timeline.start_s) * _US_PER_S
