"""Schedules by the names that users type."""

from __future__ import annotations

from collections.abc import Callable

from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.gpipe import gpipe
from megatron_2bw.schedule.one_f_one_b import one_f_one_b_flush
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.two_bw import two_bw

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "2bw": two_bw,
    "1f1b-flush": one_f_one_b_flush,
    "gpipe": gpipe,
}
"""Each builds a Schedule from (stages, microbatches)."""

ALIASES: dict[str, str] = {"pipedream-flush": "1f1b-flush", "dapple": "1f1b-flush"}


def canonical_name(name: str) -> str:
    """The registered name of ``name`` or of the schedule it is an alias for.

    >>> canonical_name("dapple")
    '1f1b-flush'

    Raises:
        ScheduleError: no such schedule; the message lists the valid names.
    """
    name = ALIASES.get(name, name)
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; choose one of {', '.join((*SCHEDULES, *ALIASES))}")
    return name


def build(name: str, *, stages: int, microbatches: int) -> Schedule:
    """The schedule ``name`` for ``stages`` stages and ``microbatches`` microbatches per batch.

    Raises:
        ScheduleError: unknown name, or a count below 1.
    """
    builder = SCHEDULES[canonical_name(name)]
    for what, count in (("stages", stages), ("microbatches", microbatches)):
        if count < 1:
            raise ScheduleError(f"{name} got {what} = {count}; it needs at least 1")
    return builder(stages, microbatches)
