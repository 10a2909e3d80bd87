"""Schedules by the names that users type."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.gpipe import gpipe
from megatron_2bw.schedule.one_f_one_b import one_f_one_b_flush
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.two_bw import two_bw

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "2bw": two_bw,
    "1f1b-flush": one_f_one_b_flush,
    "gpipe": gpipe,
}
"""Each builds a Schedule from (stages, microbatches) and options of its own."""

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


def build(name: str, *, stages: int, microbatches: int, extra_in_flight: int = 0) -> Schedule:
    """The schedule ``name`` for ``stages`` stages and ``microbatches`` microbatches per batch.

    Args:
        name: or an alias.
        stages: pipeline depth.
        microbatches: per batch.
        extra_in_flight: see ``two_bw``.

    Raises:
        ScheduleError: unknown name, a count below 1, or extra activations for a schedule that has no use for them.
    """
    builder = SCHEDULES[canonical_name(name)]
    for what, count in (("stages", stages), ("microbatches", microbatches)):
        if count < 1:
            raise ScheduleError(f"{name} got {what} = {count}; it needs at least 1")
    if not extra_in_flight:
        return builder(stages, microbatches)
    if "extra_in_flight" not in inspect.signature(builder).parameters:
        raise ScheduleError(f"{name} keeps a fixed number of activations in flight; 2bw can keep more")
    return builder(stages, microbatches, extra_in_flight=extra_in_flight)
