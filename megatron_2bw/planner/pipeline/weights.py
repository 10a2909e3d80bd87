"""Numbers of weights that one rank holds of a stage."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_2bw.planner.pipeline.stages import Contents
from megatron_2bw.planner.specs.model import Model


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
    mtp: int = 0
    """Of each further token that is predicted, its layer apart."""
    vectors: int = 0
    """Biases and norms of a layer; of experts there are none."""

    def of(self, held: Contents, model: Model) -> int:
        """Weights of what a stage holds, experts apart.

        A tied embedding is on the first and on the last stage. Where further tokens are predicted, there is one more,
        and the last stage has an output layer of its own, tied or not.
        """
        total = self.of_layers(held) + self._words(held, model) * self.word_embedding
        return total + held.embedding * self.position_embedding + held.final_norm * self.final_norm

    def of_layers(self, held: Contents) -> int:
        """Weights of layers, experts apart, and of what is before those that predict further tokens."""
        total = held.layers * self.layer + held.mtp * (self.layer + self.mtp)
        return total + held.dense * (self.dense_layer - self.layer)

    def others_of(self, held: Contents, model: Model) -> int:
        """Of the weights of a stage, those that are no matrix, and word embeddings and output layer."""
        of_layers = (held.layers + held.mtp) * self.vectors
        norms = (held.final_norm + 3 * held.mtp) * self.final_norm
        return self._words(held, model) * self.word_embedding + of_layers + norms

    def experts_of(self, held: Contents) -> int:
        """Weights of experts."""
        return (held.layers - held.dense + held.mtp) * self.experts

    def _words(self, held: Contents, model: Model) -> int:
        """How many matrices with a row per word: embeddings and output layer."""
        has_output = held.loss and not (held.embedding and model.tied)
        return (held.embedding or held.mtp > 0) + has_output


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
        mtp=2 * hidden**2 // tensor + 3 * model.norm_parameters,
        vectors=_vectors(model, tensor),
    )


def _attention(model: Model, tensor: int) -> int:
    """Weights of one layer's attention on one of ``tensor`` ranks."""
    row_bias = model.bias * model.hidden_size
    split = model.attention_matrices - model.down_parameters + model.attention_bias
    return split // tensor + model.down_parameters + model.attention_norm_parameters + row_bias


def _vectors(model: Model, tensor: int) -> int:
    """Biases and norms of one layer on one of ``tensor`` ranks."""
    row_bias = model.bias * model.hidden_size
    biases = model.attention_bias // tensor + row_bias
    if not model.num_experts:
        biases += model.bias * (1 + model.swiglu) * model.ffn_hidden_size // tensor + row_bias
    return biases + model.attention_norm_parameters + 2 * model.norm_parameters
