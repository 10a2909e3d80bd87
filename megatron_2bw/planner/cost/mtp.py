"""Multi-token prediction: what each further token takes before its loss, per tensor-parallel rank.

DeepSeek-AI, "DeepSeek-V3" (arXiv 2412.19437), section 2.2: the embedding of the next token and what the layers gave are
normed, put side by side and projected; one more layer, a norm, logits and a loss follow. Megatron has all of it behind
the last layer: ``MultiTokenPredictionLayer`` and ``process_mtp_loss`` in
``megatron/core/transformer/multi_token_prediction.py``.
"""

from __future__ import annotations

from megatron_2bw.planner.cost import fp8
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.cost.work import Parts, Work, launched
from megatron_2bw.planner.specs.layout import Recompute
from megatron_2bw.planner.specs.model import Model

_FORWARD, _BACKWARD = 6, 9
"""Kernels that are no products: two norms, vectors side by side, those of all predictions one behind the other, the
likeliest token, a part of the sequence; two per norm, two halves, two sums of gradients, a sum of those of weights."""


def mtp_work(model: Model, split: Split, machine: Machine, embedding: Work, layer: Work) -> Work:
    """Of one token more, which has an embedding and a layer as there are others, and a projection between."""
    head = _projection(model, split, machine)
    forward = Parts.sum((embedding.forward, head.forward, layer.forward))
    backward = Parts.sum((layer.backward, head.backward, embedding.backward))
    # Megatron computes the projection again with the layer.
    again = Parts.sum((head.forward, layer.again)) if split.recompute is Recompute.FULL else layer.again
    return Work.of(forward, backward, again)


def _projection(model: Model, split: Split, machine: Machine) -> Work:
    """What is before the layer. Its product is split by columns and put together again on every rank.

    In 8 bits if those of layers are: ``fp8_context`` in ``MultiTokenPredictionLayer``.
    """
    width, tensor, hidden = split.precision.width, split.tensor, model.hidden_size
    tokens, sequence = model.tokens(split.microbatch, split.context), split.sequence_parallel
    here, columns = tokens * hidden / (tensor if sequence else 1), hidden / tensor
    size_bytes = width * tokens * hidden
    narrow = fp8.operand_width(split.fp8, width)
    gather_s, summed_s = (machine.reduce_scatter_s(n * size_bytes, tensor, 1) for n in (1, 2))
    gathered_s = machine.reduce_scatter_s(2 * narrow * tokens * hidden, tensor, 1)
    cast, casts = fp8.cast_bytes(split.fp8, width, transposes=machine.transposes), fp8.cast_kernels(split.fp8)
    logits = tokens * model.padded_vocab_size(tensor) / tensor
    # Read and written: two norms, side by side, one behind the other; which logit is largest.
    forward = Parts(
        machine.product_s(tokens, columns, 2 * hidden, width=narrow, of_engine=True),
        machine.elementwise_s(width * ((4 + 4 + 4) * here + logits) + cast * 2 * here, _FORWARD + casts),
        gather_s + (gathered_s if sequence else 0.0),
    )
    backward = Parts(
        machine.product_s(tokens, 2 * hidden, columns, width=narrow, of_engine=True)
        + machine.product_s(2 * hidden, columns, tokens, width=narrow, of_engine=True),
        machine.elementwise_s(
            width * (6 + 4 + 6) * here + 2 * split.gradient_width * 2 * hidden * columns + cast * tokens * columns,
            _BACKWARD + casts,
        ),
        gather_s + summed_s if sequence else 2 * summed_s,
    )
    collectives = 2 * (tensor > 1)
    return Work.of(
        launched(forward, machine, _FORWARD + casts + 1 + collectives),
        launched(backward, machine, _BACKWARD + casts + 2 + collectives),
    )
