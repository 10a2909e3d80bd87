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


def checked(name: str, *, stages: int, microbatches: int, **options: int | None) -> Schedule:
    """``build``, for what works.

    Raises:
        ScheduleError: it cannot be built, or the validator refuses it.
    """
    schedule = build(name, stages=stages, microbatches=microbatches, **options)
    problem = refusal(schedule)
    if problem is not None:
        raise ScheduleError(problem)
    return schedule


def works(name: str, *, stages: int, microbatches: int, **options: int | None) -> bool:
    """Whether the schedule can be built and passes the validator.

    >>> works("gems", stages=3, microbatches=2), works("gems", stages=4, microbatches=2)
    (False, True)
    """
    try:
        checked(name, stages=stages, microbatches=microbatches, **options)
    except ScheduleError:
        return False
    return True


def enough_microbatches(
    name: str, *, stages: int, microbatches: int, delayed_microbatches: int | None = None, **options: int | None
) -> int | None:
    """The next number that works above what is too small; None if none near does.

    Above ``microbatches``, or above ``delayed_microbatches`` where those are fewer: both need the same number.

    >>> enough_microbatches("2bw", stages=6, microbatches=2)
    5
    >>> enough_microbatches("2bw", stages=6, microbatches=2, extra_in_flight=1)
    10
    >>> enough_microbatches("2bw", stages=6, microbatches=40, delayed_microbatches=3)
    5
    """
    least = min(microbatches, delayed_microbatches or microbatches) + 1
    candidates = range(least, least + (2 + (options.get("extra_in_flight") or 0)) * stages)
    return next((m for m in candidates if works(name, stages=stages, microbatches=m, **options)), None)
