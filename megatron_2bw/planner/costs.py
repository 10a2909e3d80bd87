"""How long a batch takes: kernels and collectives priced by size, put together by the schedule.

Seconds of a layer come from ``layer``, those of links from ``speeds``, and the time of a batch from the closed forms
in ``periods``, which ``tests/planner/test_periods.py`` compares with the simulator of the executor's own Programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_2bw.planner import fp8, muon, periods
from megatron_2bw.planner.cluster import Cluster
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.layer import Split, Works, works_of
from megatron_2bw.planner.layout import WITHOUT_OVERLAP, Fp8, Layout, Optimizer
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.periods import Pipeline
from megatron_2bw.planner.pieces import parts_of_batch, stage_pieces, time_of
from megatron_2bw.planner.programs import programs_of, shortened
from megatron_2bw.planner.speeds import Machine, Speed, error_bar, machine_of
from megatron_2bw.planner.stages import Weights, layers_of_stages, weights_of
from megatron_2bw.schedule.action import COMPUTE
from megatron_2bw.schedule.placement import is_paired
from megatron_2bw.schedule.program import GradientCopy
from megatron_2bw.schedule.registry import MIRRORED

if TYPE_CHECKING:
    from megatron_2bw.schedule.program import Schedule

SCHEDULES = ("2bw", "1f1b-flush", "gpipe", "megatron")
"""Those that a search tries by itself."""
PRICED = (*SCHEDULES, "inter-layer", "pipedream", "gems", "chimera", "mixpipe")
"""The others are for comparing, and are tried when asked for."""
_FILLING = ("1f1b-flush", "gpipe", "megatron", "inter-layer")
"""Those that begin every batch with an empty pipeline, in one direction."""
FP32_BYTES = 4
BUCKET_WEIGHTS, BUCKET_WEIGHTS_PER_REPLICA = 40_000_000, 1_000_000
"""Megatron's size of a gradient bucket is the larger: ``DistributedDataParallel.__init__``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One batch of one layout, far from the ends of a run."""

    time_s: float
    bubble_ratio: float
    """Idle share of all stages' time; updates are work, waiting for transfers or reductions is not. 0 of one stage."""
    tokens_per_s: float
    """Of the whole cluster."""
    flops_per_gpu_s: float
    """Of the model: what is recomputed does not count."""
    parts: dict[str, float]
    """Seconds of ``time_s`` on the slowest stage, by what they are spent on."""
    relative_error: float
    """Of ``time_s``: nine of ten measured batches are nearer."""
    error_source: str


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


class Times(NamedTuple):
    """What a batch is put together from."""

    pipeline: Pipeline
    works: Works


def iteration(model: Model, layout: Layout, cluster: Cluster, speed: Speed | None = None) -> Iteration:
    """Predict one batch.

    Args:
        model: what is trained.
        layout: how.
        cluster: where.
        speed: constants in place of those of the cluster's GPU.

    Raises:
        PlanError: a schedule that is not priced, or layers that cannot be spread.

    >>> from megatron_2bw.planner.cluster import CLUSTERS
    >>> model = Model(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50257)
    >>> for schedule in ("1f1b-flush", "2bw"):
    ...     layout = Layout(schedule=schedule, pipeline=4, data=2, microbatch=4, global_batch=64)
    ...     batch = iteration(model, layout, CLUSTERS["dgx-a100"])
    ...     print(f"{schedule}: {batch.time_s:.2f} s, bubble {batch.bubble_ratio:.0%}")
    1f1b-flush: 1.17 s, bubble 39%
    2bw: 0.92 s, bubble 22%
    """
    times = times_of(model, layout, cluster, speed)
    pipeline = times.pipeline
    bar = error_bar(
        cluster,
        model,
        fused_attention=layout.fused_attention,
        interleaved=layout.chunks > 1,
        shared=layout.context > 1,
        in_8_bits=layout.fp8 is not Fp8.NONE,
    )
    busy_s = sum(count * stage.pair_s for stage, count in zip(pipeline.kinds, pipeline.counts, strict=True))
    work_s = layout.microbatches * busy_s + layout.pipeline * pipeline.update_s
    time_s = _shared_s(layout, times.pipeline, cluster, work_s)
    return Iteration(
        time_s=time_s,
        # Without other stages to wait for, what is left is the sum over replicas.
        bubble_ratio=0.0 if layout.pipeline == 1 else max(0.0, 1 - work_s / (layout.pipeline * time_s)),
        tokens_per_s=layout.global_batch * model.seq_length / time_s,
        flops_per_gpu_s=model_flops(model, layout.global_batch) / time_s / layout.gpus,
        parts=parts_of_batch(model, layout, pipeline, times.works, time_s, shared=_processor_share(cluster) < 1),
        relative_error=bar.share,
        error_source=bar.source,
    )


def least_s(model: Model, layout: Layout, cluster: Cluster) -> float:
    """What a batch takes at least: the prediction itself, or less where that is simulated or followed step by step.

    In both directions, the ranks in the middle have half of all stages' forwards before them and backwards behind them.
    """
    is_uneven = layout.schedule == "1f1b-flush" and (layout.first_stage_layers or model.dense_layers)
    if not (is_uneven or layout.schedule in MIRRORED) or _processor_share(cluster) < 1:
        return iteration(model, layout, cluster).time_s
    pipeline = times_of(model, layout, cluster).pipeline
    if is_uneven:
        return periods.one_f_one_b_s(pipeline)
    m, half = layout.microbatches, layout.pipeline // 2
    ends_s = m * (pipeline.first.pair_s + pipeline.last.pair_s) / 2
    middle_s = m * pipeline.middle.pair_s + pipeline.turn_s(0, half - 2) if half > 1 else 0.0
    return max(ends_s, middle_s, pipeline.turn_s(0, layout.pipeline - 1)) + periods.flush_s(pipeline)


def work_s(model: Model, layout: Layout, cluster: Cluster) -> float:
    """What a batch takes at least, because some stage computes as long as all of them do on average.

    With a flush, the first microbatch passes all stages before that one goes on alone; less where chunks or a second
    direction shorten its way.
    """
    works = works_of(model, Split.of(layout), machine_of(cluster))
    microbatch_s = (model.num_layers - model.dense_layers) * (works.layer.forward_s + works.layer.backward_s)
    microbatch_s += sum(work.forward_s + work.backward_s for work in (works.embedding, works.loss))
    for count, work in ((model.dense_layers, works.dense), (model.mtp_num_layers, works.mtp)):
        microbatch_s += count * (work.forward_s + work.backward_s)
    fills = layout.chunks == 1 and layout.schedule in _FILLING
    passes = layout.microbatches + (layout.pipeline - 1 if fills else 0)
    return _processor_share(cluster) * passes * microbatch_s / layout.pipeline * (1 - periods.ROUNDING)


def times_of(model: Model, layout: Layout, cluster: Cluster, speed: Speed | None = None) -> Times:
    """Price all that a batch consists of."""
    if layout.schedule not in PRICED:
        raise PlanError(f"schedule {layout.schedule!r} has no cost model; choose one of {', '.join(PRICED)}")
    if layout.chunks > 1 and layout.schedule != "megatron":
        raise PlanError(f"chunks {layout.chunks} of {layout.schedule}: use 1, or schedule megatron, which interleaves")
    machine, layers = machine_of(cluster, speed), layers_of_stages(model, layout)
    works = works_of(model, Split.of(layout), machine)
    alone = layout.pipeline == 1
    first = time_of(stage_pieces(model, layout, works, layers.first, is_first=True, is_last=alone))
    middle = time_of(stage_pieces(model, layout, works, layers.middle, is_first=False, is_last=False))
    last = time_of(stage_pieces(model, layout, works, layers.last, is_first=False, is_last=True))
    weights = weights_of(model, layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)
    stage, held = _fullest(model, layout, weights)
    of_stage = first if stage == 0 else last if stage == layout.pipeline - 1 else middle
    is_tied = model.tied or model.mtp_num_layers > 0
    by_muon = layout.optimizer is Optimizer.MUON and machine.profile is None
    pipeline = Pipeline(
        stages=layout.pipeline,
        microbatches=layout.microbatches,
        first=first,
        middle=middle,
        last=last,
        send_s=0.0 if alone else _send_s(model, layout, machine),
        update_s=_update_s(layout, machine, held)
        + _cast_s(layout, machine, sum(one.of_layers for one in held))
        + (muon.orthogonalized_s(model, layout, machine, stage, layers.of(stage, layout.pipeline)) if by_muon else 0.0)
        + _gathered_s(layout, machine, held, of_stage.forward_s),
        gradients_s=_gradients_s(layout, machine, held, of_stage.backward_s)
        + _replicated_s(model, layout, machine, max(layers)),
        norm_s=_norm_s(layout, machine, weights.word_embedding if is_tied and not alone else 0),
    )
    if layout.schedule in MIRRORED:
        gradients_s = pipeline.gradients_s + _exchange_s(layout, machine, held)
        pipeline = replace(pipeline, gradients_s=gradients_s)
    return Times(pipeline, works)


def _fullest(model: Model, layout: Layout, weights: Weights) -> tuple[int, list[Held]]:
    """The first stage and its weights; where stages have layers of several kinds, the one that holds most."""
    layers, last = layers_of_stages(model, layout), layout.pipeline - 1
    stages = sorted({0, min(1, last), last}) if model.dense_layers or model.mtp_num_layers else [0]
    found = [(stage, _held(model, layout, weights, stage, layers.of(stage, layout.pipeline))) for stage in stages]
    return max(found, key=lambda pair: sum(held.weights for held in pair[1]))


def _held(model: Model, layout: Layout, weights: Weights, stage: int, layers: int) -> list[Held]:
    where = stage, layers, model, layout.pipeline
    others = weights.others_of(*where) if layout.optimizer.is_of_matrices else 0
    held = [Held(weights.of(*where), layout.replicas, layout.tensor, weights.of_layers(*where), others)]
    if model.num_experts:
        stride, experts = layout.expert_tensor * layout.expert, weights.experts_of(*where)
        held.append(Held(experts, layout.expert_replicas, stride, experts))
    return held


def _replicated_s(model: Model, layout: Layout, machine: Machine, layers: int) -> float:
    """Sum over tensor-parallel ranks, of gradients of weights that all of them have and use for parts of the sequence.

    ``_allreduce_non_tensor_model_parallel_grads`` in ``megatron/core/distributed/finalize_model_grads.py``; those of
    norms alone are too few to price.
    """
    if not (layout.sequence_parallel and model.down_parameters):
        return 0.0
    return machine.all_reduce_s(layout.gradient_width * layers * model.down_parameters, layout.tensor, 1)


def _shared_s(layout: Layout, pipeline: Pipeline, cluster: Cluster, work_s: float) -> float:
    """Seconds per batch where ranks may have to share processors.

    A profile times ranks that are all busy. While r of d stages run, each is d/r times as fast, up to a processor
    of its own. With a flush, r goes up from 1 and down again, over m*v + d - 1 steps for v chunks; even stages of
    2bw are all busy, without pipelining one is. Uneven stages leave the processors to the slowest, which is never
    faster than on one of its own.
    """
    alone_s, share = batch_s(layout, pipeline), _processor_share(cluster)
    if share == 1:
        return alone_s
    stages, steps = pipeline.stages, layout.microbatches * layout.chunks
    running = _running(layout, stages, steps)
    stretch = sum(max(share * stages, count) for count in running) / sum(running)
    links_s = 2 * layout.microbatches * pipeline.send_s * (stages - 1) / stages
    return max(share * alone_s, stretch * work_s / stages + links_s + pipeline.gradients_s + pipeline.norm_s)


def _running(layout: Layout, stages: int, steps: int) -> list[int]:
    """How many of the ranks run, from step to step."""
    if layout.schedule in ("2bw", "pipedream"):
        return [stages] * steps
    if layout.schedule == "inter-layer":
        return [1] * (steps * stages)
    if layout.schedule in MIRRORED:
        return _running_both_ways(programs_of(layout))
    return [min(step, stages, steps, steps + stages - step) for step in range(1, steps + stages)]


def _running_both_ways(programs: Schedule) -> list[int]:
    """The same, with a backward that takes two forwards."""
    from megatron_2bw.schedule.simulate import Durations, simulate

    timeline = simulate(programs, Durations(forward_s=1, backward_s=2), 1)
    running = [0] * int(timeline.makespan_s)
    for event in (event for events in timeline.events for event in events if event.action.type in COMPUTE):
        for step in range(int(event.start_s), int(event.end_s)):
            running[step] += 1
    return running


def _processor_share(cluster: Cluster) -> float:
    return 1.0 if cluster.profile is None else cluster.profile.processor_share


def batch_s(layout: Layout, pipeline: Pipeline) -> float:
    """Seconds per batch in an endless run, by closed form.

    PipeDream and what runs in both directions have none and are simulated.
    """
    if layout.schedule == "2bw":
        return periods.two_bw_s(
            pipeline,
            extra_in_flight=layout.extra_in_flight,
            delayed=layout.delayed_microbatches or None,
            copy=gradient_copy(layout),
        )
    if layout.schedule == "gpipe":
        return periods.gpipe_s(pipeline)
    if layout.schedule == "inter-layer":
        return periods.inter_layer_s(pipeline)
    if layout.chunks > 1:
        return periods.interleaved_s(pipeline, layout.chunks)
    if layout.schedule in (*MIRRORED, "pipedream"):
        return _repeated_s(layout, pipeline)
    if layout.first_stage_layers or layout.last_stage_layers or _has_lighter_ends(pipeline):
        return periods.uneven_one_f_one_b_s(pipeline)
    return periods.one_f_one_b_s(pipeline)


def _has_lighter_ends(pipeline: Pipeline) -> bool:
    """Whether the first or the last of several stages takes less time, as with layers of another kind."""
    p = pipeline
    ends = (p.first, p.last) if p.stages > 2 else ()
    lighter = any(end[way] < p.middle[way] for end in ends for way in (0, 1))
    return lighter or (p.stages > 1 and p.first.forward_s > p.last.pair_s)


def _repeated_s(layout: Layout, pipeline: Pipeline) -> float:
    """What ``simulated_s`` finds, with each unit of microbatches that is left out as long as the last one."""
    fewer, lacks = shortened(layout)
    time_s = simulated_s(fewer, replace(pipeline, microbatches=fewer.microbatches))
    if not lacks:
        return time_s
    unit = (layout.microbatches - fewer.microbatches) // lacks
    fewest = replace(fewer, global_batch=fewer.global_batch - unit * fewer.microbatch * fewer.data)
    unit_s = time_s - simulated_s(fewest, replace(pipeline, microbatches=fewest.microbatches))
    return time_s + lacks * unit_s


def simulated_s(layout: Layout, pipeline: Pipeline) -> float:
    """Seconds per batch in an endless run of the Programs that the executor runs.

    Raises:
        PlanError: Megatron's interleaved schedule, for which there are no Programs.
    """
    # A search does not need the simulator, and a tenth of a second to load it is long.
    from megatron_2bw.schedule.lowering import with_gradient_copy
    from megatron_2bw.schedule.simulate import Durations, simulate, steady_state

    if layout.chunks > 1:
        raise PlanError(f"chunks {layout.chunks}: the interleaved schedule has no Programs to simulate; use 1")
    programs = programs_of(layout)
    stages = [stage for stage, count in zip(pipeline.kinds, pipeline.counts, strict=True) for _ in range(count)]
    durations = Durations(
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        # Of a rank's two stages, one is updated there.
        update_s=pipeline.update_s / len(programs.stages_of(0)),
        send_s=pipeline.send_s,
        gradients_s=pipeline.gradients_s,
        norm_s=pipeline.norm_s,
    )
    if not any(programs.delay):  # A flush leaves nothing to the next batch.
        return float(simulate(programs, durations, 1).makespan_s)
    if programs.name == "pipedream":
        return float(steady_state(programs, durations).period_s)
    return float(steady_state(with_gradient_copy(programs, gradient_copy(layout)), durations).period_s)


def gradient_copy(layout: Layout) -> GradientCopy:
    """What 2bw keeps of finished gradients with these flags."""
    if layout.gradient_buffers == 1:
        return GradientCopy.NONE
    return GradientCopy.SHARD if layout.distributed_optimizer else GradientCopy.WHOLE


def _send_s(model: Model, layout: Layout, machine: Machine) -> float:
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


def _gradients_s(layout: Layout, machine: Machine, stage: Sequence[Held], backward_s: float) -> float:
    """Sum over replicas; with overlap, what goes on after the last backward, at least its last bucket."""
    one = machine.reduce_scatter_s if layout.distributed_optimizer else machine.all_reduce_s
    sum_s = sum(one(layout.gradient_width * held.weights, held.replicas, held.stride) for held in stage)
    if layout.schedule in WITHOUT_OVERLAP or not layout.overlap_gradients:
        return sum_s
    return max(sum_s - backward_s, sum_s * _bucket_share(layout, stage))


def _bucket_share(layout: Layout, stage: Sequence[Held]) -> float:
    """Of a stage's weights, in one bucket."""
    bucket = max(BUCKET_WEIGHTS, BUCKET_WEIGHTS_PER_REPLICA * layout.replicas)
    return min(1.0, bucket / sum(held.weights for held in stage))


def _gathered_s(layout: Layout, machine: Machine, stage: Sequence[Held], forward_s: float) -> float:
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
        machine.reduce_scatter_s(width * held.weights - saved * held.of_layers, held.replicas, held.stride)
        for held in stage
    )
    if layout.schedule in WITHOUT_OVERLAP or not layout.overlap_parameters:
        return gather_s
    if chunks > 1:
        return gather_s / chunks + (chunks - 1) / chunks * max(gather_s - layout.pipeline * forward_s, 0.0)
    first_s = max(gather_s - forward_s, gather_s * _bucket_share(layout, stage))
    return first_s + (layout.pipeline - 1) * gather_s


def _exchange_s(layout: Layout, machine: Machine, stage: Sequence[Held]) -> float:
    """Weights of one stage and gradients of another, between the ranks that have both copies of both."""
    size_bytes = sum(held.weights for held in stage) * (layout.precision.width + layout.gradient_width)
    if _is_paired(layout, machine):
        return machine.send_s(size_bytes, 1, 1)
    return machine.send_s(size_bytes, layout.tensor * layout.replicas * (layout.pipeline - 1), layout.gpus)


def _is_paired(layout: Layout, machine: Machine) -> bool:
    return layout.schedule in MIRRORED and is_paired(
        ranks=layout.gpus, per_node=machine.gpus_per_node, stages=layout.pipeline
    )


def _norm_s(layout: Layout, machine: Machine, shared_weights: int) -> float:
    """Sum of the tied embedding's gradient over first and last stage, and of the norm over all ranks."""
    size_bytes = layout.gradient_width * shared_weights
    # Two ranks send each other all of it; so do those of the other replicas and shards, at the same time.
    if _is_paired(layout, machine):  # Both are on one node.
        ends_s = machine.send_s(size_bytes, 1, 1)
    else:
        ends_s = machine.send_s(size_bytes, layout.tensor * layout.replicas, layout.gpus)
    return (ends_s if shared_weights else 0.0) + machine.all_reduce_s(FP32_BYTES, layout.gpus, 1)


def _update_s(layout: Layout, machine: Machine, stage: Sequence[Held]) -> float:
    """Adam reads four fp32 numbers per weight and writes three; gradients are read for the norm and zeroed.

    With one moment in place of two, three are read and two written.
    """
    all_of_them = sum(held.weights for held in stage)
    shares = [held.replicas if layout.distributed_optimizer else 1 for held in stage]
    own = sum(held.weights / share for held, share in zip(stage, shares, strict=True))
    if machine.profile is not None:
        return machine.profile.update_s(layout.tensor, own)
    moved = 3 + 2 * layout.optimizer.moments
    moved_bytes = own * (moved * FP32_BYTES + layout.precision.width + layout.gradient_width)
    moved_bytes += sum(2 * FP32_BYTES * held.others / share for held, share in zip(stage, shares, strict=True))
    return machine.elementwise_s(moved_bytes + all_of_them * layout.gradient_width)


def _cast_s(layout: Layout, machine: Machine, weights: int) -> float:
    """Weights of layers in 8 bits, once per batch."""
    per_weight = fp8.weight_cast_bytes(layout.fp8, layout.precision.width, parameters=layout.fp8_parameters)
    return machine.elementwise_s(weights * per_weight) if per_weight else 0.0


def model_flops(model: Model, samples: int) -> float:
    """``72*B*L*s*h^2*(1 + s/(6*h) + V/(12*h*L))`` for plain GPT: three times the forward's, nothing computed again.

    Source: Korthikanti et al., arXiv 2205.05198, appendix A.

    >>> model = Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, vocab_size=51200)
    >>> f"{model_flops(model, 1536) / 1e18:.2f}"
    '3.39'
    """
    per_token = (model.num_layers - model.dense_layers + model.mtp_num_layers) * _layer_products(model)
    per_token += model.dense_layers * _layer_products(model.dense)
    per_token += model.mtp_num_layers * 2 * model.hidden_size**2
    per_token += (1 + model.mtp_num_layers) * model.padded_vocab_size() * model.hidden_size
    return 6 * samples * model.seq_length * per_token


def _layer_products(model: Model) -> int:
    """Multiplications per token in the products of a layer's forward."""
    experts = model.moe_router_topk if model.num_experts else 1
    weights = model.attention_matrices + model.shared_parameters
    weights += experts * (3 if model.swiglu else 2) * model.hidden_size * model.ffn_hidden_size
    return weights + (model.query_size + model.output_size) * model.seq_length
