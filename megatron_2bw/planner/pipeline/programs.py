"""The Programs of a layout's schedule, for what has no closed form."""

from __future__ import annotations

from functools import lru_cache

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.systems import mixpipe


def programs_of(layout: Layout) -> Schedule:
    """Those that the executor runs; for Megatron's own schedule, those of 1F1B.

    Raises:
        PlanError: the schedule does not take the depth, the number of microbatches or the options.
    """
    built = _built(
        "1f1b-flush" if layout.schedule == "megatron" else layout.schedule,
        layout.pipeline,
        layout.microbatches,
        layout.extra_in_flight,
        layout.delayed_microbatches or None,
        layout.mixpipe_k,
        layout.mixpipe_gamma,
    )
    if isinstance(built, ScheduleError):
        raise PlanError(built.message)
    return built


def refusal(layout: Layout) -> str | None:
    """Why there are none; None if there are."""
    if layout.schedule == "mixpipe":  # Whose order has to be looked for.
        try:
            mixpipe.check(
                layout.pipeline, layout.microbatches, k=layout.mixpipe_k or None, gamma=layout.mixpipe_gamma or None
            )
        except ScheduleError as error:
            return error.message
        return None
    for same in (shortened(layout), layout):  # The message is about the microbatches that there are.
        try:
            programs_of(same)
        except PlanError as error:
            refused = str(error)
        else:
            return None
    return refused


def shortened(layout: Layout) -> Layout:
    """``layout`` with fewer microbatches where its Programs repeat themselves.

    gems and chimera run one unit after the other: two microbatches, one in each direction, and as many as stages. They
    have no more forwards in flight from the second on; four are kept. mixpipe has as many with all numbers of
    microbatches above some, which is less than 3 per stage as far as looked for; eight per stage are kept.
    """
    unit, kept = {"gems": (2, 4), "chimera": (layout.pipeline, 4), "mixpipe": (2, 4 * layout.pipeline)}.get(
        layout.schedule, (1, layout.microbatches)
    )
    lacks = max(layout.microbatches // unit - kept, 0)
    if not lacks:
        return layout
    return layout.but(global_batch=layout.global_batch - lacks * unit * layout.microbatch * layout.data)


@lru_cache(maxsize=4096)
def open_losses(layout: Layout, rank: int) -> int:
    """Most forwards of the last stage at once on ``rank`` whose backward has not run."""
    most = present = 0
    for action in programs_of(shortened(layout)).programs[rank].steady:
        if action.stage == layout.pipeline - 1 and action.type in _CHANGES:
            present += _CHANGES[action.type]
            most = max(most, present)
    return most


_CHANGES = {ActionType.FORWARD: 1, ActionType.BACKWARD: -1}


@lru_cache(maxsize=512)
def _built(
    name: str, stages: int, microbatches: int, extra: int, delayed: int | None, k: int, gamma: int
) -> Schedule | ScheduleError:
    options = {"extra_in_flight": extra, "delayed_microbatches": delayed, "k": k, "gamma": gamma}
    try:
        return build(name, stages=stages, microbatches=microbatches, **options)
    except ScheduleError as error:
        return error
