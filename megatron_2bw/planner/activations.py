"""Bytes of activations that one transformer layer, the embedding and the loss keep for the backward.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4,
generalised to grouped queries, latent vectors, gated MLPs and mixtures of experts. Everything is per tensor-parallel
rank.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_2bw.planner import attention, fp8
from megatron_2bw.planner.layout import FP32_BYTES, Fp8, Layout, Recompute, RecomputeMethod
from megatron_2bw.planner.model import Model

MASK_BYTES = 1
"""Of one number in a dropout mask."""


class LayerActivations(NamedTuple):
    """Of one layer and one microbatch, in bytes."""

    input: float
    """What full recomputation keeps."""
    kept: float
    """All that the backward needs, the scores of unfused attention left out if they are computed again."""
    working: float
    """More that is alive in the middle of the layer's backward: gradients, and what selective recomputation makes."""


def of_layer(model: Model, layout: Layout) -> LayerActivations:
    """``kept`` is ``s*b*h*(10 + 24/t + 5*a*s/(h*t))`` for GPT in 16 bits with dropout; Table 2 of the paper.

    The last term is that of attention which stores its scores; with sequence parallelism all of it is divided by t.

    >>> model = Model(num_layers=48, hidden_size=6144, num_attention_heads=64, seq_length=2048, vocab_size=51200)
    >>> def per_sbh(**more):
    ...     layout = Layout(schedule="megatron", pipeline=1, data=1, global_batch=4, microbatch=4, tensor=8, **more)
    ...     return round(of_layer(model, layout).kept / (2048 * 4 * 6144), 3)
    >>> per_sbh(fused_attention=False), per_sbh(), per_sbh(sequence_parallel=True)
    (26.333, 13.0, 4.25)
    """
    width, tensor, hidden = layout.precision.width, layout.tensor, model.hidden_size
    tokens = model.tokens(layout.microbatch, layout.context)
    outside = tensor if layout.sequence_parallel else 1
    masks = MASK_BYTES if model.dropout else 0
    # Inputs of two norms and of what follows them; two dropout masks.
    kept = fp8.operand_width(layout.fp8, width)
    after_norm = kept + (width if model.num_experts else kept)  # A router reads what its norm writes.
    between = (2 * width + after_norm + 2 * masks) * hidden / outside
    # Q, K, V and the input of the projection; into and out of the activation function.
    inside = width * (attention.kept(model) + _mlp_numbers(model, layout)) / tensor
    between += width * (attention.kept_latents(model) + model.gate_parameters) / outside
    if layout.fp8 is not Fp8.NONE:
        copies = fp8.kept_copies(layout.fp8)
        out_of_mlp = model.ffn_hidden_size * model.routed(layout.expert) + model.moe_shared_expert_intermediate_size
        inside += (copies * model.output_size - (width - kept) * out_of_mlp) / tensor
        copied = copies * hidden if model.moe_shared_expert_intermediate_size else 0
        # Two products read what the first norm writes, each with a cast of its own.
        copied += kept * hidden if model.multi_latent_attention else 0
        between += (copied - (width - kept) * attention.cast_latents(model)) / outside
    around_mlp = hidden / outside
    if model.num_experts:  # Into the experts, gathered from the ranks that split them.
        around_mlp = model.routed(layout.expert) * hidden * layout.expert_tensor / tensor
        between += kept * around_mlp
    scores = model.num_attention_heads * model.seq_length / tensor
    stored_scores = 0 if layout.fused_attention else scores * (2 * width + masks if model.dropout else width)
    again = layout.recompute == Recompute.SELECTIVE
    gathered = width * hidden if layout.sequence_parallel else 0
    mlp_gradients = width * (_mlp_numbers(model, layout) / tensor + 2 * around_mlp)
    # Of attention to the keys of every rank, kept until the last one's have been attended to.
    outputs = width * model.output_size / tensor * layout.context if layout.context > 1 else 0
    if model.multi_latent_attention:  # More than what goes into its products: queries, keys, values and what they give.
        outputs = max(outputs, width * attention.kept(model) / tensor)
    score_gradients = 0 if layout.fused_attention else 2 * width * scores
    return LayerActivations(
        input=tokens * width * hidden / outside,
        kept=tokens * (between + inside + (0 if again else stored_scores)),
        working=tokens * (gathered + max(mlp_gradients, outputs, score_gradients + (stored_scores if again else 0))),
    )


def _mlp_numbers(model: Model, layout: Layout) -> float:
    """Per token, before it is split: what goes into the activation function and what comes out; SiLU's result, or the
    experts' GELU before it is weighted.
    """
    gated = 3 if layout.fused_swiglu else 4
    halves = 2 + (model.num_experts > 0) if not model.swiglu else gated
    shared = (gated if model.swiglu else 2) * model.moe_shared_expert_intermediate_size
    return halves * model.ffn_hidden_size * model.routed(layout.expert) + shared


def of_mtp(model: Model, layout: Layout) -> float:
    """Bytes that one forward keeps for each further token that is predicted, its loss apart.

    Its embedding and what the layers gave, those two normed, which a product reads, and what its layer keeps; with
    uniform recomputation the first two alone: ``MultiTokenPredictionLayer``, which knows no other.
    """
    outside = layout.tensor if layout.sequence_parallel else 1
    vector = layout.precision.width * model.tokens(layout.microbatch, layout.context) * model.hidden_size / outside
    if layout.recompute == Recompute.FULL and layout.recompute_method == RecomputeMethod.UNIFORM:
        return 2 * vector
    normed = vector * fp8.operand_width(layout.fp8, layout.precision.width) / layout.precision.width
    return 2 * vector + 2 * normed + of_layer(model, layout).kept


class LossActivations(NamedTuple):
    """Of final norm, logits and loss for one microbatch, in bytes."""

    kept: float
    """Softmax in fp32, or a fused loss' gradient, and the inputs of norm and output layer."""
    working: float
    """More at the loss: the logits, or their gradient, in compute precision."""


def of_loss(model: Model, layout: Layout) -> LossActivations:
    """fp32 softmax, as Megatron's ``_VocabParallelCrossEntropy`` saves it.

    >>> model = Model(num_layers=48, hidden_size=6144, num_attention_heads=64, seq_length=2048, vocab_size=51200)
    >>> of_loss(model, Layout(schedule="megatron", pipeline=1, data=1, global_batch=1, tensor=8))
    LossActivations(kept=102760448.0, working=26214400.0)
    """
    width, tokens = layout.precision.width, model.tokens(layout.microbatch, layout.context)
    logits = tokens * model.padded_vocab_size(layout.tensor) / layout.tensor
    outside = layout.tensor if layout.sequence_parallel else 1
    inputs = tokens * 2 * width * model.hidden_size / outside
    # Transformer Engine's kernels write the gradient in the forward.
    kept = width if layout.fused_loss else FP32_BYTES
    return LossActivations(kept * logits + inputs, width * logits)


def of_embedding(model: Model, layout: Layout) -> float:
    """The dropout mask; the output is the first layer's input and counted there."""
    outside = layout.tensor if layout.sequence_parallel else 1
    tokens = model.tokens(layout.microbatch, layout.context)
    return tokens * model.hidden_size * MASK_BYTES / outside if model.dropout else 0.0
