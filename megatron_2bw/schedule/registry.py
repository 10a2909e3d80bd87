"""Schedules by the names that users type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.systems.chimera import chimera
from megatron_2bw.schedule.systems.gems import gems
from megatron_2bw.schedule.systems.gpipe import gpipe
from megatron_2bw.schedule.systems.inter_layer import inter_layer
from megatron_2bw.schedule.systems.mixpipe import mixpipe
from megatron_2bw.schedule.systems.one_f_one_b import one_f_one_b_flush
from megatron_2bw.schedule.systems.pipedream import pipedream
from megatron_2bw.schedule.systems.two_bw import two_bw

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "2bw": two_bw,
    "1f1b-flush": one_f_one_b_flush,
    "gpipe": gpipe,
    "inter-layer": inter_layer,
    "pipedream": pipedream,
    "gems": gems,
    "chimera": chimera,
    "mixpipe": mixpipe,
}
"""Each builds a Schedule from (stages, microbatches) and options of its own."""

ALIASES: dict[str, str] = dict.fromkeys(("1f1b", "pipedream-flush", "dapple"), "1f1b-flush")

PER_MICROBATCH = frozenset({"pipedream"})
"""Those whose batches have one microbatch, because each is followed by an update."""

MEGATRON = "megatron"
"""Not one of ours: Megatron's own, which stays as it is."""

TWO_BW = frozenset({"2bw"})
WITHOUT_DELAY = "1f1b-flush"
"""How 2bw runs a batch that is to have no delay."""
DELAYED = TWO_BW | PER_MICROBATCH
"""Those whose updates come after the call of their batch: their pipelines do not drain."""

BIDIRECTIONAL = frozenset({"gems", "chimera", "mixpipe"})
"""Those with two pipelines in opposite directions, and two stages per rank."""

_WITHOUT = {
    "extra_in_flight": "keeps a fixed number of activations in flight; leave extra_in_flight out, or use 2bw",
    "delayed_microbatches": "computes all microbatches of a batch alike; leave delayed_microbatches out, or use 2bw",
    "k": "has no k and gamma (--mixpipe-k, --mixpipe-gamma); leave them out, or use mixpipe",
    "gamma": "has no k and gamma (--mixpipe-k, --mixpipe-gamma); leave them out, or use mixpipe",
}
"""What a schedule lacks that does not take the option."""


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


def build(name: str, *, stages: int, microbatches: int, **options: int | None) -> Schedule:
    """The schedule ``name`` for ``stages`` stages and ``microbatches`` microbatches per batch.

    Args:
        name: or an alias.
        stages: pipeline depth.
        microbatches: per batch.
        **options: ``extra_in_flight`` and ``delayed_microbatches`` of ``two_bw``, ``k`` and ``gamma`` of ``mixpipe``;
            0 and None are the defaults.

    Raises:
        ScheduleError: unknown name, a count below 1, numbers that the schedule does not take, or options of others.
    """
    builder = SCHEDULES[canonical_name(name)]
    for what, count in (("stages", stages), ("microbatches", microbatches)):
        if count < 1:
            raise ScheduleError(f"{name} got {what} = {count}; it needs at least 1")
    check_options(name, options)
    given = {option: value for option, value in options.items() if value}
    return replace(builder(stages, microbatches, **given), options=tuple(given.items()))


def check_options(name: str, options: Mapping[str, int | None]) -> None:
    """Whether the schedule ``name`` takes what is set of ``options``.

    Raises:
        ScheduleError: an option of another or of none, one below 0, or no delayed microbatches.
    """
    unknown = options.keys() - _WITHOUT.keys()
    if unknown:
        raise ScheduleError(f"no schedule has the option {min(unknown)!r}; choose from {', '.join(_WITHOUT)}")
    for option, value in options.items():
        if value is not None and value < 0:
            raise ScheduleError(f"{name} got {option} = {value}; give 0 or more, or leave it out")
    if options.get("delayed_microbatches") == 0:
        raise ScheduleError(f"{name} got delayed_microbatches = 0; give at least 1, or leave it out for all")
    for option, value in options.items():
        if value and option not in options_of(name):
            raise ScheduleError(f"{name} {_WITHOUT[option]}")


def options_of(name: str) -> frozenset[str]:
    """What ``build`` takes for this schedule, beside its size."""
    return frozenset(inspect.signature(SCHEDULES[canonical_name(name)]).parameters) & _WITHOUT.keys()
