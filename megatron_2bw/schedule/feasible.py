"""Whether a schedule works for a depth and a number of microbatches, asked of the validator."""

from __future__ import annotations

from functools import lru_cache

from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.validate import validate


@lru_cache(maxsize=8)  # Megatron's arguments are checked before and after a checkpoint says what is left to do.
def refusal(schedule: Schedule) -> str | None:
    """Why the validator refuses ``schedule`` with every reduction in its chain; None if it does not."""
    try:
        validate(lower(schedule, tuple(Reduction)))
    except ScheduleError as error:
        return error.message
    return None


def problem(name: str, *, stages: int, microbatches: int, **options: int | None) -> str | None:
    """Why a schedule does not work for this size: it cannot be built, or is refused; None if it works.

    >>> problem("gems", stages=3, microbatches=2)
    'gems sends microbatches in both directions and got 3 stages: use an even number'
    """
    try:
        return refusal(build(name, stages=stages, microbatches=microbatches, **options))
    except ScheduleError as error:
        return error.message


def enough_microbatches(name: str, *, stages: int, microbatches: int, **options: int | None) -> int | None:
    """The next number of microbatches above ``microbatches`` that works; None if none near does.

    >>> enough_microbatches("2bw", stages=6, microbatches=2)
    5
    >>> enough_microbatches("2bw", stages=6, microbatches=2, extra_in_flight=1)
    10
    """
    candidates = range(microbatches + 1, microbatches + (2 + (options.get("extra_in_flight") or 0)) * stages)
    return next((m for m in candidates if problem(name, stages=stages, microbatches=m, **options) is None), None)
