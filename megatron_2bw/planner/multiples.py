"""Divisors and multiples: what to suggest where sizes do not divide."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache


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


def nearest_multiple(number: int, unit: int) -> int:
    """The multiple of ``unit`` that is nearest to ``number``, at least ``unit``.

    >>> nearest_multiple(30, 8), nearest_multiple(1, 8)
    (32, 8)
    """
    return max(round(Fraction(number, unit)), 1) * unit
