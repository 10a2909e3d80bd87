"""Divisors and multiples: what to suggest where sizes do not divide; and the first thing that is small enough."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from fractions import Fraction
from functools import cache

MOST = 10**12
"""More than any size or count is; products of several stay within what a float holds."""


def wrong_count(name: str, value: object, least: int) -> str:
    """Why ``value`` is no count from ``least`` to ``MOST``."""
    bound = f"at most {MOST}" if isinstance(value, int) and value > MOST else f"at least {least}"
    return f"{name} {reprlib.repr(value)}: give a whole number of {bound}"


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Divisors of ``number``, rising.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return tuple(low + [number // count for count in reversed(low) if count * count != number])


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` that is nearest to ``wanted``, the smaller one of two.

    >>> nearest_divisor(1024, 12)
    8
    """
    return min(divisors(number), key=lambda divisor: (abs(divisor - wanted), divisor))


def min_until[Thing](found: Iterable[tuple[float, Thing]], enough: float) -> tuple[float, Thing]:
    """The first pair whose number is at most ``enough``, else the one with the smallest.

    >>> min_until([(5, "a"), (3, "b"), (1, "c")], 3), min_until([(5, "a"), (4, "b")], 3)
    ((3, 'b'), (4, 'b'))
    """
    best = None
    for pair in found:
        if best is None or pair[0] < best[0]:
            best = pair
        if pair[0] <= enough:
            return pair
    return best


def nearest_multiple(number: int, unit: int) -> int:
    """The multiple of ``unit`` that is nearest to ``number``, at least ``unit``.

    >>> nearest_multiple(30, 8), nearest_multiple(1, 8)
    (32, 8)
    """
    return max(round(Fraction(number, unit)), 1) * unit
