"""Medians of few and noisy measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, from the order of the values; all of them where there are too few.

    Two values of n bound the median with 95% that are ``0.98 * sqrt(n)`` places from the middle: the binomial
    distribution's normal approximation.
    """
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(len(ordered) / 2 - half) - 1, math.ceil(len(ordered) / 2 + half)
    return statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]
