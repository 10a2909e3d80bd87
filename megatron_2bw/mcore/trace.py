"""The measured timeline of a run, written when training ends."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch.distributed as dist

from megatron_2bw.mcore.groups import TransferGroups
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.timeline import Event, Timeline
from megatron_2bw.schedule.trace import chrome_trace


def write_trace(path: str, schedule: Schedule, recorder: Recorder, groups: TransferGroups) -> None:
    """Gather the events of the pipeline that holds rank 0 and write them as a Chrome/Perfetto trace.

    Collective over each pipeline's ranks. Times of ranks on different machines are not aligned.
    """
    if groups.ranks[0] != 0:
        return
    is_writer = dist.get_rank() == 0
    events: list[list[Event]] | None = [[] for _ in groups.ranks] if is_writer else None
    dist.gather_object(recorder.events(), events, dst=0, group=groups.forward)
    if not is_writer:
        return
    trace = chrome_trace(Timeline(events=tuple(map(tuple, events)), name=f"{schedule.name}, measured"))
    stages, microbatches = schedule.stages, schedule.microbatches
    trace["otherData"] = {
        "schedule": schedule.name,
        "stages": stages,
        "microbatches": microbatches,
        "batches": 1 + max(event.action.batch for event in events[0]),
        "bubble": measured_bubble(events, microbatches),
        "flush_bubble": (stages - 1) / (microbatches + stages - 1),
    }
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(trace))


def measured_bubble(events: list[list[Event]], microbatches: int) -> float:
    """Share of time in which a stage neither computes nor updates, once the pipeline is full.

    A batch lasts, at a stage, from the end of the last backward before it to the end of its own.
    The median over batches leaves out those with an evaluation or a checkpoint; then the mean over
    stages. 0 if there are fewer than four batches.
    """
    return statistics.fmean(_idle_share(stage, microbatches) for stage in events)


def _idle_share(events: list[Event], microbatches: int) -> float:
    shares: list[float] = []
    busy_s, began_s = 0.0, None
    for event in events:
        busy_s += event.end_s - event.start_s
        if event.action.type is ActionType.BACKWARD and event.action.microbatch == microbatches - 1:
            if began_s is not None:
                shares.append(1 - busy_s / (event.end_s - began_s))
            busy_s, began_s = 0.0, event.end_s
    settled = shares[2:-1]  # The first batches fill the pipeline, the last one drains it.
    return statistics.median(settled) if settled else 0.0
