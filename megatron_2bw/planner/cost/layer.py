"""Seconds of forward and backward of one transformer layer, the embedding, and logits with loss, for one microbatch.

Matrix products are bound by arithmetic or by HBM, everything else on the GPU by HBM; tensor-parallel ranks
add an all-reduce after attention and MLP, forward and backward (Megatron-LM, arXiv 1909.08053, section 3).
Context-parallel ranks pass keys and values around a ring while they attend to what they have (Liu et al., "Ring
Attention", arXiv 2310.01889, section 3). Expert-parallel ranks exchange tokens before and after the experts, which are
taken to be nearly equally busy (Lepikhin et al., "GShard", arXiv 2006.16668, section 3.2). All is per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron_2bw.planner.cost.again import Piece, selected
from megatron_2bw.planner.cost.mtp import mtp_work
from megatron_2bw.planner.cost.sizes import SORTING, UNFUSED_SWIGLU_BACKWARD, Sizes, Split
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.cost.work import NO_WORK, Parts, Work, launched
from megatron_2bw.planner.specs.layout import Recompute
from megatron_2bw.planner.specs.model import Model

_CORE_PRODUCTS = 2
"""Kernels of a forward with scores in matrix products; the backward has twice as many, and of those with weights."""
_FORWARD, _UNFUSED_FORWARD = 4, 3
"""Elementwise kernels: two norms, two residual sums; around scores, three permutations."""
_BACKWARD, _UNFUSED_BACKWARD = 12, 5
"""Two per norm, one per residual sum and activation function, four bias gradients, one sum of gradients; around
scores, softmax, dropout and three permutations."""
_SCORES = 2
"""Softmax and dropout."""


class Works(NamedTuple):
    """For one microbatch."""

    layer: Work
    """Of most layers: with experts, if the model has them."""
    embedding: Work
    loss: Work
    dense: Work = NO_WORK
    """Of a layer without experts, if a model with them has some."""
    mtp: Work = NO_WORK
    """Of one more predicted token, its embedding included; its loss is on the last stage, where ``loss`` is."""


@lru_cache(maxsize=4096)
def works_of(model: Model, split: Split, machine: Machine) -> Works:
    """The parts of a model.

    Raises:
        PlanError: a profile prices them, and has not measured this model or split.

    Forward and backward of a layer of Megatron's 22B model on A100s, in ms; Korthikanti et al. (arXiv 2205.05198),
    Table 4, measured 7.7 and 11.9:

    >>> from megatron_2bw.planner.specs.cluster import CLUSTERS
    >>> from megatron_2bw.planner.specs.layout import Precision
    >>> from megatron_2bw.planner.cost.speeds import machine_of
    >>> model = Model(num_layers=48, hidden_size=6144, num_attention_heads=64, seq_length=2048, vocab_size=51200)
    >>> split = Split(8, 4, False, Recompute.NONE, Precision.FP16, 2, False)
    >>> work = works_of(model, split, machine_of(CLUSTERS["dgx-a100"])).layer
    >>> round(1e3 * work.forward_s, 1), round(1e3 * work.backward_s, 1)
    (7.7, 12.5)
    """
    if machine.profile is not None:
        return machine.profile.works(model, split)
    layer, loss = _layer(model, split, machine), _loss(model, split, machine)
    embedding = _embedding(model, split, machine)
    return Works(
        layer,
        embedding,
        loss,
        dense=_layer(model.dense, split._replace(expert=1), machine) if model.dense_layers else NO_WORK,
        mtp=mtp_work(model, split, machine, embedding, layer) if model.mtp_num_layers else NO_WORK,
    )


def _layer(model: Model, split: Split, machine: Machine) -> Work:
    forward, core, backward = _passes(model, split._replace(recompute=Recompute.NONE, modules_again=()), machine)
    again = forward if split.recompute is Recompute.FULL else selected(Sizes(model, split), machine, core)
    return Work.of(forward, backward, again)


@lru_cache(maxsize=4096)
def _passes(model: Model, split: Split, machine: Machine) -> tuple[Parts, Piece, Parts]:
    """Forward, of it the attention's core, and backward, which are the same whatever is computed again."""
    sizes = Sizes(model, split)
    forward, core = _forward(sizes, machine)
    backward = _backward(sizes, machine)
    if split.overlap_exchanges:
        forward, backward = _overlapped(forward, backward)
    return forward, core, backward


def _overlapped(forward: Parts, backward: Parts) -> tuple[Parts, Parts]:
    """With what is left of exchanges where one microbatch's forward runs beside another's backward.

    ``combined_1f1b_schedule_for_interleaved_pipelining`` in ``megatron/core/pipeline_parallel/combined_1f1b.py``. There
    is no other in the first forwards and the last backwards, which is not counted.
    """
    exchanges_s = forward.expert_parallel_s + backward.expert_parallel_s
    others_s = forward.total_s + backward.total_s - exchanges_s
    left = max(exchanges_s - others_s, 0.0) / exchanges_s if exchanges_s else 0.0
    return tuple(one._replace(expert_parallel_s=left * one.expert_parallel_s) for one in (forward, backward))


Matrix = tuple[tuple[float, float], ...]
"""A weight of two dimensions: (rows, columns) of what Muon orthogonalizes apart."""


def size_of(matrix: Matrix) -> float:
    """Its numbers."""
    return sum(rows * columns for rows, columns in matrix)


def matrices(model: Model, split: Split) -> Iterator[tuple[Matrix, int, bool]]:
    """(a weight of a layer on one rank, how many of it there are, they are of experts).

    Q, K and V are apart, where a rank has whole groups of them: ``_get_megatron_emerging_optimizer``.
    """
    sizes = Sizes(model, split)
    of_attention = len(sizes.products) - len(sizes.mlp_products())
    for i, (_, columns, inner, count, *_) in enumerate(sizes.products):
        is_of_expert = model.num_experts > 0 and of_attention <= i < of_attention + 2
        if i == 0 and not model.multi_latent_attention and not sizes.regathered:
            sizes_of_three = model.query_size, model.key_size, model.value_size
            yield tuple((size / split.tensor, inner) for size in sizes_of_three), 1, False
        else:
            yield ((columns, inner),), count, is_of_expert


def _forward(sizes: Sizes, machine: Machine) -> tuple[Parts, Piece]:
    """The layer, and of it the attention's core."""
    width, tokens, hidden = sizes.width, sizes.tokens, sizes.hidden
    products_s = sizes.products_s(machine, sizes.products)
    core_s = sizes.attention_s(machine, 1)
    # Two norms read and write; two residual sums read two, write one, and a mask.
    outside = (4 * width + 6 * width + 2 * sizes.mask) * tokens * hidden / sizes.outside
    activated = sizes.activated()
    (cast, casts), (padded, paddings) = sizes.casts(machine, sizes.products), sizes.padded()
    inside = width * activated.moved + sizes.sorted_bytes() + cast + padded
    scores, kernels = 0.0, _FORWARD + activated.kernels + SORTING * (sizes.model.num_experts > 0) + casts + paddings
    if not sizes.fused:
        scores = sizes.scores * (2 * width + sizes.mask * (2 * width + 1))
        inside += 2 * width * tokens * sizes.outputs
        kernels += _UNFUSED_FORWARD
    more = sizes.more(backward=False)
    elementwise_s = machine.elementwise_s(outside + inside + width * more.moved, kernels + more.kernels)
    scores_s = machine.elementwise_s(scores, _SCORES) if scores else 0.0
    waits_s = sizes.waits_for_keys_s(machine, 1)
    whole = Parts(
        products_s + core_s,
        elementwise_s + scores_s,
        sizes.all_reduces_s(machine, products_s, backward=False),
        waits_s,
        sizes.exchanges_s(machine),
    )
    core = Parts(core_s, scores_s, context_parallel_s=waits_s)
    core_launches = 1 if sizes.fused else 2 * _SCORES
    launches = kernels + more.kernels + len(sizes.products) + _CORE_PRODUCTS + sizes.collectives
    return launched(whole, machine, launches), Piece(core, core_launches)


def _backward(sizes: Sizes, machine: Machine) -> Parts:
    width, tokens, hidden = sizes.width, sizes.tokens, sizes.hidden
    narrow = sizes.product_width
    products_s = sum(
        machine.product_s(one.rows, one.inner, one.columns, width=narrow, count=one.count, of_engine=True)
        + machine.product_s(one.inner, one.columns, one.rows, width=narrow, count=one.count, of_engine=True)
        for one in sizes.products
    )
    # Norms read gradient and input, write a gradient; residual sums likewise, and a mask.
    outside = (6 * width + 6 * width + 2 * sizes.mask) * tokens * hidden / sizes.outside
    inside = width * sizes.routed_tokens * 1.5 * (sizes.into_mlp + sizes.out_of_mlp)
    inside += 2 * sizes.split.gradient_width * sizes.weights + sizes.sorted_bytes()
    cast, casts = sizes.gradient_casts(machine)
    inside += cast
    scores, kernels = 0.0, _BACKWARD + SORTING * (sizes.model.num_experts > 0) + casts
    if sizes.unfused_swiglu:  # 13 numbers are read or written in place of 5.
        inside += width * sizes.routed_tokens * 8 * sizes.out_of_mlp
        kernels += UNFUSED_SWIGLU_BACKWARD
    if not sizes.fused:
        scores = sizes.scores * (3 * width + sizes.mask * (2 * width + 1))
        inside += 2 * width * tokens * sizes.outputs
        kernels += _UNFUSED_BACKWARD
    more = sizes.more(backward=True)
    elementwise_s = machine.elementwise_s(outside + inside + scores + width * more.moved, kernels + more.kernels)
    whole = Parts(
        products_s + sizes.attention_s(machine, 2),
        elementwise_s,
        sizes.all_reduces_s(machine, products_s, backward=True),
        sizes.waits_for_keys_s(machine, 2),
        sizes.exchanges_s(machine),
    )
    launches = kernels + more.kernels + 2 * (len(sizes.products) + _CORE_PRODUCTS) + sizes.collectives
    return launched(whole, machine, launches)


def _embedding(model: Model, split: Split, machine: Machine) -> Work:
    """Gather rows, add positions, drop out; one all-reduce forward.

    The backward has a dense gradient, a row for every token of the vocabulary: zeros in the precision of the weights
    (``embedding_dense_backward``), which DistributedDataParallel's hook adds to the sum over microbatches. That of
    learned positions is small, and left out.
    """
    width, tokens = split.precision.width, model.tokens(split.microbatch, split.context)
    moved = 6 * width * tokens * model.hidden_size
    reduced_s = machine.all_reduce_s(width * tokens * model.hidden_size, split.tensor, 1)
    weights = model.padded_vocab_size(split.tensor) / split.tensor * model.hidden_size
    backward_s = machine.elementwise_s(moved + 2 * (width + split.gradient_width) * weights, 6)
    return Work.of(Parts(0.0, machine.elementwise_s(moved, 4), reduced_s), Parts(0.0, backward_s))


def _loss(model: Model, split: Split, machine: Machine) -> Work:
    """Final norm, logits and the loss in fp32; the backward all-reduces the gradient of its input."""
    width, tokens, tensor = split.precision.width, model.tokens(split.microbatch, split.context), split.tensor
    columns, hidden = model.padded_vocab_size(tensor) / tensor, model.hidden_size
    logits = tokens * columns
    forward_bytes, backward_bytes, kernels = _loss_bytes(split)
    forward_bytes = forward_bytes * logits + 2 * width * tokens * hidden
    backward_bytes = backward_bytes * logits + 3 * width * tokens * hidden
    backward_bytes += 2 * split.gradient_width * columns * hidden
    forward = Parts(
        machine.product_s(tokens, columns, hidden, width=width),
        machine.elementwise_s(forward_bytes, kernels),
        3 * machine.all_reduce_s(4 * tokens, tensor, 1),
    )
    backward = Parts(
        machine.product_s(tokens, hidden, columns, width=width)
        + machine.product_s(hidden, columns, tokens, width=width),
        machine.elementwise_s(backward_bytes, 5),
        machine.all_reduce_s(width * tokens * hidden, tensor, 1),
    )
    return Work.of(forward, backward)


def _loss_bytes(split: Split) -> tuple[int, int, int]:
    """Moved per logit in the forward and in the backward, and kernels of the forward."""
    width = split.precision.width
    if split.fused_loss:  # Read for the softmax, and read and written for the gradient; that is then scaled.
        return 3 * width, 2 * width, 4
    # Copy to fp32, maximum, difference, exponential, sum, quotient; then scale, copy back.
    return width + 4 + 4 + 8 + 8 + 4 + 8, 8 + 4 + width, 9
