"""MixPipe's performance model: how many microbatches to inject into two opposite pipelines.

"MixPipe: Efficient Bidirectional Pipeline Parallelism for Training Large-Scale Models" (DAC 2023). D stages run
in both directions on D GPUs, with D microbatches of B samples per batch (N = D) and W such pairs in parallel. K of
the microbatches enter before the first backward, Gamma more are let in later. With a backward that takes two
forwards, a batch takes D + N_bubbles times what one stage needs for one microbatch, and

    N_bubbles = (5D - 3K - 4)/3 - Gamma
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from megatron_2bw.planner.errors import PlanError, check_count
from megatron_2bw.planner.memory.memory import CONTEXT_BYTES, FRAGMENTED_SHARE
from megatron_2bw.planner.multiples import nearest_multiple
from megatron_2bw.planner.papers.blocks import Blocks, compute_s, estimate, link_bytes_per_s
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.systems.mixpipe import claimed_span


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A configuration that fits, and what the model predicts for it."""

    width: int
    """W: pairs of pipelines."""
    depth: int
    """D, which is also the number of microbatches N."""
    microbatch: int
    injected: int
    """K."""
    extra: int
    """Gamma."""
    samples_per_s: float
    memory_bytes: float


def choices(depth: int) -> Iterator[tuple[int, int]]:
    """All (K, Gamma): K = 2k with k in [1, D/2], Gamma in [0, (D-K)/2].

    >>> list(choices(4))
    [(2, 0), (2, 1), (4, 0)]

    Raises:
        PlanError: an odd depth; half of the microbatches go each way.
    """
    _check_even(depth)
    return ((injected, extra) for injected in range(2, depth + 1, 2) for extra in range((depth - injected) // 2 + 1))


def steps(depth: int, injected: int, extra: int) -> Fraction:
    """Times of a stage per batch: ``D + N_bubbles``, but no less than ``D(D+1)/(2(K+Gamma))``; K = D is Chimera.

    Where D is large and K small, the published number is below what K+Gamma activations in flight allow: on each
    GPU the D activations of a batch live ``(D+1)/2`` times on average, K+Gamma of them at once.

    >>> [str(steps(4, *choice)) for choice in choices(4)]
    ['22/3', '19/3', '16/3']
    >>> steps(10, 2, 0), Fraction(claimed_span(10, 2, 0), 3)
    (Fraction(55, 2), Fraction(70, 3))
    """
    published = Fraction(claimed_span(depth, injected, extra), 3)
    return max(published, Fraction(depth * (depth + 1), 2 * (injected + extra)))


def memory_bytes(blocks: Blocks, *, depth: int, microbatch: int, in_flight: int) -> float:
    """``2*M_theta + (K+Gamma)*M_a(B)``: two stages' weights and their activations in flight, on one GPU.

    >>> blocks = Blocks(
    ...     count=8, state_bytes=800, gradient_bytes=0, activation_bytes=80, boundary_bytes=1, start_s=0, sample_s=0
    ... )
    >>> memory_bytes(blocks, depth=4, microbatch=2, in_flight=3)
    520.0
    """
    return (2 * blocks.state_bytes + in_flight * microbatch * blocks.activation_bytes) / depth


def largest_microbatch(blocks: Blocks, budget_bytes: float, *, depth: int, in_flight: int) -> int:
    """``(M_budget - 2*M_theta)*B_base / ((K+Gamma)*M_a(B_base))``, rounded down; 0 where none fits."""
    left_bytes = budget_bytes - memory_bytes(blocks, depth=depth, microbatch=0, in_flight=in_flight)
    return max(0, int(left_bytes * depth // (in_flight * blocks.activation_bytes)))


def plan(model: Model, cluster: Cluster, global_batch: int, *, blocks: Blocks | None = None) -> tuple[Plan, ...]:
    """Every (D, K, Gamma) that fits, the fastest first: ``T = B_hat/(t_comp + t_p2p + t_a2a)`` (equation 6).

    All GPUs are used: W = GPUs/D, and B_hat = B*N*W fixes B. What goes into the two times for communication is
    this module's reading: ``t_p2p`` fills and drains a pipeline, ``t_a2a`` sums the gradients of a GPU's two
    stages over their 2W replicas. A node holds whole pipelines if they are short enough.

    Args:
        global_batch: B_hat, a multiple of the number of GPUs.
        blocks: to plan with, in place of ``estimate(model, cluster.gpu)``.

    Raises:
        PlanError: nothing fits, or the batch cannot be cut.

    >>> from megatron_2bw.planner.specs.cluster import CLUSTERS
    >>> model = Model(num_layers=48, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=30522)
    >>> [(plan.depth, plan.injected, plan.extra) for plan in plan(model, CLUSTERS["p3dn.24xlarge"], 128)[:3]]
    [(4, 2, 1), (8, 6, 1), (8, 4, 2)]
    """
    check_count("global_batch", global_batch, 1)
    if global_batch % cluster.gpus:
        nearest = nearest_multiple(global_batch, cluster.gpus)
        raise PlanError(f"global_batch {global_batch} is no multiple of {cluster.gpus} GPUs: use {nearest}")
    blocks = blocks or estimate(model, cluster.gpu)
    microbatch = global_batch // cluster.gpus
    found = [
        _predicted(blocks, cluster, microbatch, depth, injected, extra)
        for depth in _depths(blocks, cluster)
        for injected, extra in choices(depth)
        if microbatch <= largest_microbatch(blocks, budget_bytes(cluster), depth=depth, in_flight=injected + extra)
    ]
    if not found:
        raise PlanError(_nothing_fits(model, blocks, cluster, microbatch))
    return tuple(sorted(found, key=lambda plan: -plan.samples_per_s))


def _depths(blocks: Blocks, cluster: Cluster) -> list[int]:
    return [d for d in range(2, cluster.gpus + 1, 2) if cluster.gpus % d == 0 and blocks.count % d == 0]


def budget_bytes(cluster: Cluster) -> float:
    """M_budget: what is left of a GPU for tensors.

    With the default memory model's constants: its reserve, and its share lost between activations, here of all tensors.
    """
    return (cluster.memory_bytes - CONTEXT_BYTES) / (1 + FRAGMENTED_SHARE)


def _predicted(blocks: Blocks, cluster: Cluster, microbatch: int, depth: int, injected: int, extra: int) -> Plan:
    width = cluster.gpus // depth
    replicas = 2 * width
    batch_s = float(steps(depth, injected, extra)) * compute_s(blocks, depth=depth, microbatch=microbatch)
    hop_bytes_per_s = link_bytes_per_s(cluster, within_node=depth <= cluster.gpus_per_node)
    batch_s += 2 * (depth - 1) * microbatch * blocks.boundary_bytes / hop_bytes_per_s
    summed_bytes = 2 * (replicas - 1) / replicas * 2 * blocks.gradient_bytes / depth
    batch_s += summed_bytes / link_bytes_per_s(cluster, within_node=False)
    return Plan(
        width=width,
        depth=depth,
        microbatch=microbatch,
        injected=injected,
        extra=extra,
        samples_per_s=microbatch * cluster.gpus / batch_s,
        memory_bytes=memory_bytes(blocks, depth=depth, microbatch=microbatch, in_flight=injected + extra),
    )


def _nothing_fits(model: Model, blocks: Blocks, cluster: Cluster, microbatch: int) -> str:
    name, most = model.name or "as given", cluster.gpus
    depths = _depths(blocks, cluster)
    if not depths:
        return f"model {name} has {blocks.count} blocks: no even depth divides them and {most} GPUs; use other numbers"
    largest = max(largest_microbatch(blocks, budget_bytes(cluster), depth=d, in_flight=2) for d in depths)
    remedy = f"use global_batch {largest * most} or less" if largest else "use more GPUs, or larger ones"
    return f"model {name} does not fit on {most} x {cluster.gpu.name} with microbatches of {microbatch}: {remedy}"


def _check_even(depth: int) -> None:
    if depth < 2 or depth % 2:
        raise PlanError(f"depth {depth}: bidirectional pipelines need an even one; use {max(2, depth + depth % 2)}")
