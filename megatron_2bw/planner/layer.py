"""Seconds of forward and backward of one transformer layer, the embedding, and logits with loss, for one microbatch.

Matrix products are bound by arithmetic or by HBM, everything else on the GPU by HBM; tensor-parallel ranks
add an all-reduce after attention and MLP, forward and backward (Megatron-LM, arXiv 1909.08053, section 3).
Context-parallel ranks pass keys and values around a ring while they attend to what they have (Liu et al., "Ring
Attention", arXiv 2310.01889, section 3). Expert-parallel ranks exchange tokens before and after the experts, which are
taken to be nearly equally busy (Lepikhin et al., "GShard", arXiv 2006.16668, section 3.2). All is per rank.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from megatron_2bw.planner import fp8
from megatron_2bw.planner.layout import Fp8, Layout, Precision, Recompute
from megatron_2bw.planner.model import Kind, Model
from megatron_2bw.planner.speeds import Machine

_PRODUCTS = 6
"""Kernels of a forward with matrix products: four with weights, two with scores; the backward has twice as many."""
_FORWARD, _UNFUSED_FORWARD = 5, 3
"""Elementwise kernels: two norms, two residual sums, the activation function; around scores, three permutations."""
_BACKWARD, _UNFUSED_BACKWARD = 12, 5
"""Two per norm, one per residual sum and activation function, four bias gradients, one sum of gradients; around
scores, softmax, dropout and three permutations."""
_UNFUSED_SWIGLU_FORWARD, _UNFUSED_SWIGLU_BACKWARD = 2, 3
"""More than the fused one: a sum with the bias, SiLU and a product; in the backward two products, SiLU's and a copy."""
_SORTING = 2
"""To the experts' order and back."""
_SCORES = 2
"""Softmax and dropout."""


class Parts(NamedTuple):
    """Seconds by what they are spent on."""

    products_s: float = 0.0
    """Matrix products and fused attention."""
    elementwise_s: float = 0.0
    """Norms, activation functions, softmax, dropout, residuals, sums of gradients."""
    tensor_parallel_s: float = 0.0
    """Collectives of tensor-parallel ranks."""
    context_parallel_s: float = 0.0
    """Keys and values of other ranks, where they take longer than the attention to those at hand."""
    expert_parallel_s: float = 0.0
    """Tokens to the ranks of their experts, and back."""
    launch_s: float = 0.0
    """Waiting for the host, where it needs longer to launch the kernels than the GPU to run them."""
    measured_s: float = 0.0
    """All of it, where a profile knows no parts."""

    @property
    def total_s(self) -> float:
        return sum(self)


NOTHING = Parts()


class Work(NamedTuple):
    """Forward and backward of some part of the model."""

    forward: Parts
    backward: Parts
    again: Parts
    """What the backward computes again first, where recomputation applies."""
    forward_s: float
    backward_s: float
    again_s: float

    @classmethod
    def of(cls, forward: Parts, backward: Parts, again: Parts = NOTHING) -> Work:
        """With the sums, which are needed often."""
        return cls(forward, backward, again, forward.total_s, backward.total_s, again.total_s)


class Split(NamedTuple):
    """The fields of a layout on which the work of a layer depends."""

    tensor: int
    microbatch: int
    sequence_parallel: bool
    recompute: Recompute
    precision: Precision
    gradient_width: int
    """Bytes per summed gradient."""
    fused_attention: bool
    fp8: Fp8 = Fp8.NONE
    fused_swiglu: bool = True
    fused_loss: bool = False
    overlap_tensor: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Of a model with experts."""

    @classmethod
    def of(cls, layout: Layout) -> Split:
        """Those of ``layout``."""
        return cls(*_fields_of_split(layout))


_fields_of_split = attrgetter(*Split._fields)


class Works(NamedTuple):
    """For one microbatch."""

    layer: Work
    embedding: Work
    loss: Work


@lru_cache(maxsize=4096)
def works_of(model: Model, split: Split, machine: Machine) -> Works:
    """The parts of a model.

    Raises:
        PlanError: a profile prices them, and has not measured this model or split.

    Forward and backward of a layer of Megatron's 22B model on A100s, in ms; Korthikanti et al. (arXiv 2205.05198),
    Table 4, measured 7.7 and 11.9:

    >>> from megatron_2bw.planner.cluster import CLUSTERS
    >>> from megatron_2bw.planner.speeds import machine_of
    >>> model = Model(num_layers=48, hidden_size=6144, num_attention_heads=64, seq_length=2048, vocab_size=51200)
    >>> split = Split(8, 4, False, Recompute.NONE, Precision.FP16, 2, False)
    >>> work = works_of(model, split, machine_of(CLUSTERS["dgx-a100"])).layer
    >>> round(1e3 * work.forward_s, 1), round(1e3 * work.backward_s, 1)
    (7.7, 12.5)
    """
    if machine.profile is not None:
        return machine.profile.works(model, split)
    return Works(_layer(model, split, machine), _embedding(model, split, machine), _loss(model, split, machine))


def _layer(model: Model, split: Split, machine: Machine) -> Work:
    sizes = _Sizes(model, split)
    forward, core = _forward(sizes, machine)
    again = {Recompute.FULL: forward, Recompute.SELECTIVE: core}.get(split.recompute, NOTHING)
    return Work.of(forward, _backward(sizes, machine), again)


class _Sizes:
    """Numbers per tensor-parallel rank that several kernels share."""

    def __init__(self, model: Model, split: Split) -> None:
        self.model, self.split = model, split
        self.width, self.tensor = split.precision.width, split.tensor
        self.tokens = model.tokens(split.microbatch, split.context)
        self.hidden = model.hidden_size
        self.queries = model.query_size / self.tensor
        self.keys = model.key_size / self.tensor
        self.routed = model.routed(split.expert)
        self.experts = max(model.num_experts, 1) // split.expert
        # Ranks that split no expert each have a share of the tokens in its place.
        self.of_mlp = split.expert_tensor if model.num_experts else self.tensor
        self.routed_tokens = self.tokens * self.routed * self.of_mlp / self.tensor
        self.into_mlp = (2 if model.swiglu else 1) * model.ffn_hidden_size / self.of_mlp
        self.out_of_mlp = model.ffn_hidden_size / self.of_mlp
        self.outside = self.tensor if split.sequence_parallel else 1
        self.mask = 1 if model.dropout else 0
        self.collectives = (split.tensor > 1) + (self.of_mlp > 1) + 2 * (split.expert > 1)
        # Every head has a score per pair of tokens.
        self.scores = self.tokens * model.seq_length * model.num_attention_heads / self.tensor
        self.fused = split.fused_attention
        self.unfused_swiglu = model.swiglu and not split.fused_swiglu
        self.product_width = fp8.operand_width(split.fp8, self.width)
        self.products = (
            (self.tokens, self.queries + 2 * self.keys, self.hidden, 1),
            (self.tokens, self.hidden, self.queries, 1),
            *self._mlp_products(),
        )
        weights = self.hidden * (2 * self.queries + 2 * self.keys)
        weights += self.experts * self.hidden * (self.into_mlp + self.out_of_mlp)
        self.weights = weights

    def _mlp_products(self) -> tuple[tuple[float, float, float, int], ...]:
        rows, experts = self.routed_tokens / self.experts, self.experts
        return (rows, self.into_mlp, self.hidden, experts), (rows, self.hidden, self.out_of_mlp, experts)

    def attention_s(self, machine: Machine, passes: int) -> float:
        """Products with scores; ``passes``: 1 forward, 2 backward. Ranks that share sequences have equal shares."""
        channels = self.model.kv_channels
        if not self.fused:
            heads = self.split.microbatch * self.model.num_attention_heads / self.tensor
            length = self.model.seq_length
            return 2 * passes * machine.product_s(length, length, channels, width=self.width, count=heads)
        # A fused backward computes the scores again; causal attention skips half.
        flops = 4 * self.scores * channels * (1 if passes == 1 else 2.5)
        causal = 0.5 if self.model.kind is Kind.GPT else 1.0
        return self.split.context * machine.kernel_s + causal * flops / machine.flash_flops_per_s

    def waits_for_keys_s(self, machine: Machine, passes: int) -> float:
        """For keys and values of other ranks; the backward passes their gradients on, too."""
        ranks = self.split.context
        if ranks == 1:
            return 0.0
        size_bytes = passes * 2 * self.keys * self.tokens * self.width
        send_s = machine.pass_on_s(size_bytes, ranks, self.tensor)
        return (ranks - 1) * max(0.0, send_s - self.attention_s(machine, passes) / ranks)

    def exchanges_s(self, machine: Machine) -> float:
        """Of routed tokens, to their experts and back; a tensor-parallel rank sends its share of them."""
        size_bytes = self.tokens * self.routed * self.hidden * self.width / self.tensor
        return 2 * machine.all_to_all_s(size_bytes, self.split.expert, self.split.expert_tensor)

    def sorted_bytes(self) -> float:
        """Moved to put tokens in the order of their experts and back, those of several local experts once more."""
        numbers = self.tokens * self.routed * self.hidden / self.tensor
        if not self.model.num_experts:
            return 0.0
        if self.split.expert == 1:  # All are here.
            return 4 * self.width * numbers * self.of_mlp
        return 4 * self.width * numbers * (1 + (self.of_mlp if self.experts > 1 else 0))

    def all_reduces_s(self, machine: Machine, products_s: float) -> float:
        """One after attention and one after the MLP; with sequence parallelism, as a pair of half ones each.

        That of the MLP is of the tokens of the ranks that split it; behind an exchange, of routed ones.

        Args:
            machine: that runs it.
            products_s: of products with weights, beside which collectives may run: see `_hidden_s`.
        """
        tokens = self.routed_tokens if self.split.expert > 1 else self.tokens * self.of_mlp / self.tensor
        of_attention, of_mlp = (count * self.hidden * self.width for count in (self.tokens, tokens))
        share = fp8.gathered_share(self.split.fp8, self.width) if self.split.sequence_parallel else 1
        attention_s = machine.all_reduce_s(share * of_attention, self.tensor, 1)
        mlp_s = machine.all_reduce_s(share * of_mlp, self.of_mlp, 1)
        beside_products_s = attention_s + (0.0 if self.model.num_experts else mlp_s)
        return attention_s + mlp_s - self._hidden_s(beside_products_s, products_s)

    def _hidden_s(self, collectives_s: float, products_s: float) -> float:
        """Of collectives that are cut into a part per rank: all parts but the first come while one is multiplied.

        Rule: ``--tp-comm-overlap``, Transformer Engine's userbuffers (``CommOverlapP2P`` in
        ``transformer_engine/common/comm_gemm_overlap``).
        """
        if not self.split.overlap_tensor:
            return 0.0
        return min(collectives_s * (self.tensor - 1) / self.tensor, products_s)

    def casts(self) -> tuple[float, int]:
        """Bytes moved and kernels of the inputs' casts to 8 bits in a forward; experts' inputs come out of no norm."""
        after_norm = fp8.cast_bytes(self.split.fp8, self.width, in_norm=True)
        other = fp8.cast_bytes(self.split.fp8, self.width)
        into_experts = self.routed_tokens * self.hidden if self.model.num_experts else 0.0
        normed = (1 if self.model.num_experts else 2) * self.tokens * self.hidden / self.outside
        inside = self.tokens * self.queries + self.routed_tokens * self.out_of_mlp
        fused = 1 if self.model.num_experts else 2
        kernels = fused * fp8.cast_kernels(self.split.fp8, in_norm=True)
        kernels += (len(self.products) - fused) * fp8.cast_kernels(self.split.fp8)
        return after_norm * normed + other * (inside + into_experts), kernels

    def gradient_casts(self) -> tuple[float, int]:
        """The same of the outputs' gradients in a backward; the kernels that sum a bias' gradient cast, too."""
        whole = (self.tokens + self.routed_tokens) * self.hidden / self.outside
        inside = self.tokens * (self.queries + 2 * self.keys) + self.routed_tokens * self.into_mlp
        kernels = len(self.products) * max(0, fp8.cast_kernels(self.split.fp8) - 1)
        return fp8.cast_bytes(self.split.fp8, self.width) * (whole + inside), kernels


def _forward(sizes: _Sizes, machine: Machine) -> tuple[Parts, Parts]:
    """The layer, and of it the attention's core, which selective recomputation computes again."""
    width, tokens, hidden = sizes.width, sizes.tokens, sizes.hidden
    products_s = sum(machine.product_s(r, c, k, width=sizes.product_width, count=n) for r, c, k, n in sizes.products)
    core_s = sizes.attention_s(machine, 1)
    # Two norms read and write; two residual sums read two, write one, and a mask.
    outside = (4 * width + 6 * width + 2 * sizes.mask) * tokens * hidden / sizes.outside
    inside = width * sizes.routed_tokens * (sizes.into_mlp + sizes.out_of_mlp) + sizes.sorted_bytes()
    cast, casts = sizes.casts()
    inside += cast
    scores, kernels = 0.0, _FORWARD + _SORTING * (sizes.model.num_experts > 0) + casts
    if sizes.unfused_swiglu:  # Per number that comes out: SiLU's is written and read, and the sum reads and writes two.
        inside += width * sizes.routed_tokens * (6 if sizes.model.bias else 2) * sizes.out_of_mlp
        kernels += _UNFUSED_SWIGLU_FORWARD
    if not sizes.fused:
        scores = sizes.scores * (2 * width + sizes.mask * (2 * width + 1))
        inside += 2 * width * tokens * sizes.queries
        kernels += _UNFUSED_FORWARD
    elementwise_s = machine.elementwise_s(outside + inside, kernels)
    scores_s = machine.elementwise_s(scores, _SCORES) if scores else 0.0
    waits_s = sizes.waits_for_keys_s(machine, 1)
    whole = Parts(
        products_s + core_s,
        elementwise_s + scores_s,
        sizes.all_reduces_s(machine, products_s),
        waits_s,
        sizes.exchanges_s(machine),
    )
    core = Parts(core_s, scores_s, context_parallel_s=waits_s)
    core_launches = 1 if sizes.fused else 2 * _SCORES
    return _launched(whole, machine, kernels + _PRODUCTS + sizes.collectives), _launched(core, machine, core_launches)


def _launched(parts: Parts, machine: Machine, launches: int) -> Parts:
    """With the wait for the host, where its launches take longer than the kernels."""
    return parts._replace(launch_s=max(0.0, launches * machine.launch_s - parts.total_s))


def _backward(sizes: _Sizes, machine: Machine) -> Parts:
    width, tokens, hidden = sizes.width, sizes.tokens, sizes.hidden
    products_s = sum(
        machine.product_s(rows, inner, columns, width=sizes.product_width, count=n)
        + machine.product_s(inner, columns, rows, width=sizes.product_width, count=n)
        for rows, columns, inner, n in sizes.products
    )
    # Norms read gradient and input, write a gradient; residual sums likewise, and a mask.
    outside = (6 * width + 6 * width + 2 * sizes.mask) * tokens * hidden / sizes.outside
    inside = width * sizes.routed_tokens * 1.5 * (sizes.into_mlp + sizes.out_of_mlp)
    inside += 2 * sizes.split.gradient_width * sizes.weights + sizes.sorted_bytes()
    cast, casts = sizes.gradient_casts()
    inside += cast
    scores, kernels = 0.0, _BACKWARD + _SORTING * (sizes.model.num_experts > 0) + casts
    if sizes.unfused_swiglu:  # 13 numbers are read or written in place of 5.
        inside += width * sizes.routed_tokens * 8 * sizes.out_of_mlp
        kernels += _UNFUSED_SWIGLU_BACKWARD
    if not sizes.fused:
        scores = sizes.scores * (3 * width + sizes.mask * (2 * width + 1))
        inside += 2 * width * tokens * sizes.queries
        kernels += _UNFUSED_BACKWARD
    elementwise_s = machine.elementwise_s(outside + inside + scores, kernels)
    whole = Parts(
        products_s + sizes.attention_s(machine, 2),
        elementwise_s,
        sizes.all_reduces_s(machine, products_s),
        sizes.waits_for_keys_s(machine, 2),
        sizes.exchanges_s(machine),
    )
    return _launched(whole, machine, kernels + 2 * _PRODUCTS + sizes.collectives)


def _embedding(model: Model, split: Split, machine: Machine) -> Work:
    """Gather rows, add positions, drop out; the backward adds rows to the gradient; one all-reduce forward."""
    width, tokens = split.precision.width, model.tokens(split.microbatch, split.context)
    moved = 6 * width * tokens * model.hidden_size
    reduced_s = machine.all_reduce_s(width * tokens * model.hidden_size, split.tensor, 1)
    return Work.of(Parts(0.0, machine.elementwise_s(moved, 4), reduced_s), Parts(0.0, machine.elementwise_s(moved, 4)))


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
