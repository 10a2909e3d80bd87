"""Ranks of bidirectional pipelines by node: see `schedule.placement`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from megatron_2bw.schedule.placement import is_paired, rank_of

_OF_TORCHRUN = ("GROUP_WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


def place(args: Any) -> list[str]:
    """Give this process the rank that puts both copies of its stages on its node; says so, if that is another one.

    Needs what torchrun tells of nodes, all of one size. With another order of Megatron's groups than its default, or
    where nodes cannot hold pairs, ranks stay as they are.

    Args:
        args: Megatron's, parsed.
    """
    if not all(name in os.environ for name in _OF_TORCHRUN) or getattr(args, "use_tp_pp_dp_mapping", False):
        return []
    nodes, node, per_node, local = (int(os.environ[name]) for name in _OF_TORCHRUN)
    ranks, stages = args.world_size, args.pipeline_model_parallel_size
    if nodes * per_node != ranks or ranks % stages or not is_paired(ranks=ranks, per_node=per_node, stages=stages):
        return []
    if dist.is_initialized():  # By the training script, with the ranks as they were.
        return []
    # Not from RANK: parsed twice, the arguments give the same rank.
    args.rank = rank_of(node * per_node + local, ranks=ranks, per_node=per_node, stages=stages)
    os.environ["RANK"] = str(args.rank)
    return ["ranks are in an order that puts both copies of every stage on one node (MixPipe, section III-D)"]
