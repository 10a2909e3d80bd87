"""Ranks that take turns on processors, beside what the planner expects of them."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from megatron_2bw.planner.measure.profile import Profile, Setting
from megatron_2bw.planner.pipeline.batch import shared_s
from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Layout, Precision
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.action import COMPUTE, Action, ActionType
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build

TOOK_S = {ActionType.FORWARD: 1.0, ActionType.BACKWARD: 2.0}
"""On a processor of its own."""
ORDERS = 100
MODEL = Model(num_layers=8, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=256)


def batch_s(schedule: Schedule, replicas: int, processors: int, seed: int) -> float:
    """Until all replicas are through, if a free processor takes up any action whose tensors are there, to its end."""
    order = random.Random(seed)
    ranks = [(replica, program) for replica in range(replicas) for program in schedule.programs]
    left = [[action for action in program.steady if action.type in COMPUTE] for _, program in ranks]
    running: dict[int, float] = {}
    done: set[tuple[int, ActionType, int, int | None]] = set()
    now_s = 0.0

    def is_ready(rank: int) -> bool:
        replica, (type_, stage, microbatch, *_) = ranks[rank][0], left[rank][0]
        before = stage - 1 if type_ is ActionType.FORWARD else stage + 1
        return before not in range(len(schedule.programs)) or (replica, type_, before, microbatch) in done

    while any(left):
        ready = [rank for rank, actions in enumerate(left) if actions and rank not in running and is_ready(rank)]
        order.shuffle(ready)
        for rank in ready[: processors - len(running)]:
            running[rank] = now_s + TOOK_S[left[rank][0].type]
        now_s = min(running.values())
        for rank in [rank for rank, end_s in running.items() if end_s == now_s]:
            action: Action = left[rank].pop(0)
            done.add((ranks[rank][0], *action[:3]))
            del running[rank]
    return now_s


@pytest.mark.parametrize("name", ["1f1b-flush", "gpipe"])
@pytest.mark.parametrize(
    ("stages", "replicas", "microbatches", "processors"),
    [
        (1, 4, 2, 2),
        (1, 8, 2, 4),
        (2, 2, 1, 2),
        (2, 2, 2, 2),
        (2, 2, 4, 2),
        (2, 4, 2, 4),
        (2, 4, 8, 4),
        (4, 1, 4, 2),
        (4, 2, 4, 2),
    ],
)
def test_replicas_that_take_turns_end_one_after_the_other(
    name: str, stages: int, replicas: int, microbatches: int, processors: int
):
    layout = Layout(
        schedule=name, pipeline=stages, data=replicas, global_batch=replicas * microbatches, precision=Precision.FP32
    )
    share = processors / layout.gpus
    stage = Stage(*(time_s / share for time_s in TOOK_S.values()))
    pipeline = Pipeline(stages=stages, microbatches=microbatches, first=stage, middle=stage, last=stage)
    setting = Setting(ranks=layout.gpus, precision=Precision.FP32, fused_attention=False, sequence_parallel=False)
    profile = Profile(model=MODEL, setting=setting, date="2026-11-27", processors=processors)
    cluster = replace(CLUSTERS["dgx-a100"], profile=profile)
    predicted_s = shared_s(layout, pipeline, cluster, work_s=stages * microbatches * stage.pair_s)
    schedule = build(name, stages=stages, microbatches=microbatches)
    mean_s = fmean(batch_s(schedule, replicas, processors, seed) for seed in range(ORDERS))
    assert predicted_s == pytest.approx(mean_s, rel=0.04)
