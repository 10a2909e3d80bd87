"""Ways to fit: recomputation and a gradient buffer less, in steps that need less memory and mostly more time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megatron_2bw.planner.layout import Layout, Recompute, RecomputeMethod
from megatron_2bw.planner.model import Model


class Saving(NamedTuple):
    """One way to save memory, in one or more steps."""

    base: Layout
    gradient_buffers: int
    recompute: Recompute
    method: RecomputeMethod
    sizes: Sequence[int]
    """Of ``recompute_layers``, less time first; with equal times, the usual one first."""

    @property
    def falls(self) -> bool:
        """Each size needs less memory, and more time, than the one before."""
        return self.recompute == Recompute.FULL and self.method == RecomputeMethod.BLOCK

    @property
    def is_uniform(self) -> bool:
        """Every layer is computed again, whatever the size."""
        return self.recompute == Recompute.FULL and self.method == RecomputeMethod.UNIFORM

    def layout(self, size: int) -> Layout:
        if self.recompute == Recompute.NONE and self.gradient_buffers == self.base.gradient_buffers:
            return self.base
        return replace(
            self.base,
            gradient_buffers=self.gradient_buffers,
            recompute=self.recompute,
            recompute_method=self.method,
            recompute_layers=size,
        )


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


def group_sizes(model: Model, stages: tuple[int, ...]) -> tuple[int, ...]:
    """Of layers that are computed again together: those of further predicted tokens know groups of one alone."""
    return (1,) if model.mtp_num_layers else distinct_group_sizes(stages)


@cache
def distinct_group_sizes(stages: tuple[int, ...]) -> tuple[int, ...]:
    """Smallest sizes of groups that cut the layers of each stage into each possible number of groups.

    >>> distinct_group_sizes((8, 8)), distinct_group_sizes((7, 8))
    ((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8))
    """
    return tuple(sorted({-(-layers // groups) for layers in stages for groups in range(1, layers + 1)}))
