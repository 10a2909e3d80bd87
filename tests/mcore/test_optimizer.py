"""Parts of the delayed optimizer, without a run."""

from __future__ import annotations

import torch


def test_one_sharded_region_among_whole_ones_has_to_be_waited_for() -> None:
    """Experts spread over all replicas have no shards; the other weights do."""
    from megatron_2bw.mcore.optimizer import DelayedOptimizer
    from megatron_2bw.runtime.gradients import CapturedGradients, Region
    from megatron_2bw.schedule.program import GradientCopy

    optimizer = DelayedOptimizer.__new__(DelayedOptimizer)
    dense, experts = torch.zeros(4), torch.zeros(4)
    optimizer._captured = CapturedGradients([Region(dense, dense[:2]), Region(experts, experts)])
    assert optimizer.gradient_copy is GradientCopy.SHARD
