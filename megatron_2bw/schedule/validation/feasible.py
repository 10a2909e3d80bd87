"""Whether a schedule works for a depth and a number of microbatches, asked of the validator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import lower, with_gradient_copy
from megatron_2bw.schedule.program import GradientCopy, Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.validation.validate import validate


def chain_of(*, tied: bool) -> tuple[Reduction, ...]:
    """Reductions of a pipeline whose first and last stage share a weight, or do not."""
    return (Reduction.GRADIENTS, *[Reduction.EMBEDDING] * tied, Reduction.NORM)


def lowered_as(
    name: str,
    *,
    copy: GradientCopy | None = None,
    reductions: Iterable[Reduction] = tuple(Reduction),
    late_receives: bool = False,
    **size_and_options: int | None,
) -> Schedule:
    """``build``, lowered as a run has it.

    Args:
        name: of the schedule.
        copy: what is kept of finished gradients; None where no update is delayed.
        reductions: of the chain.
        late_receives: see `Schedule`.
        **size_and_options: see `registry.build`.
    """
    schedule = build(name, **size_and_options)
    schedule = lower(schedule if copy is None else with_gradient_copy(schedule, copy), tuple(reductions))
    return replace(schedule, late_receives=late_receives)


def refusal(name: str, **how: object) -> str | None:
    """Why there is no such schedule, or the validator refuses it, as `lowered_as` takes it; None if it does not.

    A process asks the validator once: Megatron's arguments are checked before and after a checkpoint says what is left
    to do, and a run that changes its number of microbatches comes back to what was checked.
    """
    return _refusal(name, tuple(sorted((key, value) for key, value in how.items() if value is not None)))


@cache
def _refusal(name: str, how: tuple[tuple[str, object], ...]) -> str | None:
    try:
        validate(lowered_as(name, **dict(how)))
    except ScheduleError as error:
        return error.message
    return None


def works(name: str, **how: object) -> bool:
    """Whether the schedule can be built and passes the validator.

    >>> works("gems", stages=3, microbatches=2), works("gems", stages=4, microbatches=2)
    (False, True)
    """
    return refusal(name, **how) is None


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
