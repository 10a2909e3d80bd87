"""Bytes of activations that one transformer layer, the embedding and the loss keep for the backward.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4,
generalised to grouped queries, latent vectors, gated MLPs and mixtures of experts. Everything is per tensor-parallel
rank.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_2bw.planner.cost import attention, fp8
from megatron_2bw.planner.specs.layout import FP32_BYTES, Fp8, Layout, Recompute, RecomputeMethod, RecomputeModule
from megatron_2bw.planner.specs.model import Model

MASK_BYTES = 1
"""Of one number in a dropout mask."""


class LayerActivations(NamedTuple):
    """Of one layer and one microbatch, in bytes."""

    input: float
    """What full recomputation keeps."""
    kept: float
    """All that the backward needs, but what selective recomputation makes again."""
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
    attends, mlp = _of_attention(model, layout, outside), _of_mlp(model, layout, outside)
    # Inputs of two norms; two dropout masks.
    between = (2 * width + 2 * masks) * hidden / outside
    gathered = width * hidden if layout.sequence_parallel else 0
    working = gathered + max(part.gradients + part.again for part in (attends, mlp))
    # The MLP had its backward before, and has given back what it kept.
    working = max(working, attends.around_product - mlp.kept)
    return LayerActivations(
        input=tokens * width * hidden / outside,
        kept=tokens * (between + attends.kept + mlp.kept),
        working=tokens * working,
    )


class _Part(NamedTuple):
    """Attention or an MLP, with the norm before it, in bytes per token."""

    kept: float
    again: float
    """Not kept, but alive in the part's own backward."""
    gradients: float
    """Alive there, too."""
    around_product: float = 0.0
    """Alive between attention's core and the product before it, less what is kept from the product on."""


def _of_attention(model: Model, layout: Layout, outside: int) -> _Part:
    width, tensor = layout.precision.width, layout.tensor
    kept = fp8.operand_width(layout.fp8, width)
    # With latent vectors, two products read what the norm writes, each with a cast of its own.
    casts = 1 + (model.multi_latent_attention and layout.fp8 is not Fp8.NONE)
    norm = casts * kept * model.hidden_size / outside
    core_again = RecomputeModule.CORE_ATTN in layout.modules_again
    vectors = width * attention.kept(model, tensor, core_again=core_again)
    output = (width + fp8.kept_copies(layout.fp8)) * model.output_size / tensor
    latents = (width * attention.kept_latents(model) - (width - kept) * attention.latents(model)) / outside
    scores = model.num_attention_heads * model.seq_length / tensor
    masks = MASK_BYTES if model.dropout else 0
    stored_scores = 0 if layout.fused_attention else scores * (2 * width + masks if model.dropout else width)
    parts, again = norm + vectors + output + latents + stored_scores, 0.0
    for module in layout.modules_again:
        if module is RecomputeModule.CORE_ATTN:
            again += stored_scores
        elif module is RecomputeModule.LAYERNORM and model.multi_latent_attention:
            again += norm
        elif module is RecomputeModule.MLA_UP_PROJ and model.multi_latent_attention:
            raw = width * attention.latents(model) / outside
            again += vectors + max(latents - raw, 0.0)
    # Of attention to the keys of every rank, kept until the last one's have been attended to.
    gradients = width * model.output_size / tensor * layout.context if layout.context > 1 else 0
    if model.multi_latent_attention:  # More than what goes into its products: queries, keys, values and what they give.
        gradients = max(gradients, vectors + width * model.output_size / tensor)
    if not layout.fused_attention:
        gradients = max(gradients, 2 * width * scores)
    around_product = 0.0
    if everything := attention.regathered(model, tensor):
        # Twice, as ranks send it and with each token's columns together; a share each; the residual's gradient.
        around_product = width * (2 * everything + everything / tensor + model.hidden_size / outside)
        around_product -= parts - again - norm
    return _Part(parts - again, again, gradients, around_product)


def _of_mlp(model: Model, layout: Layout, outside: int) -> _Part:
    """The MLP, or router, experts and shared experts."""
    width, tensor, hidden = layout.precision.width, layout.tensor, model.hidden_size
    kept, experts = fp8.operand_width(layout.fp8, width), model.num_experts > 0
    norm = (width if experts else kept) * hidden / outside  # A router reads what its norm writes.
    # Into and out of the activation function; if it is not fused, SiLU's result, too, and what experts give before that
    # is weighted.
    routed = model.ffn_hidden_size * model.routed(layout.expert) / tensor
    entered = 2 if model.swiglu else 1
    fuses = model.swiglu and layout.fused_swiglu
    activated = 1 if fuses else entered + experts
    into, out = width * entered * routed, (width * activated - (width - kept)) * routed
    around = hidden / outside
    if experts:  # Into the experts, gathered from the ranks that split them.
        around = model.routed(layout.expert) * hidden * layout.expert_tensor / tensor
        into += kept * around
    size = model.moe_shared_expert_intermediate_size / tensor
    of_shared = entered + (1 if fuses else entered)
    shared = (width * of_shared - (width - kept)) * size + width * model.gate_parameters / outside
    shared += fp8.kept_copies(layout.fp8) * hidden / outside if size else 0
    parts, again = norm + into + out + shared, 0.0
    modules = layout.modules_again
    if experts:
        if RecomputeModule.LAYERNORM in modules:
            again += norm
        if RecomputeModule.MOE in modules:
            again += into + out + shared
        else:
            again += out * (RecomputeModule.MOE_ACT in modules) + shared * (RecomputeModule.SHARED_EXPERTS in modules)
    elif RecomputeModule.MLP in modules:  # Its norm's input is kept, which is that of the residual, too.
        again = parts
    gradients = width * ((entered + activated) * routed + of_shared * size + 2 * around)
    return _Part(parts - again, again, gradients)


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
