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


COST_HEADING = f"{'d = m':>5} {'ms per batch':>13} {'share':>8} {'95% interval':>18} {'ms':>7} {'95% interval':>18}"
"""Above what `cost_line` returns."""


def cost_line(stages: int, *, with_: Sequence[float], without: Sequence[float]) -> str:
    """What something costs, as a share and in milliseconds.

    Args:
        stages: of the pipeline.
        with_: seconds per batch of each block with it.
        without: of the blocks beside these.
    """
    pairs = list(zip(with_, without, strict=True))
    share, low, high = median_interval([a / b - 1 for a, b in pairs])
    ms, low_ms, high_ms = median_interval([1000 * (a - b) for a, b in pairs])
    share_text = f"{share:>8.2%} {f'{low:.2%} to {high:.2%}':>18}"
    ms_text = f"{ms:>7.2f} {f'{low_ms:.2f} to {high_ms:.2f}':>18}"
    return f"{stages:>5} {1000 * statistics.median(with_):>13.2f} {share_text} {ms_text}"
