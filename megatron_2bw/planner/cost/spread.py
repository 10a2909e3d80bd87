"""How groups of ranks that communicate lie on nodes."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple


class Spread(NamedTuple):
    """Of the group that is on the most nodes."""

    nodes: int
    local: int
    """Its ranks on the node where it has the fewest."""


@cache
def spread(ranks: int, stride: int, node: int) -> Spread:
    """Of groups of ``ranks``, each ``stride`` from the next, where nodes of ``node`` GPUs are full of such groups.

    One whose size does not divide the node's begins on one and ends on another, somewhere.

    >>> spread(8, 1, 8), spread(16, 1, 8), spread(4, 4, 8)
    (Spread(nodes=1, local=8), Spread(nodes=2, local=8), Spread(nodes=2, local=2))
    >>> spread(8, 1, 10), spread(12, 1, 8)
    (Spread(nodes=2, local=2), Spread(nodes=2, local=4))
    """
    if stride >= node:
        return Spread(ranks, 1)
    between = math.gcd(ranks * stride, node)  # From where one group begins on its node to where another does.
    starts = {(first + i) % node for first in range(0, node, between) for i in range(stride)}
    placed = [_placed(start, ranks, stride, node) for start in starts]
    nodes = max(found.nodes for found in placed)
    return Spread(nodes, min(found.local for found in placed if found.nodes == nodes))


def _placed(start: int, ranks: int, stride: int, node: int) -> Spread:
    """Of the group whose first rank is the one of that number on its node."""
    last = start + (ranks - 1) * stride
    if last < node:
        return Spread(1, ranks)
    on_first = (node - 1 - start) // stride + 1
    on_last = last % node // stride + 1
    return Spread(last // node + 1, min(on_first, on_last))
