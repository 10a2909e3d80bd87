"""Which layouts Megatron and the schedules accept, with the reason where they do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from megatron_2bw.planner.errors import Problem
from megatron_2bw.planner.multiples import divisors, nearest_divisor, nearest_multiple
from megatron_2bw.planner.pipeline.programs import refusal
from megatron_2bw.planner.pipeline.stages import layers_of_chunks, spread
from megatron_2bw.planner.specs.kernels import fp8_problem, fp8_size_problem, optimizer_problem
from megatron_2bw.planner.specs.layout import (
    Dispatcher,
    Fp8,
    Layout,
    Precision,
    Receives,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
)
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.specs.pipeline_layout import MTP, has_an_empty_stage, predicts_early, stages_of
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED, MEGATRON, TWO_BW
from megatron_2bw.schedule.systems.two_bw import MOST_EXTRA_IN_FLIGHT

if TYPE_CHECKING:
    from megatron_2bw.planner.search.shapes import Shape
    from megatron_2bw.planner.specs.space import Space

_CACHES_NO_FP8 = DELAYED | BIDIRECTIONAL
_BY_PROGRAMS = BIDIRECTIONAL | {"pipedream"}
"""Schedules that take only some numbers of microbatches."""


def delay_of(layout: Layout) -> int:
    """By how many updates the weights of a batch lag behind; under pipedream, on the first stage."""
    if layout.schedule == "pipedream":
        return layout.pipeline - 1
    return 1 if layout.schedule in TWO_BW else 0


def needs_megatron_0_19(layout: Layout) -> bool:
    """Whether Megatron 0.18 sums the gradients of its experts over the wrong ranks; our schedules refuse it there."""
    return layout.expert == 1 and layout.expert_tensor != layout.tensor


def problem(model: Model, layout: Layout) -> Problem | None:
    """Why ``layout`` cannot run; None if it can.

    >>> model = Model(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=50257)
    >>> print(problem(model, Layout(schedule="2bw", pipeline=4, data=1, microbatch=4, global_batch=8)))
    microbatches 2: 2bw needs at least 3 on 4 stages; raise global_batch to 12
    """
    needed = least_microbatches(layout.schedule, layout.pipeline, layout.extra_in_flight)
    return (
        tensor_problem(model, layout, sequence_parallel=layout.sequence_parallel)
        or context_problem(model, layout)
        or expert_problem(model, layout)
        or schedule_problem(layout)
        or overlap_problem(layout)
        or fp8_problem(layout)
        or module_problem(model, layout.modules_again, layout.fp8)
        or optimizer_problem(layout.optimizer, layout.precision, distributed=layout.distributed_optimizer)
        or instance_problem(layout)
        or model_problem(model, layout)
        or stage_problem(model, layout)
        or microbatch_problem(layout, needed)
    )


def tensor_problem(model: Model, split: Layout | Shape, *, sequence_parallel: bool) -> Problem | None:
    """Why tensor-parallel ranks cannot share one layer; what is to be used instead divides the GPUs of a stage.

    Rules: TransformerConfig.__post_init__; ``divide`` in ColumnParallelLinear; MoELayer.forward.
    """
    sizes, tensor = {"num_attention_heads": model.num_attention_heads}, split.tensor
    if not model.num_experts or split.expert_tensor == tensor:
        sizes["ffn_hidden_size"] = model.ffn_hidden_size
    if model.mtp_num_layers:
        sizes["hidden_size"] = model.hidden_size
    for name in ("dense_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if getattr(model, name):
            sizes[name] = getattr(model, name)
    if sequence_parallel:
        sizes["seq_length" if split.context == 1 else "seq_length / context"] = model.seq_length // split.context
    groups, columns = model.num_query_groups, 0 if model.multi_latent_attention else 2 * model.key_size
    shared = math.gcd(*sizes.values(), tensor * split.replicas)

    def remedy() -> str:
        fitting = [count for count in divisors(shared) if not ((groups % count and count % groups) or columns % count)]
        return f"use {min(fitting, key=lambda count: (abs(count - tensor), count))}"

    for name, size in sizes.items():
        if size % tensor:
            return Problem(f"tensor {tensor} does not divide {name} {size}", remedy())
    if groups % tensor and tensor % groups:
        return Problem(f"tensor {tensor} is neither a divisor nor a multiple of num_query_groups {groups}", remedy())
    if columns % tensor:  # Of the product that gives queries, keys and values.
        return Problem(f"tensor {tensor} does not divide 2 x num_query_groups x kv_channels {columns}", remedy())
    if sequence_parallel and tensor == 1:
        return Problem("sequence_parallel needs tensor above 1", "leave it out")
    if model.num_experts and tensor > 1 and not sequence_parallel:
        return Problem(f"tensor {tensor} with experts needs sequence_parallel", "switch it on")
    return None


def context_problem(model: Model, layout: Layout) -> Problem | None:
    """Why ranks cannot share the sequences.

    Rules: validate_args, "seq-length should be a multiple of 2 * context-parallel-size"; DotProductAttention, and
    Transformer Engine's ``get_attention_backend``, which knows no unfused attention to shares; ``get_batch`` of
    pretrain_bert.py, which does not cut them.
    """
    count, unit = layout.context, 2 * layout.context
    if count == 1:
        return None
    if model.kind is not Kind.GPT:
        return Problem(f"context {count}: Megatron cuts no sequences of {model.kind}", "use 1")
    if model.seq_length % unit:
        nearest = nearest_divisor(max(model.seq_length // 2, 1), count)
        return Problem(f"context {count}: seq_length {model.seq_length} is no multiple of {unit}", f"use {nearest}")
    if not layout.fused_attention:
        return Problem(f"context {count} needs fused attention", "use 1, or fused attention")
    return None


def expert_problem(model: Model, layout: Layout) -> Problem | None:
    """Why ranks cannot share the experts.

    Rules: validate_args, "Expert parallelism check"; ``initialize_model_parallel``, expert_data_parallel_size;
    ``MLP.forward``, "Only support fusion of swiglu and quick_gelu with per_token_scale".
    """
    count, split = layout.expert, layout.expert_tensor
    if not model.num_experts:
        for name, number, usual in (("expert", count, 1), ("expert_tensor", split, layout.tensor)):
            if number != usual:
                return Problem(f"{name} {number}: the model has no experts", "leave it out")
        if layout.overlap_exchanges:
            return Problem("overlap_exchanges: the model has no experts", "leave it out")
        return None
    if model.bias:
        return Problem(
            "experts with a bias are not priced, and with a fused SwiGLU Megatron does not weight what they give",
            "give --disable-bias-linear, or a model without bias",
        )
    ranks = layout.tensor * layout.replicas
    if model.ffn_hidden_size % split or ranks % split:
        nearest = nearest_divisor(math.gcd(model.ffn_hidden_size, ranks), split)
        return Problem(
            f"expert_tensor {split} does not divide ffn_hidden_size {model.ffn_hidden_size} and the {ranks} ranks of a "
            "stage",
            f"use {nearest}",
        )
    nearest = f"use {nearest_divisor(math.gcd(model.num_experts, ranks // split), count)}"
    if model.num_experts % count:
        return Problem(f"expert {count} does not divide num_experts {model.num_experts}", nearest)
    if ranks // split % count:
        more = f"{nearest}, or {math.lcm(ranks, split * count) // ranks} times as many GPUs"
        return Problem(f"expert {count} does not divide the {ranks // split} ranks that hold experts", more)
    return _exchange_problem(layout)


def _exchange_problem(layout: Layout) -> Problem | None:
    """Why tokens cannot get to their experts like that, or no price is known.

    Rules: ``MoEFlexTokenDispatcher``, "DeepEP dispatcher requires TPxEP > 1", which takes ranks that split an expert
    for ones with experts of their own; ``TransformerConfig``, ``overlap_moe_expert_parallel_comm``.
    """
    if layout.dispatcher.is_flexible and layout.expert == 1:
        return Problem(f"dispatcher {layout.dispatcher}: no ranks share the experts", f"use {Dispatcher.ALLTOALL}")
    if layout.dispatcher.is_flexible and layout.expert_tensor > 1:
        return Problem(
            f"dispatcher {layout.dispatcher} with expert_tensor {layout.expert_tensor} is not priced",
            "use expert_tensor 1",
        )
    if not layout.overlap_exchanges:
        return None
    if layout.expert == 1:
        return Problem("overlap_exchanges: no ranks share the experts", "leave it out")
    if layout.pipeline > 1 and layout.chunks == 1:
        return Problem(f"overlap_exchanges needs chunks on {layout.pipeline} stages", "use chunks 2, or leave it out")
    if layout.recompute is Recompute.FULL:
        return Problem("overlap_exchanges does not go with full recomputation", f"use recompute {Recompute.NONE}")
    if RecomputeModule.MOE in layout.modules_again:
        return Problem(
            f"overlap_exchanges does not go with recompute_modules {RecomputeModule.MOE}",
            f"use {RecomputeModule.MOE_ACT}",
        )
    return None


def module_problem(model: Model, modules: Collection[RecomputeModule], recipe: Fp8) -> Problem | None:
    """Why ``modules`` cannot be computed again: ``TransformerConfig.__post_init__``, ``recompute_modules``."""
    if RecomputeModule.MLA_UP_PROJ in modules and not model.multi_latent_attention:
        what = f"recompute_modules {RecomputeModule.MLA_UP_PROJ}"
        return Problem(f"{what}: the model has no latent vectors", "leave it out")
    if RecomputeModule.MOE_ACT in modules and not model.num_experts:
        return Problem(f"recompute_modules {RecomputeModule.MOE_ACT}: the model has no experts", "leave it out")
    if RecomputeModule.MLP in modules and model.bias:
        # What its checkpoint returns beside the output is the bias itself, whose gradient leads to the checkpoint.
        return Problem(
            f"recompute_modules {RecomputeModule.MLP}: Megatron's backward of an MLP with a bias never ends",
            "leave it out, or give --disable-bias-linear",
        )
    for module in (RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM):
        if module in modules and recipe is Fp8.DELAYED:
            return Problem(f"recompute_modules {module} does not go with fp8 {recipe}", f"use fp8 {Fp8.TENSORWISE}")
    return None


def schedule_problem(layout: Layout) -> Problem | None:
    """Why the schedule cannot run with products in 8 bits, or at this depth: see ``planner.flag_table.refused``."""
    ours = layout.schedule != MEGATRON
    if layout.fp8 is not Fp8.NONE and layout.schedule in _CACHES_NO_FP8:
        return Problem(
            f"fp8 {layout.fp8}: {layout.schedule} changes weights whose copies in 8 bits would stay old",
            "use schedule 1f1b-flush",
        )
    if ours and layout.pipeline < 2:
        return Problem(f"pipeline {layout.pipeline}: {layout.schedule} needs at least 2", f"use schedule {MEGATRON}")
    if ours and layout.chunks > 1:
        return Problem(f"chunks {layout.chunks}: {layout.schedule} does not interleave", f"use schedule {MEGATRON}")
    if layout.chunks > 1 and layout.pipeline < 2:
        return Problem(f"chunks {layout.chunks} need pipeline of at least 2", "use chunks 1")
    if layout.chunks > 1 and layout.pipeline < 3 and not layout.overlap_transfers:
        return Problem(
            f"chunks {layout.chunks} need overlap_transfers True on {layout.pipeline} stages", "use that, or chunks 1"
        )
    if layout.receives is not Receives.DEFAULT and not ours:
        return Problem(f"receives {layout.receives}: {layout.schedule} has one order of receives", "use default")
    if layout.extra_in_flight and layout.schedule not in TWO_BW:
        return Problem(
            f"extra_in_flight {layout.extra_in_flight}: {layout.schedule} keeps a fixed number of activations", "use 0"
        )
    if impossible := count_problem("extra_in_flight", layout.extra_in_flight):
        return impossible
    if layout.delayed_microbatches and layout.schedule not in TWO_BW:
        return Problem(
            f"delayed_microbatches {layout.delayed_microbatches}: {layout.schedule} has no such number", "use 0"
        )
    if layout.schedule in BIDIRECTIONAL and layout.pipeline % 2:
        nearest = layout.pipeline + 1
        return Problem(
            f"pipeline {layout.pipeline}: {layout.schedule} pairs stages and needs an even depth", f"use {nearest}"
        )
    for field, value in (("mixpipe_k", layout.mixpipe_k), ("mixpipe_gamma", layout.mixpipe_gamma)):
        if value and layout.schedule != "mixpipe":
            return Problem(f"{field} {value}: {layout.schedule} has no such number", "use 0")
    if layout.mixpipe_k % 2 or layout.mixpipe_k > layout.pipeline:
        nearest = min(layout.mixpipe_k // 2 * 2 or 2, layout.pipeline)
        return Problem(
            f"mixpipe_k {layout.mixpipe_k}: an even number up to pipeline {layout.pipeline}", f"use {nearest}"
        )
    most = (layout.pipeline - (layout.mixpipe_k or layout.pipeline)) // 2
    if layout.mixpipe_gamma > most:
        return Problem(f"mixpipe_gamma {layout.mixpipe_gamma}: at most (d - k)/2 = {most}", f"use {most}")
    return count_problem("gradient_buffers", layout.gradient_buffers)


def count_problem(field: str, count: int) -> Problem | None:
    """Why no layout has so many, whatever else it is."""
    nearest, rule = _COUNTS[field]
    return None if nearest(count) == count else Problem(f"{field} {count}: {rule}", f"use {nearest(count)}")


CHANGING_KERNELS = "which kernels run depends on the data, and one that is loaded late waits for receives"
"""Why no receive may be early."""
_COUNTS: dict[str, tuple[Callable[[int], int], str]] = {
    "extra_in_flight": (
        lambda count: min(count, MOST_EXTRA_IN_FLIGHT),
        f"above {MOST_EXTRA_IN_FLIGHT}, transfers would wait for each other",
    ),
    "gradient_buffers": (lambda count: count if count in (1, 2) else 2, "there are 1 or 2"),
    "mixpipe_k": (lambda count: max(count - count % 2, 2 * (count > 0)), "it is even"),
}
"""What comes nearest to a count of what a layout may have, and the rule."""


def impossible_counts(space: Space) -> dict[str, tuple[Problem, int]]:
    """By dimension of ``space``: why no layout has a count within its limit, and what comes nearest."""
    problems = {}
    for field, (nearest, _) in _COUNTS.items():
        counts = getattr(space, field) or ()
        if counts and all(count_problem(field, count) for count in counts):
            count = min(counts, key=lambda count: abs(nearest(count) - count))
            problems[field] = count_problem(field, count), nearest(count)
    return problems


def instance_problem(layout: Layout) -> Problem | None:
    """Why replicas do not form so many groups that share an optimizer.

    Rules: ``initialize_model_parallel``; DistributedDataParallel; ``get_megatron_optimizer`` for others than Adam.
    """
    count = layout.optimizer_instances
    if count == 1:
        return None
    if not layout.distributed_optimizer:
        return Problem(f"optimizer_instances {count} needs distributed_optimizer", "switch it on")
    if layout.optimizer.is_of_matrices:
        return Problem(
            f"optimizer_instances {count}: Megatron has one of optimizer {layout.optimizer}", "use 1, or optimizer adam"
        )
    for replicas, whose in ((layout.replicas, "a stage"), (layout.expert_replicas, "an expert")):
        if replicas % count:
            nearest = nearest_divisor(math.gcd(layout.replicas, layout.expert_replicas), count)
            return Problem(
                f"optimizer_instances {count} does not divide the {replicas} replicas of {whose}", f"use {nearest}"
            )
    return None


def overlap_problem(layout: Layout) -> Problem | None:
    """Why collectives cannot run beside products: validate_args, ``tp_comm_overlap`` and ``overlap_param_gather``."""
    if layout.overlap_tensor and not layout.sequence_parallel:
        remedy = "switch it on" if layout.tensor > 1 else "leave it out"  # Megatron drops it where tensor is 1.
        return Problem(f"overlap_tensor needs sequence_parallel{' and tensor above 1' * (layout.tensor == 1)}", remedy)
    if layout.overlap_parameters and not (layout.distributed_optimizer and layout.overlap_gradients):
        return Problem("overlap_parameters needs distributed_optimizer and overlap_gradients", "switch both on")
    return None


def model_problem(model: Model, layout: Layout) -> Problem | None:
    """Why the schedule cannot train this model like that: see ``planner.flag_table.refused``."""
    if refused := fp8_size_problem(model, layout):
        return refused
    if layout.receives is Receives.EARLY and model.num_experts:
        return Problem(f"receives early: {CHANGING_KERNELS}", "use late")
    if layout.schedule in BIDIRECTIONAL and model.num_experts:
        return Problem(
            f"num_experts {model.num_experts}: {layout.schedule} trains no experts", "use schedule 1f1b-flush"
        )
    if layout.schedule in _BY_PROGRAMS and model.mtp_num_layers:
        return Problem(
            f"mtp_num_layers {model.mtp_num_layers}: {layout.schedule} predicts no further tokens",
            "use schedule 1f1b-flush, or mtp_num_layers 0",
        )
    in_groups = layout.recompute is Recompute.FULL and layout.recompute_method is RecomputeMethod.UNIFORM
    if in_groups and layout.recompute_layers > 1 and model.mtp_num_layers:
        return Problem(
            f"recompute_layers {layout.recompute_layers}: with mtp_num_layers {model.mtp_num_layers} Megatron has "
            "groups of one layer alone",
            "use 1",
        )
    if layout.schedule == "pipedream" and model.tied:
        return Problem(
            "pipedream cannot tie the embeddings of two stages", "give --untie-embeddings-and-output-weights"
        )
    if layout.schedule == "pipedream" and layout.precision is Precision.FP16:
        return Problem(
            f"precision {layout.precision}: pipedream cannot scale losses", f"use {Precision.BF16} or {Precision.FP32}"
        )
    return None


def stage_problem(model: Model, layout: Layout) -> Problem | None:
    """Why the layers do not split into stages.

    Rules: validate_args, "Number of layers should be divisible by the pipeline-model-parallel size";
    TransformerConfig.__post_init__ for uneven stages. Unless a layout says where they are, layers without experts are
    priced on the first stage alone.
    """
    layers = spread(model, layout)
    if isinstance(layers, Problem):
        return layers
    if layout.pipeline_layout:
        return _free_problem(layout)
    first = layers.first // layout.chunks
    if model.dense_layers > first:
        where = "stage" if layout.chunks == 1 else "chunk"
        return Problem(
            f"dense_layers {model.dense_layers}: the cost model covers them on the first {where} alone, which has "
            f"{first} layers",
            "use fewer stages or chunks, or more first_stage_layers, or a pipeline_layout",
        )
    return None


def _free_problem(layout: Layout) -> Problem | None:
    """Why the schedule cannot run with stages like that: see ``planner.flag_table.refused``."""
    if layout.schedule == MEGATRON:
        return None
    stages = stages_of(layout.pipeline_layout)
    if predicts_early(stages):
        why = f"{layout.schedule} transfers tensors of one shape, and more go on from there"
        if layout.schedule in TWO_BW:
            why = f"{layout.schedule} ties embeddings of the first and the last stage alone"
        return Problem(
            f"pipeline_layout {layout.pipeline_layout!r} has {MTP} before the last stage: {why}",
            f"put {MTP} into the last stage, or use schedule {MEGATRON}",
        )
    if has_an_empty_stage(stages):
        return Problem(
            f"pipeline_layout {layout.pipeline_layout!r} has an empty stage: {layout.schedule} updates nothing there",
            f"give every stage a layer, or use schedule {MEGATRON}",
        )
    return None


def recompute_problem(model: Model, layout: Layout) -> Problem | None:
    """Why fewer layers to recompute mean the same: Megatron takes more than there are for all of a stage or chunk."""
    most = max(layers_of_chunks(model, layout))
    if layout.recompute is Recompute.FULL and layout.recompute_layers > most:
        return Problem(f"recompute_layers {layout.recompute_layers}: a stage has {most} layers", f"use {most}")
    return None


def least_microbatches(schedule: str, pipeline: int, extra_in_flight: int = 0) -> int:
    """The fewest microbatches per batch that ``schedule`` runs with.

    ``2bw``: (1 + extra_in_flight) * (d - 1), what its stages run ahead.
    """
    return max(1, (1 + extra_in_flight) * (pipeline - 1)) if schedule in TWO_BW else 1


def microbatch_problem(layout: Layout, needed: int) -> Problem | None:
    """Why the batch has too few microbatches, or a number that does not interleave.

    Rule of interleaving: forward_backward_pipelining_with_interleaving, microbatch groups of the pipeline's size.
    """
    count, unit = layout.microbatches, layout.microbatch * layout.data
    if count < needed:
        return Problem(
            f"microbatches {count}: {layout.schedule} needs at least {needed} on {layout.pipeline} stages",
            f"raise global_batch to {needed * unit}",
        )
    if refused := _delayed_problem(layout):
        return refused
    if layout.chunks > 1 and count % layout.pipeline:
        nearest = nearest_multiple(count, layout.pipeline)
        return Problem(
            f"microbatches {count}: interleaving needs a multiple of pipeline {layout.pipeline}",
            f"use global_batch {nearest * unit}",
        )
    if layout.schedule in _BY_PROGRAMS and (refused := refusal(layout)):
        return Problem(f"microbatches {count}: {refused}", f"use {_nearest_that_works(layout)}")
    return None


def _delayed_problem(layout: Layout) -> Problem | None:
    """Why the batch does not have so many to delay, or the first stage runs further ahead than that."""
    count, delayed = layout.microbatches, layout.delayed_microbatches
    ahead = least_microbatches(layout.schedule, layout.pipeline, layout.extra_in_flight)
    if delayed > count:
        reason, nearest = f"a batch has {count} microbatches", count - 1
    elif 0 < delayed < min(ahead, count):
        reason, nearest = f"the first of {layout.pipeline} stages runs {ahead} ahead", ahead
    else:
        return None
    remedy = f"use {nearest}, or leave it out" if ahead < count else "leave it out"
    return Problem(f"delayed_microbatches {delayed}: {reason}", remedy)


def _nearest_that_works(layout: Layout) -> str:
    """A batch, or options, with which the schedule takes the number of microbatches."""
    if layout.mixpipe_k or layout.mixpipe_gamma:
        return f"global_batch {layout.pipeline * layout.microbatch * layout.data}"
    counts = sorted(range(1, layout.microbatches + 2 * layout.pipeline), key=lambda m: abs(m - layout.microbatches))
    unit = layout.microbatch * layout.data
    return next(f"global_batch {m * unit}" for m in counts if not refusal(layout.but(global_batch=m * unit)))
