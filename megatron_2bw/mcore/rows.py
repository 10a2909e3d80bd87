"""Rows of the table of flags: what a row says, and how it finds out whether its flag is set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DELAYED = frozenset({"2bw"})
FLUSHED = frozenset({"1f1b-flush", "gpipe", "inter-layer"})
OURS = DELAYED | FLUSHED
"""Those that train; the others are simulated and drawn."""

USE_FLUSH = "use --pipeline-schedule 1f1b-flush, or leave the flag out"
USE_MEGATRON = "use --pipeline-schedule megatron, or leave the flag out"

VIRTUAL = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",  # Derived, from a pipeline layout for one.
)


def why_not_trained(schedule: str) -> str | None:
    """What keeps a registered schedule from training, with the remedy; None for ours.

    >>> why_not_trained("gems")[:52]
    'gems is simulated and drawn, not trained with: a ran'
    """
    if schedule in OURS:
        return None
    reason = "a rank would have to hold two stages, of two copies of the model"
    if schedule == "pipedream":
        reason = "every stage would have to update after every microbatch, each with a delay of its own"
    return (
        f"{schedule} is simulated and drawn, not trained with: {reason}; "
        f"use one of {', '.join(sorted(OURS))}, or look at it with megatron-2bw show {schedule}"
    )


def given(*names: str) -> Callable[[Any], bool]:
    """Whether one of the attributes has a value other than Megatron's "off" values."""
    return lambda args: any(getattr(args, name, None) not in (None, False, "none", 0, [], (), "") for name in names)


def words(value: str | list[str] | None) -> list[str]:
    """The words of a flag that takes one or several."""
    return [value] if isinstance(value, str) else value or []


def above(name: str, limit: float) -> Callable[[Any], bool]:
    """Whether the attribute is larger than ``limit``."""
    return lambda args: (getattr(args, name, None) or limit) > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A flag that does not simply work, under some of the schedules."""

    flag: str
    is_set: Callable[[Any], bool]
    """Decides from the parsed arguments."""
    schedules: frozenset[str]
    reason: str

    def applies(self, args: Any, schedule: str) -> bool:
        """Whether the run is under one of the schedules, with the flag set."""
        return schedule in self.schedules and self.is_set(args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Row):
    """Stops the run before training; asked before Megatron validates its arguments, and again after."""

    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed(Row):
    """Works and makes all ranks meet, with a one-line notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped(Row):
    """Gets another value, with a one-line notice."""

    becomes: str
    change: Callable[[Any], None]


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    """A change of one attribute."""
    return lambda args: setattr(args, name, value)
