"""A model as a row of equal blocks: the sizes and times that the planners of the papers compute with.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503v3), Appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.specs.cluster import Cluster, Gpu
from megatron_2bw.planner.specs.model import Model

RECOMPUTE_FACTOR = 4 / 3
"""c_extra, Appendix A.1.1: one more forward, where a backward takes two."""

SHARE_OF_PEAK = 45 / 125
"""Section 5: about 45 TFLOP/s on one V100, whose peak is 125; a 355M GPT in mixed precision."""

BLOCK_START_S = 3.3e-3
"""Of forward and backward of one block, at any microbatch size. Figure 12(a), GPT 1.3B on 8 stages of 3 blocks
with recompute: 31, 47, 58, 63, 66 samples/s at b = 1, 2, 4, 8, 16, as a public transcription reads the plot, to
about +-1. At 45 TFLOP/s the median of what remains is 13.3 ms per microbatch, for 3 blocks and 4/3 of their work.
Nothing else is fitted."""

STATE_BYTES_PER_PARAMETER = 18
"""Megatron's ``compute_weight_and_optimizer_memory``: 16-bit weight, fp32 gradient, main weight and Adam's two
moments. Appendix A speaks of weights; by their 2 bytes alone, models of 150B would fit on 64 GPUs of 16 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A model as this planner sees it: measured, or from ``estimate``."""

    count: int
    state_bytes: float
    """|W|: of all blocks."""
    gradient_bytes: float
    """Of all blocks, as replicas exchange them."""
    activation_bytes: float
    """|A_total(1)|: of all blocks, for one sample."""
    boundary_bytes: float
    """|A_input(1)|: what a stage receives from the one before it, for one sample."""
    start_s: float
    """Forward and backward of one block: what any microbatch costs."""
    sample_s: float
    """Forward and backward of one block: what each sample adds."""


def estimate(model: Model, gpu: Gpu) -> Blocks:
    """Blocks of ``model`` on ``gpu`` in 16-bit precision, where no profile is at hand.

    Forward FLOPs per sample are ``2*s`` per weight of attention and MLP and ``4*s^2*h`` for the attention scores;
    activations are ``s*(18*h + 4*f) + 5*a*s^2`` bytes (Korthikanti et al., arXiv 2205.05198, section 4.1).

    Raises:
        PlanError: not all layers are alike.

    >>> from megatron_2bw.planner.specs.cluster import GPUS
    >>> model = Model(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=512, vocab_size=50257)
    >>> blocks = estimate(model, GPUS["v100-16gb"])
    >>> f"{blocks.activation_bytes / blocks.count / 1e6:.1f} MB and {blocks.sample_s * 1e3:.2f} ms per sample"
    '56.6 MB and 3.58 ms per sample'
    """
    if model.dense_layers or model.mtp_num_layers:
        raise PlanError("layers of several kinds: the papers' planners know equal ones alone; use --cost-model default")
    tokens, hidden = model.seq_length, model.hidden_size
    experts = model.moe_router_topk if model.num_experts else 1
    flops = 2 * tokens * (model.attention_parameters + experts * model.mlp_parameters + model.shared_parameters)
    flops += 2 * tokens**2 * (model.query_size + model.output_size)
    stored = tokens * (18 * hidden + (6 if model.swiglu else 4) * experts * model.ffn_hidden_size)
    stored += 5 * model.num_attention_heads * tokens**2
    return Blocks(
        count=model.num_layers,
        state_bytes=STATE_BYTES_PER_PARAMETER * model.parameters,
        gradient_bytes=2 * model.parameters,
        activation_bytes=model.num_layers * stored,
        boundary_bytes=2 * tokens * hidden,
        start_s=BLOCK_START_S,
        sample_s=3 * flops / (SHARE_OF_PEAK * gpu.peak_tflops * 1e12),
    )


def compute_s(blocks: Blocks, *, depth: int, microbatch: int, recompute: bool = False) -> float:
    """Tcomp, or ``c_extra*Tcomp`` with recompute: forward and backward of one stage for one microbatch."""
    once_s = blocks.count / depth * (blocks.start_s + microbatch * blocks.sample_s)
    return RECOMPUTE_FACTOR * once_s if recompute else once_s


def link_bytes_per_s(cluster: Cluster, *, within_node: bool) -> float:
    """B_high or B_low of one GPU; over the network that is its share of its node's, as all of them send at once."""
    if within_node or cluster.nodes == 1:
        return cluster.intra_node_gb_s * 1e9
    return cluster.inter_node_gb_s * 1e9 / cluster.gpus_per_node


def width_bytes_per_s(cluster: Cluster, width: int) -> float:
    """bwdth_width: B_high if w < GPUs of a node, else B_low."""
    return link_bytes_per_s(cluster, within_node=width < cluster.gpus_per_node)


def depth_bytes_per_s(cluster: Cluster, width: int, depth: int) -> float:
    """bwdth_depth: the slowest link between two stages; Appendix A leaves it open.

    Where ``width_bytes_per_s`` has the replicas of a stage share a node, only as many stages as there is room for
    share it too; elsewhere a node holds whole pipelines, if they are short enough.
    """
    neighbours = width * depth if width < cluster.gpus_per_node else depth
    return link_bytes_per_s(cluster, within_node=neighbours <= cluster.gpus_per_node)


def transfer_s(blocks: Blocks, cluster: Cluster, *, width: int, depth: int, microbatch: int) -> float:
    """Tcomm of one stage and microbatch, summed over its neighbours: ``2*|A_inp+out(b)|*I(d>1)/bwdth_depth``.

    |A_inp+out| is the input and the output of the stage, so that every tensor counts once.
    """
    if depth == 1:
        return 0.0
    return 2 * 2 * microbatch * blocks.boundary_bytes / depth_bytes_per_s(cluster, width, depth)


def reduce_s(blocks: Blocks, cluster: Cluster, *, width: int, depth: int) -> float:
    """Sum of one stage's gradients over its replicas: a ring moves ``2*(w-1)/w`` of them through each GPU."""
    return 2 * (width - 1) / width * blocks.gradient_bytes / depth / width_bytes_per_s(cluster, width)
