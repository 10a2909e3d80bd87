"""The measured timeline of a run, written when training ends."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_2bw.mcore.groups import TransferGroups
from megatron_2bw.mcore.monitoring.clock import SharedClock
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.pictures.measured import Run
from megatron_2bw.schedule.pictures.run_file import trace_of
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.timeline import Event, Timeline

logger = logging.getLogger(__name__)


class _OfRank(NamedTuple):
    """What one rank has recorded, on the first stage's clock."""

    events: tuple[Event, ...]
    beside: dict[str, tuple[Event, ...]]


def write_trace(path: str, schedule: Schedule, recorder: Recorder, groups: TransferGroups, clock: SharedClock) -> None:
    """Gather the events of the pipeline that holds rank 0 and write them as a Chrome/Perfetto trace.

    Collective over each pipeline's ranks.
    """
    if groups.ranks[0] != 0:
        return
    recorded = _recorded(recorder, clock)
    is_writer = dist.get_rank() == 0
    ranks: list[_OfRank | None] | None = [None for _ in groups.ranks] if is_writer else None
    dist.gather_object(recorded, ranks, dst=0, group=groups.forward)
    if ranks is None:
        return
    rows = dict.fromkeys(row for rank in ranks for row in rank.beside)
    timeline = Timeline(
        events=tuple(rank.events for rank in ranks),
        name=f"{schedule.name}, measured",
        beside={row: tuple(rank.beside.get(row, ()) for rank in ranks) for row in rows},
    )
    trace = trace_of(Run(schedule=schedule, timeline=timeline))
    try:
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:  # The checkpoint at the end of training matters more.
        logger.warning("--pipeline-trace %s was not written: %s", path, error)


def _recorded(recorder: Recorder, clock: SharedClock) -> _OfRank:
    to_first = clock.conversion()

    def moved(events: list[Event]) -> tuple[Event, ...]:
        return tuple(Event(action, to_first(start_s), to_first(end_s)) for action, start_s, end_s in events)

    return _OfRank(moved(recorder.events()), {row: moved(events) for row, events in recorder.beside().items()})
