"""How much memory every pipeline stage needs, by component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from operator import attrgetter
from typing import NamedTuple

from megatron_2bw.planner.cost import fp8
from megatron_2bw.planner.cost.whole import padding_of
from megatron_2bw.planner.memory import activations
from megatron_2bw.planner.memory.activations import LayerActivations
from megatron_2bw.planner.pipeline.interleaving import most_kept
from megatron_2bw.planner.pipeline.programs import open_losses
from megatron_2bw.planner.pipeline.stages import Contents, chunks_in_flight, contents_of, free_stages
from megatron_2bw.planner.pipeline.weights import Weights, weights_of
from megatron_2bw.planner.specs.layout import FP32_BYTES, Layout, Recompute, RecomputeMethod, RecomputeModule
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.table import GIB
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED, TWO_BW

CONTEXT_BYTES = 1.5 * GIB
"""CUDA context, cuBLAS workspaces and NCCL's buffers, which torch's allocator does not see. Assumed: about 0.5 GiB
for context and libraries, the rest for the communicators of a few process groups."""
FRAGMENTED_SHARE = 0.05
"""Of activations, logits and working memory. Assumed: torch gives cached blocks back before it runs out, what remains
is between live tensors; far from the limit mbridge's README (memory_estimator) shows 0 to 20% more reserved than
allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on each GPU of one stage when it needs most."""

    stage: int
    weights_bytes: float
    """In the precision of forward and backward."""
    older_weights_bytes: float
    """2bw: the second weight version; pipedream: d-1-s of them."""
    fp8_weights_bytes: float
    """Their copies in 8 bits, one of them transposed."""
    gradients_bytes: float
    """The buffer in which microbatches are summed."""
    captured_gradients_bytes: float
    """2bw: gradients of the batch before, or this rank's shard, until its update."""
    mirrored_bytes: float
    """gems, chimera, mixpipe: weights and gradients of the rank's other stage, and gradients to receive."""
    optimizer_bytes: float
    """One or two moments, and fp32 weights where weights are in 16 bits."""
    activations_bytes: float
    """Of the layers, for all forwards whose backward has not run."""
    logits_bytes: float
    """Of the last stage: logits, softmax and loss."""
    working_bytes: float
    """Of the layer under way: what is recomputed, gradients of activations; or what the update needs."""
    reserve_bytes: float
    """What torch does not count: the CUDA context, communicators, fragments."""

    @property
    def allocated_bytes(self) -> float:
        """What ``torch.cuda.max_memory_allocated`` shows: all but the reserve."""
        return self.total_bytes - self.reserve_bytes

    @property
    def total_bytes(self) -> float:
        """What the GPU has to have."""
        return sum(_components(self))

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by component, in words."""
        return {name.removesuffix("_bytes").replace("_", " "): getattr(self, name) for name in _COMPONENTS}


_COMPONENTS = tuple(field.name for field in fields(StageMemory) if field.name.endswith("_bytes"))
_components = attrgetter(*_COMPONENTS)


def stages(model: Model, layout: Layout) -> tuple[StageMemory, ...]:
    """Memory of every pipeline stage.

    Raises:
        PlanError: the layers cannot be spread over the stages.

    >>> model = Model(num_layers=32, hidden_size=2304, num_attention_heads=32, seq_length=512, vocab_size=50257)
    >>> layout = Layout(schedule="2bw", pipeline=8, data=1, microbatch=4, global_batch=64, recompute=Recompute.FULL)
    >>> [round(stage.total_bytes / 1e9, 1) for stage in stages(model, layout)]
    [11.2, 8.3, 8.2, 8.2, 8.2, 8.1, 8.1, 11.2]
    """
    shares = _shares(model, layout)
    return tuple(_stage(model, layout, shares, stage) for stage in range(layout.pipeline))


def largest(model: Model, layout: Layout, *, enough_bytes: float = inf) -> StageMemory:
    """The stage that needs most memory, without a look at every stage.

    If one needs more than ``enough_bytes``, it may be that one, and others need even more.

    Stages between the first and the last differ only in their forwards in flight and older weights, which fall from
    stage to stage, but in both directions and where layers are spread so freely that chunks between them differ.

    Raises:
        PlanError: the layers cannot be spread over the stages.
    """
    shares = _shares(model, layout)
    candidates = (_stage(model, layout, shares, stage) for stage in _may_be_fullest(model, layout))
    fullest = next(candidates)
    while fullest.total_bytes <= enough_bytes and (other := next(candidates, None)):
        fullest = max(fullest, other, key=attrgetter("total_bytes"))
    return fullest


def needs_more(
    model: Model, layout: Layout, than_bytes: float, *, recompute: Recompute = Recompute.FULL, gradient_buffers: int = 1
) -> bool:
    """Whether ``layout`` needs more, whatever it computes again; False if that is not quick to tell.

    Args:
        recompute: SELECTIVE, where layers are not computed again as a whole, or FULL.
        gradient_buffers: in place of those that ``layout`` has.
    """
    if layout.schedule == "mixpipe":  # Whose order has to be looked for; that of gems has one forward in flight.
        layout = layout.but(schedule="gems", mixpipe_k=0, mixpipe_gamma=0)
    leanest = layout.but(recompute=Recompute.NONE, gradient_buffers=gradient_buffers)
    shares = _shares(model, leanest)
    if recompute is Recompute.SELECTIVE:
        every = tuple(RecomputeModule)
        kept_as = layout.but(recompute=recompute, recompute_modules=every)
        # A checkpoint of attention's core may keep more than the core itself.
        others = kept_as.but(recompute_modules=tuple(one for one in every if one is not RecomputeModule.CORE_ATTN))
        kinds = (shares.layer, model), (shares.dense_layer, model.dense)
        # What is made again takes memory, too, but how much depends on the modules.
        layers = [
            layer._replace(kept=min(activations.of_layer(kind, one).kept for one in (kept_as, others)))
            for layer, kind in kinds
        ]
        shares = shares._replace(layer=layers[0], dense_layer=layers[1])
    else:  # Every forward leaves at least the input of one layer.
        grouped = {"recompute_method": RecomputeMethod.UNIFORM, "recompute_layers": model.num_layers}
        kept_as = layout.but(recompute=Recompute.FULL, **grouped)
    candidates = _may_be_fullest(model, layout)
    return any(_stage(model, leanest, shares, stage, kept_as).total_bytes > than_bytes for stage in candidates)


def _may_be_fullest(model: Model, layout: Layout) -> Sequence[int]:
    """Stages of which one needs most."""
    between = free_stages(model, layout)[1:-1]
    if layout.schedule in BIDIRECTIONAL or len({chunk for chunks in between for chunk in chunks}) > 1:
        return range(layout.pipeline)
    return sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})


class _Shares(NamedTuple):
    """What all stages have in common."""

    weights: Weights
    states: WeightStates
    expert_states: WeightStates
    fp8_copy: float
    """Bytes per weight of a layer."""
    other_bytes: float
    """More per weight that is not for an optimizer of matrices."""
    layer: LayerActivations
    dense_layer: LayerActivations
    """The same, where all layers are alike."""


def _shares(model: Model, layout: Layout) -> _Shares:
    layer = activations.of_layer(model, layout)
    return _Shares(
        weights_of(model, layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor),
        state_bytes_per_weight(layout, layout.replicas),
        state_bytes_per_weight(layout, layout.expert_replicas),
        fp8.weight_copy_bytes(layout.fp8, layout.precision.width, parameters=layout.fp8_parameters),
        _shared(FP32_BYTES, layout.shards(layout.replicas)) if layout.optimizer.is_of_matrices else 0,
        layer,
        layer if model.dense is model else activations.of_layer(model.dense, layout),
    )


def _stage(model: Model, layout: Layout, shares: _Shares, stage: int, kept_as: Layout | None = None) -> StageMemory:
    """With what the layout ``kept_as`` keeps for backwards, if it is given."""
    # In both directions, rank s has stages s and d-1-s.
    hosted = [stage, layout.pipeline - 1 - stage] if layout.schedule in BIDIRECTIONAL else [stage]
    held = [contents_of(model, layout, one) for one in hosted]
    states, *others = (
        _states(model, shares, chunks, padding_of(model, layout, one)) for one, chunks in zip(hosted, held, strict=True)
    )
    every = [chunk for chunks in held for chunk in chunks]
    losses = _losses(layout, stage) if any(chunk.loss for chunk in every) else 0
    kept = _kept(model, kept_as or layout, shares, stage, every, losses)
    freed = kept / max(chunks_in_flight(layout, stage), 1) if any(map(_looks_up, every)) else None
    between_losses, at_loss = _of_losses(model, layout, losses)
    working = _under_way(layout, shares, every, freed)
    # A flush leaves no activations beside its update but the tensors that were sent last.
    update = states.update if layout.schedule in DELAYED else states.update - kept - between_losses
    most = max(working, update)
    logits, most = (at_loss, 0.0) if at_loss > between_losses + most else (between_losses, most)
    versions = layout.pipeline - stage if layout.schedule == "pipedream" else 2
    of_layers = sum(shares.weights.of_layers(chunk) + shares.weights.experts_of(chunk) for chunk in held[0])
    return StageMemory(
        stage=stage,
        weights_bytes=states.weight,
        older_weights_bytes=states.older_weight * (versions - 1),
        gradients_bytes=states.gradient,
        fp8_weights_bytes=of_layers * shares.fp8_copy,
        captured_gradients_bytes=states.captured_gradient,
        mirrored_bytes=sum(other.weight + other.gradient + states.gradient for other in others),
        optimizer_bytes=states.optimizer,
        activations_bytes=kept,
        logits_bytes=logits,
        # The norm has copies of its own, made while the stage computes, on a stream whose memory others do not get.
        working_bytes=states.norm + most,
        reserve_bytes=CONTEXT_BYTES + FRAGMENTED_SHARE * (kept + max(at_loss, between_losses + working)),
    )


class WeightStates(NamedTuple):
    """Bytes per weight, or of all weights of a stage."""

    weight: float
    older_weight: float
    """Of one version."""
    gradient: float
    captured_gradient: float
    optimizer: float
    norm: float
    """Copies while the gradients' norm is computed."""
    update: float
    """The same while weights are updated."""

    @property
    def total(self) -> float:
        """All that lasts."""
        return self.weight + self.older_weight + self.gradient + self.captured_gradient + self.optimizer


def _states(model: Model, shares: _Shares, chunks: Sequence[Contents], padding: tuple[float, float]) -> WeightStates:
    """Bytes of a stage's weights; experts have other replicas, and so other shards, and ``padding`` of their own."""
    weights = sum(shares.weights.of(chunk, model) for chunk in chunks) + padding[0]
    experts = sum(map(shares.weights.experts_of, chunks)) + padding[1]
    if experts:
        pairs = zip(shares.states, shares.expert_states, strict=True)
        states = WeightStates(*[weights * one + experts * other for one, other in pairs])
    else:
        states = WeightStates(*[weights * one for one in shares.states])
    if not shares.other_bytes:
        return states
    others = sum(shares.weights.others_of(chunk, model) for chunk in chunks)
    return states._replace(optimizer=states.optimizer + others * shares.other_bytes)


def state_bytes_per_weight(layout: Layout, replicas: int) -> WeightStates:
    """Megatron's 18, or ``6 + 12/w`` with the distributed optimizer, and what 2bw adds to them.

    Args:
        replicas: w, ranks with the same weight.

    Gradients in 16 bits, which fp16 without 2bw has unless ``gradients_in_fp32``, are copied to fp32 for the update;
    Megatron-LM before Core, and so PipeDream-2BW's code, kept the copy.

    >>> for schedule in ("megatron", "2bw"):
    ...     for distributed in (False, True):
    ...         layout = Layout(
    ...             schedule=schedule, pipeline=2, data=4, global_batch=8, distributed_optimizer=distributed
    ...         )
    ...         print(schedule, state_bytes_per_weight(layout, layout.replicas).total)
    megatron 18
    megatron 9.0
    2bw 24
    2bw 12.0
    """
    delayed = layout.schedule in TWO_BW
    width, shards = layout.precision.width, layout.shards(replicas)
    in_16_bits = layout.gradient_width < FP32_BYTES
    captures = delayed and layout.gradient_buffers > 1
    kept = in_16_bits and layout.keeps_main_gradients
    copied = FP32_BYTES if in_16_bits and not kept else 0
    of_state = layout.adam_state.copied_width if layout.adam_state is not None else 0
    return WeightStates(
        weight=width,
        older_weight=width if delayed or layout.schedule == "pipedream" else 0,
        gradient=layout.gradient_width,
        captured_gradient=_shared(layout.gradient_width, shards) if captures else 0,
        optimizer=_shared(layout.state_width + kept * FP32_BYTES, shards),
        norm=_shared(copied, shards) if delayed else 0,
        update=_shared((0 if layout.is_optimizer_apart else copied) + of_state, shards),
    )


def _shared(size: int, shards: int) -> float:
    return size if shards == 1 else size / shards


def _kept(model: Model, layout: Layout, shares: _Shares, stage: int, held: Sequence[Contents], losses: int) -> float:
    """Bytes that all forwards leave whose backward has not run, those of losses apart."""
    predicted = activations.of_mtp(model, layout) if any(chunk.mtp for chunk in held) else 0.0
    if len(held) > 1 and layout.chunks > 1:  # Chunks that differ.
        of_chunks = [
            _kept_by_layers(shares.layer, layout, chunk.layers)
            + _kept_besides(model, layout, shares, chunk)
            + chunk.mtp * predicted
            for chunk in held
        ]
        return most_kept(stage, of_chunks, ranks=layout.pipeline, microbatches=layout.microbatches)
    chunks = chunks_in_flight(layout, stage)
    kept = chunks * _kept_by_layers(shares.layer, layout, max(chunk.layers for chunk in held) // layout.chunks)
    for chunk in held:
        kept += -(-chunks // layout.chunks) * _kept_besides(model, layout, shares, chunk)
        kept += (losses if chunk.loss else chunks) * chunk.mtp * predicted
    return kept


def _kept_by_layers(layer: LayerActivations, layout: Layout, layers: int) -> float:
    """Bytes that one forward of so many layers leaves for its backward."""
    if layout.recompute != Recompute.FULL:
        return layers * layer.kept
    if layout.recompute_method == RecomputeMethod.UNIFORM:
        return -(-layers // layout.recompute_layers) * layer.input
    again = min(layers, layout.recompute_layers)
    return again * layer.input + (layers - again) * layer.kept


def _kept_besides(model: Model, layout: Layout, shares: _Shares, held: Contents) -> float:
    """What the embedding leaves, and layers without experts beyond what others would."""
    kept = activations.of_embedding(model, layout) if held.embedding else 0.0
    dense = held.dense
    if layout.recompute == Recompute.FULL:  # Inputs are alike.
        by_block = layout.recompute_method == RecomputeMethod.BLOCK
        dense = max(dense - layout.recompute_layers, 0) if by_block else 0
    return kept + dense * (shares.dense_layer.kept - shares.layer.kept)


def _losses(layout: Layout, stage: int) -> int:
    """Forwards of the last stage at once, on a rank that has it."""
    if layout.schedule in BIDIRECTIONAL:
        return open_losses(layout, stage)
    return layout.microbatches if layout.schedule == "gpipe" else 1


def _under_way(layout: Layout, shares: _Shares, held: Sequence[Contents], freed: float | None) -> float:
    """Bytes of what is computed in a chunk, losses apart, at the moment that takes most.

    Args:
        freed: bytes that one forward of a chunk left, given back when its embedding has its backward; None without one.
    """
    working = max(_working(layout, shares, chunk) for chunk in held)
    if freed is not None:  # The embedding's gradient has all rows.
        working = max(working, layout.precision.width * shares.weights.word_embedding - freed)
    return working


def _of_losses(model: Model, layout: Layout, losses: int) -> tuple[float, float]:
    """Bytes of so many losses while something else is under way, and while the last of them is."""
    if not losses:
        return 0.0, 0.0
    loss = activations.of_loss(model, layout)
    kept = (1 + model.mtp_num_layers) * loss.kept  # Of all tokens that are predicted, before the first backward.
    return (losses - 1) * kept, losses * kept + loss.working


def _looks_up(held: Contents) -> bool:
    """Whether a chunk has an embedding."""
    return held.embedding or held.mtp > 0


def _working(layout: Layout, shares: _Shares, held: Contents) -> float:
    """Of the kind of layer that takes most of those that the chunk has."""
    has_usual = held.layers > held.dense or held.mtp
    kinds = [shares.layer] * bool(has_usual) + [shares.dense_layer] * (held.dense > 0)
    layers, at_once, freed = held.layers // held.chunks, 0, 0.0
    if layout.recompute == Recompute.FULL and layout.recompute_method == RecomputeMethod.UNIFORM:
        at_once = min(max(layers, 1), layout.recompute_layers)
    elif layout.recompute == Recompute.FULL:
        # Layers behind those that compute again have given back what they kept before these begin.
        at_once = 1
        freed = max(layers - layout.recompute_layers, 0) * min((layer.kept for layer in kinds), default=0.0)
    return max((layer.working + max(at_once * layer.kept - freed, 0.0) for layer in kinds), default=0.0)
