"""What the planner refuses."""

from __future__ import annotations

import reprlib

MOST = 10**12
"""More than any size or count is; products of several stay within what a float holds."""


class PlanError(ValueError):
    """Input that makes no sense: names the field, its value, the rule and the nearest choice that keeps it."""


def wrong_count(name: str, value: object, least: int) -> str:
    """Why ``value`` is no count from ``least`` to ``MOST``."""
    bound = f"at most {MOST}" if isinstance(value, int) and value > MOST else f"at least {least}"
    return f"{name} {reprlib.repr(value)}: give a whole number of {bound}"
