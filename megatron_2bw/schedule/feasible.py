"""Whether a schedule works for a depth and a number of microbatches, asked of the validator."""

from __future__ import annotations

from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.validate import validate


def refusal(schedule: Schedule) -> str | None:
    """Why the validator refuses ``schedule`` with every reduction in its chain; None if it does not."""
    try:
        validate(lower(schedule, tuple(Reduction)))
    except ScheduleError as error:
        return error.message
    return None


def enough_microbatches(name: str, *, stages: int, microbatches: int) -> int | None:
    """The next number of microbatches above ``microbatches`` that works; None if none near does.

    >>> enough_microbatches("2bw", stages=6, microbatches=2)
    5
    """
    candidates = range(microbatches + 1, microbatches + 2 * stages)
    return next((m for m in candidates if refusal(build(name, stages=stages, microbatches=m)) is None), None)
