"""The measured timeline of a run, written when training ends."""

from __future__ import annotations

import json
import logging
import statistics
from pathlib import Path

import torch.distributed as dist

from megatron_2bw.mcore.groups import TransferGroups
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import COMPUTE, ActionType
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.timeline import Event, Timeline
from megatron_2bw.schedule.trace import chrome_trace

logger = logging.getLogger(__name__)


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
        "batches": 1 + max((event.action.batch for event in events[0]), default=-1),
        "bubble": measured_bubble(events, schedule),
        "flush_bubble": (stages - 1) / (microbatches + stages - 1),
    }
    try:
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:  # The checkpoint at the end of training matters more.
        logger.warning("--pipeline-trace %s was not written: %s", path, error)


def measured_bubble(events: list[list[Event]], schedule: Schedule) -> float:
    """Share of time in which a stage has nothing to do, once the pipeline is full.

    A batch lasts, at a stage, from the end of the last backward before it to the end of its own;
    forwards, backwards and delayed updates are work. In a synchronous schedule all stages reduce
    and update together, while nothing else can run: that counts as idle. The median over batches
    leaves out those with an evaluation or a checkpoint; then the mean over stages. Where batches
    grow, only those of the last size count. 0 for fewer than five batches.
    """
    work = COMPUTE | {ActionType.UPDATE} if any(schedule.delay) else COMPUTE
    return statistics.fmean(_idle_share(stage, schedule.microbatches, work) for stage in events)


def _idle_share(events: list[Event], microbatches: int, work: frozenset[ActionType]) -> float:
    shares: list[float] = []
    busy_s, began_s = 0.0, None
    for event in events:
        if event.action.type in work:
            busy_s += event.end_s - event.start_s
        if event.action.type is ActionType.BACKWARD and event.action.microbatch == microbatches - 1:
            if began_s is not None:
                shares.append(1 - busy_s / (event.end_s - began_s))
            busy_s, began_s = 0.0, event.end_s
    settled = shares[2:-1]  # The first batches fill the pipeline, the last one drains it.
    return statistics.median(settled) if settled else 0.0
