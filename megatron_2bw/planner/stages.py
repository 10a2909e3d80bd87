"""What a layout puts on each pipeline stage: layers, weights and forwards in flight."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.layout import Layout
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.multiples import nearest_divisor
from megatron_2bw.planner.programs import programs_of, shortened
from megatron_2bw.schedule.registry import MIRRORED


class Layers(NamedTuple):
    """Layers of a stage: the stages between the first and the last have the same number."""

    first: int
    middle: int
    last: int

    def of(self, stage: int, stages: int) -> int:
        """Layers of ``stage``, all its chunks together."""
        if stage == 0:
            return self.first
        return self.last if stage == stages - 1 else self.middle


def layers_of_stages(model: Model, layout: Layout) -> Layers:
    """How Megatron spreads the layers: evenly, but for stages with a number of their own.

    >>> model = Model(num_layers=46, hidden_size=5120, num_attention_heads=40, seq_length=1024, vocab_size=50257)
    >>> layout = Layout(schedule="2bw", pipeline=16, data=1, global_batch=64, first_stage_layers=2, last_stage_layers=2)
    >>> layers_of_stages(model, layout)
    Layers(first=2, middle=3, last=2)

    Raises:
        PlanError: the layers cannot be spread like that.
    """
    layers = spread(model, layout)
    if isinstance(layers, Problem):
        raise PlanError(layers)
    return layers


def spread(model: Model, layout: Layout) -> Layers | Problem:
    """The layers of the stages, or why there are none."""
    ends = layout.first_stage_layers, layout.last_stage_layers
    return _spread(model.num_layers, layout.pipeline, layout.chunks, *ends)


@cache
def _spread(num_layers: int, stages: int, chunks: int, first: int, last: int) -> Layers | Problem:
    if stages == 1 and chunks == 1:
        if sorted((first, last)) not in ([0, 0], [0, num_layers]):
            given = f"first_stage_layers {first}" if first else f"last_stage_layers {last}"
            return Problem(f"{given}: one stage has all {num_layers} layers", "leave it out")
        return Layers(num_layers, 0, num_layers)
    rest, even = num_layers - first - last, stages - bool(first) - bool(last)
    if even == 0:
        if rest:
            return Problem(
                f"first_stage_layers {first} and last_stage_layers {last} do not sum to num_layers {num_layers} on 2 "
                "stages",
                "set one of them to 0",
            )
        return Layers(first, 0, last)
    each = rest // even
    if rest > 0 and rest % even == first % chunks == last % chunks == each % chunks == 0:
        return Layers(first or each, each, last or each)
    if first or last:
        return Problem(
            f"num_layers {num_layers} leaves {rest} layers for {even} equal stages of {chunks} chunks",
            f"give first_stage_layers and last_stage_layers that leave a multiple of {even * chunks}",
        )
    per_stage = num_layers // stages
    if chunks > 1 and num_layers % stages == 0:
        return Problem(
            f"chunks {chunks} does not divide the {per_stage} layers of a stage",
            f"use {nearest_divisor(per_stage, chunks)}",
        )
    return Problem(
        f"pipeline {stages} x chunks {chunks} does not divide num_layers {num_layers}",
        f"use {nearest_divisor(num_layers, stages)} stages, or give first_stage_layers or last_stage_layers",
    )


def shorter_ends(layers: int, stages: int) -> tuple[int, int]:
    """Layers of the first and of the last stage, which have embedding and logits too, where stages cannot be equal.

    The others have as many as the largest of stages that differ by at most one. (0, 0): the stages can be equal, or
    nothing would be left for the ends.

    >>> shorter_ends(126, 16), shorter_ends(105, 8), shorter_ends(24, 4), shorter_ends(8, 7)
    ((7, 7), (11, 10), (0, 0), (0, 0))
    """
    left = layers - -(-layers // stages) * (stages - 2)
    return (left - left // 2, left // 2) if layers % stages and left >= 2 else (0, 0)


def most_layers(model: Model, layout: Layout) -> int:
    """Of one stage, or of one of its chunks.

    Raises:
        PlanError: the layers cannot be spread like that.
    """
    return max(layers_of_stages(model, layout)) // layout.chunks


def is_interleaved(layout: Layout) -> bool:
    """Whether Megatron runs its interleaved schedule."""
    return layout.chunks > 1


def chunks_in_flight(layout: Layout, stage: int) -> int:
    """Most forwards of ``stage`` at once whose backward has not run; each of one chunk, ``1/chunks`` of the stage.

    - 2bw, x more per boundary: ``(1+x)*(d-1-s) + 1``; 1F1B with a flush: ``min(d-s, m)``; GPipe: ``m``;
      without pipelining: 1; PipeDream: ``d-s``. In both directions: of both stages of rank ``stage`` together, as
      their Programs declare it.
    - Megatron's interleaved 1F1B, v chunks: ``min(2*(d-1-s) + (v-1)*d + 1, v*m)``
      (``get_pp_rank_microbatches`` in ``megatron/core/pipeline_parallel/schedules.py``); on the first stage
      ``1 + (d-1)/(d*v)`` times what 1F1B keeps (Korthikanti et al., arXiv 2205.05198, section 4.2.3).

    >>> layout = Layout(schedule="megatron", pipeline=4, data=1, global_batch=16, chunks=2)
    >>> [chunks_in_flight(layout, stage) for stage in range(4)]
    [11, 9, 7, 5]
    """
    after, microbatches = layout.pipeline - 1 - stage, layout.microbatches
    if is_interleaved(layout):
        return min(2 * after + (layout.chunks - 1) * layout.pipeline + 1, layout.chunks * microbatches)
    if layout.schedule == "2bw":
        return (1 + layout.extra_in_flight) * after + 1
    if layout.schedule == "inter-layer":
        return 1
    if layout.schedule in MIRRORED:
        return programs_of(shortened(layout)[0]).in_flight[stage]
    if layout.schedule == "pipedream":
        return after + 1
    return microbatches if layout.schedule == "gpipe" else min(after + 1, microbatches)


class Weights(NamedTuple):
    """Numbers of weights that one tensor-parallel rank holds."""

    layer: int
    """Experts apart. Norms, the biases of row-parallel products and what gives latent vectors are on every rank, the
    rest is shared out."""
    experts: int
    """Of one layer, on one expert-parallel rank."""
    word_embedding: int
    position_embedding: int
    final_norm: int
    dense_layer: int = 0
    """Of the first layers, where they have an MLP in place of experts."""
    prediction: int = 0
    """Of each further token that is predicted, its layer apart."""
    vectors: int = 0
    """Biases and norms of a layer; of experts there are none."""

    def of(self, stage: int, layers: int, model: Model, stages: int) -> int:
        """Weights of a stage, experts apart. A tied embedding is on the first and on the last stage.

        Where further tokens are predicted, the last stage has an embedding and, tied or not, an output layer.
        """
        total = self.of_layers(stage, layers, model, stages)
        if stage == 0:
            total += self.word_embedding + self.position_embedding
        if stage == stages - 1:
            total += self.final_norm + (self.word_embedding if stages > 1 or not model.tied else 0)
            total += self.word_embedding if stages > 1 and model.mtp_num_layers else 0
        return total

    def of_layers(self, stage: int, layers: int, model: Model, stages: int) -> int:
        """Weights of a stage's layers, experts apart, and of what is before those that predict further tokens."""
        total = layers * self.layer
        if stage == 0:
            total += model.dense_layers * (self.dense_layer - self.layer)
        if stage == stages - 1:
            total += model.mtp_num_layers * (self.layer + self.prediction)
        return total

    def others_of(self, stage: int, layers: int, model: Model, stages: int) -> int:
        """Of the weights of a stage, those that are no matrix, and word embeddings and output layer."""
        is_last = stage == stages - 1
        copies = (stage == 0) + is_last * ((stages > 1 or not model.tied) + (stages > 1 and model.mtp_num_layers > 0))
        of_layers = (layers + is_last * model.mtp_num_layers) * self.vectors
        norms = is_last * (1 + 3 * model.mtp_num_layers) * self.final_norm
        return copies * self.word_embedding + of_layers + norms

    def experts_of(self, stage: int, layers: int, model: Model, stages: int) -> int:
        """Weights of a stage's experts."""
        with_experts = layers - (model.dense_layers if stage == 0 else 0)
        return (with_experts + (model.mtp_num_layers if stage == stages - 1 else 0)) * self.experts


@lru_cache(maxsize=256)
def weights_of(model: Model, tensor: int, *, expert: int = 1, expert_tensor: int = 0) -> Weights:
    """What one of ``tensor`` ranks holds, where ``expert`` ranks share all experts and ``expert_tensor`` one of them.

    ``expert_tensor`` 0 is ``tensor``.

    >>> model = Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, vocab_size=51200)
    >>> weights_of(model, 8)[:5]
    (226576896, 0, 78643200, 25165824, 24576)
    """
    hidden, row_bias = model.hidden_size, model.bias * model.hidden_size
    mlp, router = model.mlp_parameters - row_bias, model.num_experts * hidden
    of_experts = model.shared_parameters // tensor + model.gate_parameters + router
    return Weights(
        layer=_attention(model, tensor)
        + (of_experts if model.num_experts else mlp // tensor + row_bias)
        + 2 * model.norm_parameters,
        experts=model.num_experts // expert * (mlp // (expert_tensor or tensor) + row_bias),
        word_embedding=model.padded_vocab_size(tensor) // tensor * hidden,
        position_embedding=model.seq_length * hidden if model.learned_positions else 0,
        final_norm=model.norm_parameters,
        dense_layer=weights_of(model.dense, tensor).layer if model.dense_layers else 0,
        prediction=2 * hidden**2 // tensor + 3 * model.norm_parameters,
        vectors=_vectors(model, tensor),
    )


def _attention(model: Model, tensor: int) -> int:
    """Weights of one layer's attention on one of ``tensor`` ranks."""
    row_bias = model.bias * model.hidden_size
    split = model.attention_matrices - model.down_parameters + model.attention_bias
    return split // tensor + model.down_parameters + model.latent_norm_parameters + row_bias


def _vectors(model: Model, tensor: int) -> int:
    """Biases and norms of one layer on one of ``tensor`` ranks."""
    row_bias = model.bias * model.hidden_size
    biases = model.attention_bias // tensor + row_bias
    if not model.num_experts:
        biases += model.bias * (1 + model.swiglu) * model.ffn_hidden_size // tensor + row_bias
    return biases + model.latent_norm_parameters + 2 * model.norm_parameters
