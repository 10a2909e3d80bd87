"""Pictures of schedules as text."""

from __future__ import annotations

from string import ascii_lowercase

from megatron_2bw.schedule.action import COMPUTE, ActionType
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.simulate import simulate
from megatron_2bw.schedule.timeline import Event

LEGEND = "a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle"


def grid(schedule: Schedule, *, batches: int, forward_slots: int = 1, backward_slots: int = 2) -> str:
    """One row per rank, one column per time slot; transfers, reductions and updates take no time.

    Args:
        schedule: what to run.
        batches: how many, from the first to a drain.
        forward_slots: columns of a forward.
        backward_slots: columns of a backward.

    >>> from megatron_2bw.schedule.registry import build
    >>> print(grid(build("gpipe", stages=2, microbatches=1), batches=2))
    rank 0  a0 .  .  .  A0---|b0 .  .  .  B0---|
    rank 1  .  a0 A0--- .  . |.  b0 B0--- .  . |
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    timeline = simulate(schedule, Durations(forward_s=forward_slots, backward_s=backward_slots), batches)
    width = len(str(schedule.microbatches - 1)) + 2
    label = len(f"rank {len(timeline.events) - 1}")
    rows = [
        f"{f'rank {rank}':<{label}} {_row(events, timeline.end_s, width)}"
        for rank, events in enumerate(timeline.events)
    ]
    return "\n".join([*rows, LEGEND])


def _row(events: tuple[Event, ...], slots: int, width: int) -> str:
    """Slot i starts in column ``i * width``, after a column that belongs to the updates."""
    columns = list(" " + ("." + " " * (width - 1)) * slots)
    busy_until = 0
    for event in events:
        start, end = 1 + event.start_s * width, event.end_s * width
        if event.action.type in COMPUTE:
            batch = ascii_lowercase[event.action.batch % len(ascii_lowercase)]
            letter = batch if event.action.type is ActionType.FORWARD else batch.upper()
            filler = "-" if end - start > width else " "
            columns[start:end] = f"{letter}{event.action.microbatch}".ljust(end - start, filler)
            busy_until = end
        else:
            columns[end] = "|"
    last_mark = max((i for i, column in enumerate(columns) if column == "|"), default=0)
    return "".join(columns[: max(busy_until, last_mark + 1)]).rstrip()
