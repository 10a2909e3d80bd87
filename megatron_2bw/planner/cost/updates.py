"""What a stage does beside forwards and backwards: it sends, and its replicas sum, gather and update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_2bw.planner.cost import fp8
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.cost.whole import least_bucket, padding_of
from megatron_2bw.planner.pipeline.stages import contents_of, free_stages
from megatron_2bw.planner.pipeline.weights import Weights
from megatron_2bw.planner.specs.layout import FP32_BYTES, WITHOUT_OVERLAP, Layout
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.placement import is_paired
from megatron_2bw.schedule.registry import BIDIRECTIONAL


class Held(NamedTuple):
    """Weights of a stage that the same ranks sum the gradients of, and share the optimizer of."""

    weights: int
    """On one rank."""
    replicas: int
    stride: int
    """From one replica to the next, in ranks."""
    of_layers: int
    """Of them, those that products in 8 bits would multiply with."""
    others: int = 0
    """Of them, those that an optimizer of matrices leaves to Adam."""


def fullest(model: Model, layout: Layout, weights: Weights) -> tuple[int, list[Held]]:
    """The first stage and its weights; where stages differ in more than their ends, the one that holds most."""
    last, stages = layout.pipeline - 1, [0]
    if free_stages(model, layout):
        stages = range(layout.pipeline)
    elif model.dense_layers or model.mtp_num_layers:
        stages = sorted({0, min(1, last), last})
    found = [(stage, _held_of(model, layout, weights, stage)) for stage in stages]
    return max(found, key=lambda pair: sum(held.weights for held in pair[1]))


def _held_of(model: Model, layout: Layout, weights: Weights, stage: int) -> list[Held]:
    """Weights of a stage, with those that pad its buffers; experts have replicas of their own."""
    is_of_matrices, chunks = layout.optimizer.is_of_matrices, contents_of(model, layout, stage)
    padding, of_experts = padding_of(model, layout, stage)
    held = Held(
        sum(weights.of(chunk, model) for chunk in chunks) + round(padding),
        layout.replicas,
        layout.tensor,
        sum(map(weights.of_layers, chunks)),
        sum(weights.others_of(chunk, model) for chunk in chunks) if is_of_matrices else 0,
    )
    if not model.num_experts:
        return [held]
    stride, experts = layout.expert_tensor * layout.expert, sum(map(weights.experts_of, chunks))
    return [held, Held(experts + round(of_experts), layout.expert_replicas, stride, experts)]


def replicated_s(model: Model, layout: Layout, machine: Machine, layers: int) -> float:
    """Sum over tensor-parallel ranks, of gradients of weights that all of them have and use for parts of the sequence.

    ``_allreduce_non_tensor_model_parallel_grads`` in ``megatron/core/distributed/finalize_model_grads.py``; those of
    norms alone are too few to price.
    """
    if not (layout.sequence_parallel and model.down_parameters):
        return 0.0
    return machine.all_reduce_s(layout.gradient_width * layers * model.down_parameters, layout.tensor, 1)


def send_s(model: Model, layout: Layout, machine: Machine) -> float:
    """Activations of one microbatch to the next stage, or their gradient back."""
    size_bytes = model.tokens(layout.microbatch, layout.context) * model.hidden_size * layout.precision.width
    # With both copies of a stage on a node, its neighbours' are on the next one, twice.
    distance = layout.tensor * layout.replicas * (2 if _is_paired(layout, machine) else 1)
    if layout.sequence_parallel:
        return machine.send_s(size_bytes / layout.tensor, distance, layout.gpus)
    if layout.split_transfers and layout.tensor > 1:
        share_s = machine.send_s(size_bytes / layout.tensor, distance, layout.gpus)
        return share_s + machine.reduce_scatter_s(size_bytes, layout.tensor, 1)
    return machine.send_s(size_bytes, distance, layout.gpus)


def gradients_s(layout: Layout, machine: Machine, stage: Sequence[Held], backward_s: float) -> float:
    """Sum over replicas; with overlap, what goes on after the last backward, at least its last bucket."""
    sum_s = sum(_sum_s(layout, machine, held) for held in stage)
    if layout.schedule in WITHOUT_OVERLAP or not layout.overlap_gradients:
        return sum_s
    return max(sum_s - backward_s, sum_s * _bucket_share(layout, stage))


def _sum_s(layout: Layout, machine: Machine, held: Held) -> float:
    """With the distributed optimizer, over the ranks of an instance, and of each shard over the instances."""
    size_bytes, shards = layout.gradient_width * held.weights, layout.shards(held.replicas)
    instances, distance = held.replicas // shards, held.stride * shards
    scattered_s = machine.reduce_scatter_s(size_bytes, shards, held.stride)
    return scattered_s + machine.all_reduce_s(size_bytes / shards, instances, distance)


def _bucket_share(layout: Layout, stage: Sequence[Held]) -> float:
    """Of a stage's weights, in one bucket."""
    return min(1.0, least_bucket(layout) / sum(held.weights for held in stage))


def gathered_s(layout: Layout, machine: Machine, stage: Sequence[Held], forward_s: float) -> float:
    """Weights out of the replicas' shards; with overlap, what the first forwards wait for.

    Chunks are gathered one after the other, while the d microbatches of the chunk before pass. Without chunks only the
    first stage has buckets, and another stage begins when its first microbatch has come: ``forward_step_helper`` and
    ``param_sync_func`` in ``megatron/core/pipeline_parallel/schedules.py``; ``bucket_size`` and the forward pre-hook
    in ``megatron/core/distributed/distributed_data_parallel.py``.
    """
    if not layout.distributed_optimizer:
        return 0.0
    chunks, width = layout.chunks, layout.precision.width
    saved = width - fp8.gathered_width(layout.fp8, width, parameters=layout.fp8_parameters)  # Not of embeddings.
    gather_s = sum(
        machine.reduce_scatter_s(
            width * held.weights - saved * held.of_layers, layout.shards(held.replicas), held.stride
        )
        for held in stage
    )
    if layout.schedule in WITHOUT_OVERLAP or not layout.overlap_parameters:
        return gather_s
    if chunks > 1:
        return gather_s / chunks + (chunks - 1) / chunks * max(gather_s - layout.pipeline * forward_s, 0.0)
    first_s = max(gather_s - forward_s, gather_s * _bucket_share(layout, stage))
    return first_s + (layout.pipeline - 1) * gather_s


def exchange_s(layout: Layout, machine: Machine, stage: Sequence[Held]) -> float:
    """Weights of one stage and gradients of another, between the ranks that have both copies of both."""
    size_bytes = sum(held.weights for held in stage) * (layout.precision.width + layout.gradient_width)
    if _is_paired(layout, machine):
        return machine.send_s(size_bytes, 1, 1)
    return machine.send_s(size_bytes, layout.tensor * layout.replicas * (layout.pipeline - 1), layout.gpus)


def _is_paired(layout: Layout, machine: Machine) -> bool:
    return layout.schedule in BIDIRECTIONAL and is_paired(
        ranks=layout.gpus, per_node=machine.gpus_per_node, stages=layout.pipeline
    )


def norm_s(model: Model, layout: Layout, machine: Machine, word_embedding: int) -> float:
    """Sum of the word embedding's gradient over the stages that have it, and of the norm over all ranks."""
    return _tied_s(model, layout, machine, word_embedding) + machine.all_reduce_s(FP32_BYTES, layout.gpus, 1)


def _tied_s(model: Model, layout: Layout, machine: Machine, word_embedding: int) -> float:
    """On the first stage, on the last where the output layer has the same weight, and where tokens are predicted."""
    last = layout.pipeline - 1
    stages = {0, *([last] if model.tied else [])}
    if model.mtp_num_layers:
        free = free_stages(model, layout)
        stages |= {rank for rank, chunks in enumerate(free) for held in chunks if held.mtp} or {last}
    size_bytes = layout.gradient_width * word_embedding
    if len(stages) == 1:
        return 0.0
    if _is_paired(layout, machine):  # Both are on one node.
        return machine.send_s(size_bytes, 1, 1)
    distance = layout.tensor * layout.replicas
    if len(stages) > 2:
        return machine.all_reduce_s(size_bytes, len(stages), distance)
    # Two ranks send each other all of it; so do those of the other replicas and shards, at the same time.
    return machine.send_s(size_bytes, distance, layout.gpus)


def update_s(layout: Layout, machine: Machine, stage: Sequence[Held]) -> float:
    """Adam reads four fp32 numbers per weight and writes three; gradients are read for the norm and zeroed.

    With one moment in place of two, three are read and two written; in other precisions, see ``_step_bytes``.
    """
    all_of_them = sum(held.weights for held in stage)
    shares = [layout.shards(held.replicas) for held in stage]
    own = sum(held.weights / share for held, share in zip(stage, shares, strict=True))
    if machine.profile is not None:
        return machine.profile.update_s(layout, own)
    moved_bytes = own * (_step_bytes(layout) + layout.gradient_width)
    moved_bytes += sum(2 * FP32_BYTES * held.others / share for held, share in zip(stage, shares, strict=True))
    return machine.elementwise_s(moved_bytes + all_of_them * layout.gradient_width)


_PASSES_OVER_COPIES = {"fp16": 9, "bf16": 4, "fp8": 5}
"""Of what is kept in fewer bits: how often ``FusedAdam.step`` reads or writes its copy in fp32."""


def _step_bytes(layout: Layout) -> int:
    """Moved per weight by an optimizer's step."""
    if layout.adam_state is None:
        return (3 + 2 * layout.optimizer.moments) * FP32_BYTES + layout.precision.width
    gradient = layout.gradient_width if layout.is_optimizer_apart else FP32_BYTES
    weights = layout.precision.width * (2 if layout.has_remainders else 1)
    copies = sum(map(_PASSES_OVER_COPIES.__getitem__, layout.adam_state.copied)) * FP32_BYTES
    return gradient + 2 * layout.state_width + weights + copies


def cast_s(layout: Layout, machine: Machine, weights: int) -> float:
    """Weights of layers in 8 bits, once per batch."""
    per_weight = fp8.weight_cast_bytes(
        layout.fp8, layout.precision.width, parameters=layout.fp8_parameters, transposes=machine.transposes
    )
    return machine.elementwise_s(weights * per_weight) if per_weight else 0.0
