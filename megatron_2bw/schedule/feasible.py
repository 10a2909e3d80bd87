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
    """Whether it does.

    >>> works("gems", stages=3, microbatches=2), works("gems", stages=4, microbatches=2)
    (False, True)
    """
    try:
        checked(name, stages=stages, microbatches=microbatches, **options)
    except ScheduleError:
        return False
    return True


def enough_delayed(name: str, *, delayed_microbatches: int | None = None, **size: int | None) -> int | None:
    """Where ``delayed_microbatches`` are too few: the next number that works. None where that is not what is wrong.

    >>> enough_delayed("2bw", stages=6, microbatches=8, delayed_microbatches=2)
    5
    """
    if delayed_microbatches is None or not works(name, **size):
        return None
    candidates = range(delayed_microbatches, size["microbatches"] + 1)
    return next(n for n in candidates if works(name, delayed_microbatches=n, **size))


def enough_microbatches(name: str, *, stages: int, microbatches: int, **options: int | None) -> int | None:
    """The next number of microbatches above ``microbatches`` that works; None if none near does.

    >>> enough_microbatches("2bw", stages=6, microbatches=2)
    5
    >>> enough_microbatches("2bw", stages=6, microbatches=2, extra_in_flight=1)
    10
    """
    candidates = range(microbatches + 1, microbatches + (2 + (options.get("extra_in_flight") or 0)) * stages)
    return next((m for m in candidates if works(name, stages=stages, microbatches=m, **options)), None)
