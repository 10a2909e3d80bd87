"""How long a batch takes: kernels and collectives priced by size, put together by the schedule.

Seconds of a layer come from ``layer``, those of links from ``speeds``, and the time of a batch from ``batch``,
which the tests compare with the simulator of the executor's own Programs, and with Megatron's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_2bw.planner.cost import muon, updates
from megatron_2bw.planner.cost.error_bars import error_bar
from megatron_2bw.planner.cost.layer import Works, works_of
from megatron_2bw.planner.cost.pieces import LAUNCHING, parts_of_batch, stage_pieces, time_of
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import Speed, machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.pipeline import batch, periods
from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.planner.pipeline.stages import Contents, chunks_in_order, contents_of, layers_of_stages
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout, Optimizer, Receives, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.registry import BIDIRECTIONAL

SCHEDULES = ("2bw", "1f1b-flush", "gpipe", "megatron")
"""Those that a search tries by itself."""
PRICED = (*SCHEDULES, "inter-layer", "pipedream", "gems", "chimera", "mixpipe")
"""The others are for comparing, and are tried when asked for."""
_WAITING = ("1f1b-flush", "2bw", "gpipe", "inter-layer", "pipedream")
"""Those of ours whose ranks wait for what they receive, unless it is received early."""
PRICED_EARLY = (
    "priced with --pipeline-receives early: late, the default on GPUs, a batch takes up to 1.3% more where a transfer "
    "takes 3% of a microbatch's forward and backward"
)
"""Of pipelines in both directions."""
_FILLING = ("1f1b-flush", "gpipe", "megatron", "inter-layer")
"""Those that begin every batch with an empty pipeline, in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One batch of one layout, far from the ends of a run."""

    time_s: float
    bubble_ratio: float
    """Idle share of all stages' time; updates are work, waiting for transfers or reductions is not. 0 of one stage."""
    tokens_per_s: float
    """Of the whole cluster."""
    flops_per_gpu_s: float
    """As Megatron's log counts: what is recomputed does not count, nor what a causal mask leaves out."""
    parts: dict[str, float]
    """Seconds of ``time_s`` on the slowest stage, by what they are spent on."""
    relative_error: float
    """A share of ``time_s``: nine of ten batches of the runs that ``error_source`` begins with were nearer to it."""
    error_source: str


class Times(NamedTuple):
    """What a batch is put together from."""

    pipeline: Pipeline
    works: Works

    def work_s(self, layout: Layout) -> float:
        """Of all stages together."""
        pipeline = self.pipeline
        pairs_s = sum(count * stage.pair_s for stage, count in zip(pipeline.kinds, pipeline.counts, strict=True))
        return layout.microbatches * pairs_s + layout.pipeline * pipeline.update_s


def iteration(model: Model, layout: Layout, cluster: Cluster, speed: Speed | None = None) -> Iteration:
    """Predict one batch.

    Args:
        model: what is trained.
        layout: how.
        cluster: where.
        speed: constants in place of those of the cluster's GPU.

    Raises:
        PlanError: a schedule that is not priced, or layers that cannot be spread.

    >>> from megatron_2bw.planner.specs.cluster import CLUSTERS
    >>> model = Model(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50257)
    >>> for schedule in ("1f1b-flush", "2bw"):
    ...     layout = Layout(schedule=schedule, pipeline=4, data=2, microbatch=4, global_batch=64)
    ...     batch = iteration(model, layout, CLUSTERS["dgx-a100"])
    ...     print(f"{schedule}: {batch.time_s:.2f} s, bubble {batch.bubble_ratio:.0%}")
    1f1b-flush: 1.17 s, bubble 39%
    2bw: 0.92 s, bubble 22%
    """
    times = times_of(model, layout, cluster, speed)
    pipeline, work_s = times.pipeline, times.work_s(layout)
    time_s = batch.shared_s(layout, as_received(model, layout, cluster, pipeline), cluster, work_s)
    parts = parts_of_batch(model, layout, pipeline, times.works, time_s, shared=batch.processor_share(cluster) < 1)
    bar = error_bar(cluster, model, layout, launching=parts[LAUNCHING] / time_s)
    return Iteration(
        time_s=time_s,
        # Without other stages to wait for, what is left is the sum over replicas.
        bubble_ratio=0.0 if layout.pipeline == 1 else max(0.0, 1 - work_s / (layout.pipeline * time_s)),
        tokens_per_s=layout.global_batch * model.seq_length / time_s,
        flops_per_gpu_s=logged_flops(model, layout.global_batch) / time_s / layout.gpus,
        parts=parts,
        relative_error=bar.share,
        error_source=bar.source,
    )


def least_s(model: Model, layout: Layout, cluster: Cluster) -> float:
    """What a batch takes at least: the prediction itself, or less where that takes longer to find."""
    times = times_of(model, layout, cluster)
    pipeline = as_received(model, layout, cluster, times.pipeline)
    if batch.processor_share(cluster) < 1:
        return batch.shared_s(layout, pipeline, cluster, times.work_s(layout))
    return batch.least_s(layout, pipeline)


def as_received(model: Model, layout: Layout, cluster: Cluster, pipeline: Pipeline) -> Pipeline:
    """``pipeline``, whose ranks wait for what they receive, or do not."""
    is_late = layout.receives is Receives.LATE
    if layout.receives is Receives.DEFAULT:
        has_gpus = cluster.profile is None or not cluster.profile.processors
        is_late = has_gpus or model.num_experts > 0
    can_wait = layout.schedule in _WAITING and layout.pipeline > 1
    return replace(pipeline, late_receives=True) if is_late and can_wait else pipeline


def unpriced_receives(layout: Layout) -> tuple[str, ...]:
    """A note, where late receives are not priced."""
    return (PRICED_EARLY,) if layout.schedule in BIDIRECTIONAL and layout.receives is not Receives.EARLY else ()


def work_s(model: Model, layout: Layout, cluster: Cluster) -> float:
    """What a batch takes at least, because some stage computes as long as all of them do on average.

    With a flush, the first microbatch passes the stages before that one, which all microbatches pass one after the
    other: with work w_i of stage i, at least w_1 + ... + w_(i-1) + m w_i. The largest of those is least where each
    stage has 1 - 1/m of the work of the one before. Stages that are equal but for embedding and loss take
    (m + d - 1)/d of the work; less where chunks or a second direction shorten the way.
    """
    works = works_of(model, Split.of(layout), machine_of(cluster))
    microbatch_s = 0.0
    for count, work in (
        (model.num_layers - model.dense_layers, works.layer),
        (model.dense_layers, works.dense),
        (model.mtp_num_layers, works.mtp),
        (1, works.embedding),
        (1 + model.mtp_num_layers, works.loss),
    ):
        # Where only some layers are computed again, without them.
        again_s = 0.0 if layout.recompute_method == RecomputeMethod.BLOCK else work.again_s
        microbatch_s += count * (work.forward_s + work.backward_s + again_s)
    passes = m = float(layout.microbatches)
    if layout.chunks == 1 and layout.schedule in _FILLING:
        has_ends = layout.first_stage_layers or layout.last_stage_layers or layout.pipeline_layout
        is_uneven = has_ends or model.dense_layers
        passes = layout.pipeline / (1 - (1 - 1 / m) ** layout.pipeline) if is_uneven else m + layout.pipeline - 1
    return batch.processor_share(cluster) * passes * microbatch_s / layout.pipeline * (1 - periods.ROUNDING)


def times_of(model: Model, layout: Layout, cluster: Cluster, speed: Speed | None = None) -> Times:
    """Price all that a batch consists of."""
    if layout.schedule not in PRICED:
        raise PlanError(f"schedule {layout.schedule!r} has no cost model; choose one of {', '.join(PRICED)}")
    if layout.chunks > 1 and layout.schedule != "megatron":
        raise PlanError(f"chunks {layout.chunks} of {layout.schedule}: use 1, or schedule megatron, which interleaves")
    machine, layers = machine_of(cluster, speed), layers_of_stages(model, layout)
    works = works_of(model, Split.of(layout), machine)
    weights = weights_of(model, layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)
    fullest, held = updates.fullest(model, layout, weights)
    chunks = contents_of(model, layout, fullest)
    slowest = _stage_time(model, layout, works, chunks)
    by_muon = layout.optimizer is Optimizer.MUON and machine.profile is None
    pipeline = Pipeline(
        stages=layout.pipeline,
        microbatches=layout.microbatches,
        **_stage_times(model, layout, works, updates.send_s(model, layout, machine)),
        update_s=updates.update_s(layout, machine, held)
        + updates.cast_s(layout, machine, sum(one.of_layers for one in held))
        + (muon.orthogonalized_s(model, layout, machine, fullest) if by_muon else 0.0)
        + updates.gathered_s(layout, machine, held, slowest.forward_s),
        gradients_s=updates.gradients_s(layout, machine, held, slowest.backward_s)
        + updates.replicated_s(model, layout, machine, max(layers)),
        norm_s=updates.norm_s(model, layout, machine, weights.word_embedding),
    )
    if layout.schedule in BIDIRECTIONAL:
        gradients_s = pipeline.gradients_s + updates.exchange_s(layout, machine, held)
        pipeline = replace(pipeline, gradients_s=gradients_s)
    return Times(pipeline, works)


def _stage_time(model: Model, layout: Layout, works: Works, chunks: Sequence[Contents]) -> Stage:
    """Of one microbatch's forward and backward on a stage with these chunks, in seconds."""
    times = [time_of(stage_pieces(model, layout, works, held)) for held in chunks]
    return Stage.sum(times)


def _stage_times(model: Model, layout: Layout, works: Works, send_s: float) -> dict[str, Any]:
    """Those fields of a Pipeline that say how long stages and transfers take."""
    last, order = layout.pipeline - 1, chunks_in_order(model, layout)
    first_s, last_s = (_stage_time(model, layout, works, contents_of(model, layout, end)) for end in (0, last))
    times = {"first": first_s, "last": last_s, "send_s": send_s if last else 0.0}
    if not order:
        usual = Contents(layers_of_stages(model, layout).middle)
        return times | {"middle": _stage_time(model, layout, works, [usual])}
    different = {held: _stage_time(model, layout, works, [held]) for held in set(order)}
    each = tuple(different[held] for held in order)
    stages = [each[stage :: layout.pipeline] for stage in range(1, last)]
    between = [*map(Stage.sum, stages)]
    # What is predicted of further tokens goes on beside what the layers gave.
    sends_s = [send_s] * (len(order) - 1)
    for index in range(next((i for i, held in enumerate(order) if held.mtp), len(order)), len(order) - 1):
        sends_s[index] *= 1 + model.mtp_num_layers
    middle = max(between, key=lambda stage: stage.pair_s, default=last_s)
    return times | {"middle": middle, "each": each, "sends_s": tuple(sends_s)}


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


def logged_flops(model: Model, samples: int) -> float:
    """What Megatron's log divides by the time: half of attention's products, as a causal mask leaves; of BERT, too.

    Source: ``num_floating_point_operations`` in ``megatron/training/training.py``, core_v0.19.0.

    >>> model = Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, vocab_size=51200)
    >>> f"{logged_flops(model, 1536) / 1e18:.2f}"
    '3.34'
    """
    layers = model.num_layers + model.mtp_num_layers
    of_attention = 6 * samples * model.seq_length**2 * layers * (model.query_size + model.output_size)
    return model_flops(model, samples) - of_attention / 2


def _layer_products(model: Model) -> int:
    """Multiplications per token in the products of a layer's forward."""
    experts = model.moe_router_topk if model.num_experts else 1
    weights = model.attention_matrices + model.shared_parameters
    weights += experts * (3 if model.swiglu else 2) * model.hidden_size * model.ffn_hidden_size
    return weights + (model.query_size + model.output_size) * model.seq_length
