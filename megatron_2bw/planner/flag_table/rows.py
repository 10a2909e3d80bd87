"""Rows of the table of flags: what a row says, and how it finds out whether its flag is set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_2bw.planner.specs.adam_state import TORCH_NAMES
from megatron_2bw.planner.spelling import attribute
from megatron_2bw.schedule.registry import DELAYED, MEGATRON, SCHEDULES

OURS = frozenset(SCHEDULES)
SYNCHRONOUS = OURS - DELAYED
STOCK = frozenset({MEGATRON})
"""Megatron's own loop, which is refused only what it cannot do of our flags."""

USE_FLUSH = "use --pipeline-schedule 1f1b-flush, or leave the flag out"
USE_MEGATRON = "use --pipeline-schedule megatron, or leave the flag out"


def given(*names: str) -> Callable[[Any], bool]:
    """Whether one of the attributes has a value other than Megatron's "off" values."""
    return lambda args: any(getattr(args, name, None) not in (None, False, "none", 0, [], (), "") for name in names)


def words(value: str | list[str] | None) -> list[str]:
    """The words of a flag that takes one or several."""
    return [value] if isinstance(value, str) else value or []


def above(name: str, limit: float) -> Callable[[Any], bool]:
    """Whether the attribute is larger than ``limit``."""
    return lambda args: (getattr(args, name, None) or limit) > limit


def sums_in_bf16(args: Any) -> bool:
    """Whether gradients are summed in bf16; the flags say nothing in other precisions."""
    return args.bf16 and (args.grad_reduce_in_bf16 or stored_in(args, "main_grads_dtype") == "bf16")


def stored_in(args: Any, name: str) -> str:
    """The precision that an argument says, before and after Megatron has made a type of it; fp32 by default."""
    value = str(getattr(args, name, None) or "fp32")
    return TORCH_NAMES.get(value, value)


@dataclass(frozen=True, slots=True)
class Row:
    """A flag that does not simply work, under some of the schedules."""

    flag: str
    schedules: frozenset[str]
    reason: str
    is_set: Callable[[Any], bool] | None = field(default=None, kw_only=True)
    """Decides from the parsed arguments; None: whether the one that ``flag`` names is given."""

    def applies(self, args: Any, schedule: str) -> bool:
        """Whether the run is under one of the schedules, with the flag set."""
        is_set = given(attribute(self.flag)) if self.is_set is None else self.is_set
        return schedule in self.schedules and is_set(args)


@dataclass(frozen=True, slots=True)
class Refused(Row):
    """Stops the run before training; asked before Megatron validates its arguments, and again after."""

    remedy: str

    def message(self, schedule: str) -> str:
        """What a user is told."""
        return f"{self.flag} does not work with --pipeline-schedule {schedule}: {self.reason}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Slowed(Row):
    """Works and costs speed, with a one-line notice; most make all ranks meet."""


@dataclass(frozen=True, slots=True)
class Mapped(Row):
    """Gets another value, with a one-line notice."""

    becomes: str
    change: Callable[[Any], None]


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    """A change of one attribute."""
    return lambda args: setattr(args, name, value)
