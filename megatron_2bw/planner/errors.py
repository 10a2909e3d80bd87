"""What the planner refuses."""

from __future__ import annotations

import reprlib
from typing import NamedTuple

MOST = 10**12
"""More than any size or count is; products of several stay within what a float holds."""


class Problem(NamedTuple):
    """Why something cannot be.

    >>> print(Problem("tensor 3 does not divide num_attention_heads 16", "use 2"))
    tensor 3 does not divide num_attention_heads 16; use 2
    """

    reason: str
    """The field, its value and the rule."""
    remedy: str
    """The nearest choice that keeps it."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class PlanError(ValueError):
    """Input that makes no sense: a ``Problem``, or its text."""

    @property
    def reason(self) -> str:
        """Without a remedy, where that is known apart."""
        (problem,) = self.args
        return problem.reason if isinstance(problem, Problem) else problem


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number from ``least`` to ``MOST``.

    Raises:
        PlanError: ``value`` is none.
    """
    if not isinstance(value, int) or not least <= value <= MOST:
        raise PlanError(wrong_count(name, value, least))


def wrong_count(name: str, value: object, least: int) -> Problem:
    """Why ``value`` is no count from ``least`` to ``MOST``."""
    bound = f"at most {MOST}" if isinstance(value, int) and value > MOST else f"at least {least}"
    return Problem(f"{name} {reprlib.repr(value)} is no count", f"give a whole number of {bound}")
