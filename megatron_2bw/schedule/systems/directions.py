"""Two pipelines in opposite directions through the same ranks, each with its own copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_2bw.schedule.action import Action, ActionType
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule, backward, forward, programs_of, update


class Pass(NamedTuple):
    """A forward or backward of one microbatch on one rank."""

    type: ActionType
    microbatch: int


def stage_of(rank: int, microbatch: int, stages: int) -> int:
    """Even microbatches go down, from rank 0 to rank d-1; odd ones go up."""
    return rank if microbatch % 2 == 0 else stages - 1 - rank


def bidirectional(
    name: str, stages: int, microbatches: int, passes: Iterable[Iterable[Pass]], in_flight: tuple[int, ...]
) -> Schedule:
    """Synchronous: ``passes`` of every rank, then the updates of its stages, whose gradients are summed over the two
    ranks that have each stage."""

    def call(rank: int, ordered: Iterable[Pass]) -> Iterable[Action]:
        for type_, microbatch in ordered:
            act = forward if type_ is ActionType.FORWARD else backward
            yield act(stage_of(rank, microbatch, stages), microbatch)
        for stage in sorted({stage_of(rank, microbatch, stages) for microbatch in range(microbatches)}):
            yield update(stage)

    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        programs=programs_of(call(rank, ordered) for rank, ordered in enumerate(passes)),
        delay=(0,) * stages,
        weight_versions=(1,) * stages,
        in_flight=in_flight,
    )


def check_even(name: str, stages: int) -> None:
    """Refuse depths for which a rank would meet itself coming back.

    Raises:
        ScheduleError: ``stages`` is odd.
    """
    if stages % 2:
        raise ScheduleError(f"{name} sends microbatches in both directions and got {stages} stages: use an even number")
