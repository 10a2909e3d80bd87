"""Schedules that are not shipped, for what the data model leaves room for, and for comparison."""

from __future__ import annotations

from dataclasses import replace

from megatron_2bw.schedule.action import COMPUTE, Action, ActionType
from megatron_2bw.schedule.program import Program, Schedule, backward, forward, programs_of, update
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.systems.two_bw import _call as two_bw_call

PIPELINED = ("2bw", "1f1b-flush", "gpipe")
"""The shipped ones with one stage per rank in which microbatches overlap."""
ONE_WAY = (*PIPELINED, "inter-layer", "pipedream")


def delayed(stages: int, microbatches: int, *, delay: int, weight_versions: int) -> Schedule:
    """2BW with a longer delay; updates stay where they are."""
    schedule = build("2bw", stages=stages, microbatches=microbatches)
    return replace(
        schedule,
        programs=programs_of(
            (a._replace(version=a.batch - delay) if a.type in COMPUTE else a for a in program.steady)
            for program in schedule.programs
        ),
        delay=(delay,) * stages,
        weight_versions=(weight_versions,) * stages,
    )


def further_ahead(stages: int, microbatches: int) -> Schedule:
    """2BW with one more forward in flight per hop, which leaves two tensors on their way between calls."""
    schedule = build("2bw", stages=stages, microbatches=microbatches)
    return replace(
        schedule,
        programs=programs_of(
            two_bw_call(stage, 2 * (stages - 1 - stage), microbatches, microbatches) for stage in range(stages)
        ),
        in_flight=tuple(2 * (stages - stage) - 1 for stage in range(stages)),
    )


def two_batches_ahead() -> Schedule:
    """One stage whose forwards run two batches ahead of its backwards."""
    return Schedule(
        name="two-batches-ahead",
        stages=1,
        microbatches=1,
        programs=(Program.parse("0F0@2v0 0B0v-2 0UPDATE"),),
        delay=(2,),
        weight_versions=(3,),
        in_flight=(3,),
    )


def two_stages_per_rank(stages: int, microbatches: int, *, in_flight: int | None = None) -> Schedule:
    """GPipe with neighbouring stages on one rank."""

    def call(rank: int) -> list[Action]:
        first, second = 2 * rank, 2 * rank + 1
        indices = range(microbatches)
        return [
            *(forward(stage, i) for i in indices for stage in (first, second)),
            *(backward(stage, i) for i in indices for stage in (second, first)),
            update(first),
            update(second),
        ]

    ranks = stages // 2
    return Schedule(
        name="two-stages-per-rank",
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(call(rank) for rank in range(ranks)),
        delay=(0,) * stages,
        weight_versions=(1,) * ranks,
        in_flight=(in_flight or 2 * microbatches,) * ranks,
    )


def two_bw_update_at_batch_end(stages: int, microbatches: int) -> Schedule:
    """2BW whose update blocks at the end of its batch, as a plain ``optimizer.step()`` would."""
    schedule = build("2bw", stages=stages, microbatches=microbatches)
    return replace(
        schedule,
        programs=programs_of(
            [*(action for action in program.steady if action.type is not ActionType.UPDATE), update(stage)]
            for stage, program in enumerate(schedule.programs)
        ),
    )
