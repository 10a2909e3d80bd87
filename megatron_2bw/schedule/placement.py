"""Where the ranks of bidirectional pipelines are: both copies of a stage, and all their replicas, on one node.

Ranks that have the same place in their pipelines, one per replica and tensor-parallel share, are neighbours in
Megatron's order. In it, places 0 to d-1 follow one another over the nodes, and ranks r and d-1-r, which exchange the
weights and gradients of two stages in every batch, are far apart. With both on one node, activations cross the
boundary between two nodes at two places instead of one.

Source: Zhang et al., "MixPipe", DAC 2023, section III-D: all replicas of a stage on one server.
"""

from __future__ import annotations


def is_paired(*, ranks: int, per_node: int, stages: int) -> bool:
    """Whether there are several nodes, each with room for both copies of as many stages.

    >>> is_paired(ranks=16, per_node=8, stages=4), is_paired(ranks=16, per_node=8, stages=2)
    (True, False)
    """
    per_place = ranks // stages
    return ranks > per_node and ranks % per_node == 0 and per_node % (2 * per_place) == 0


def rank_of(slot: int, *, ranks: int, per_node: int, stages: int) -> int:
    """Rank of the process that would have rank ``slot`` in the order of the nodes.

    >>> [rank_of(slot, ranks=8, per_node=4, stages=8) for slot in range(8)]
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if not is_paired(ranks=ranks, per_node=per_node, stages=stages):
        return slot
    per_place = ranks // stages
    pairs = per_node // per_place // 2
    node, position = divmod(slot // per_place, 2 * pairs)
    place = node * pairs + position if position < pairs else stages - (node + 1) * pairs + position - pairs
    return place * per_place + slot % per_place
