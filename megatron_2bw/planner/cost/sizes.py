"""Numbers of one layer on one rank that its kernels have in common: products, casts, collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from megatron_2bw.planner.cost import attention, fp8
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.cost.work import Product
from megatron_2bw.planner.specs.layout import Dispatcher, Fp8, Layout, Precision, Recompute, RecomputeModule
from megatron_2bw.planner.specs.model import Kind, Model

UNFUSED_SWIGLU_FORWARD, UNFUSED_SWIGLU_BACKWARD = 2, 3
"""More than the fused one: a sum with the bias, SiLU and a product; in the backward two products, SiLU's and a copy."""
SORTING = 2
"""Tokens to their experts' order and back."""
_BIASES = 4
"""Kernels of a backward that sum a bias' gradient."""
_PADDING = 3
"""Of tokens and of their weights, and of tokens back."""
_SHARED_FORWARD, _SHARED_BACKWARD = 2, 2
"""Of shared experts: the activation function and the sum with the others; that of gradients of their input."""
_GATE = 3
"""A product with one column, a sigmoid, a product; half of what a backward has."""


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
    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    overlap_exchanges: bool = False
    modules_again: tuple[RecomputeModule, ...] = ()

    @classmethod
    def of(cls, layout: Layout) -> Split:
        """Those of ``layout``."""
        return cls(*_fields_of_split(layout))


_fields_of_split = attrgetter(*Split._fields)


class Sizes:
    """Numbers per tensor-parallel rank that several kernels share."""

    def __init__(self, model: Model, split: Split) -> None:
        self.model, self.split = model, split
        self.width, self.tensor = split.precision.width, split.tensor
        self.tokens = model.tokens(split.microbatch, split.context)
        self.hidden = model.hidden_size
        self.outputs = model.output_size / self.tensor
        self.routed = model.routed(split.expert)
        self.experts = max(model.num_experts, 1) // split.expert
        # Ranks that split no expert each have a share of the tokens in its place.
        self.of_mlp = split.expert_tensor if model.num_experts else self.tensor
        self.routed_tokens = self.tokens * self.routed * self.of_mlp / self.tensor
        self.into_mlp = (2 if model.swiglu else 1) * model.ffn_hidden_size / self.of_mlp
        self.out_of_mlp = model.ffn_hidden_size / self.of_mlp
        self.out_of_shared = model.moe_shared_expert_intermediate_size / self.tensor
        self.into_shared = (2 if model.swiglu else 1) * self.out_of_shared
        self.outside = self.tensor if split.sequence_parallel else 1
        self.mask = 1 if model.dropout else 0
        self.shares = model.moe_shared_expert_intermediate_size > 0
        self.collectives = (split.tensor > 1) + (self.of_mlp > 1) + 2 * (split.expert > 1)
        self.collectives += (self.shares and split.tensor > 1) + len(self.gathered(backward=False))
        self.regathered = attention.regathered(model, self.tensor)
        self.collectives += self.regathered > 0
        # Every head has a score per pair of tokens.
        self.scores = self.tokens * model.seq_length * model.num_attention_heads / self.tensor
        self.fused = split.fused_attention
        self.unfused_swiglu = model.swiglu and not split.fused_swiglu
        self.product_width = fp8.operand_width(split.fp8, self.width)
        self.products = (
            *attention.products(model, self.tokens, self.tensor, self.outside),
            *self.mlp_products(),
        )
        weights = attention.weights(model, self.tensor)
        weights += self.experts * self.hidden * (self.into_mlp + self.out_of_mlp)
        self.weights = weights + self.hidden * (self.into_shared + self.out_of_shared)

    def products_s(self, machine: Machine, products: Sequence[Product]) -> float:
        """Of a forward."""
        width = self.product_width
        return sum(
            machine.product_s(one.rows, one.columns, one.inner, width=width, count=one.count, of_engine=True)
            for one in products
        )

    def mlp_products(self) -> tuple[Product, ...]:
        """Of the MLP or the experts, and of shared experts."""
        rows, count, whole = self.routed_tokens / self.experts, self.experts, self.model.num_experts == 0
        mlp = (
            Product(rows, self.into_mlp, self.hidden, count, gathers=whole, after_norm=whole),
            Product(rows, self.hidden, self.out_of_mlp, count, scatters=whole),
        )
        if not self.shares:
            return mlp
        return (
            *mlp,
            Product(self.tokens, self.into_shared, self.hidden, gathers=True),
            Product(self.tokens, self.hidden, self.out_of_shared, scatters=True),
        )

    def gathered(self, *, backward: bool) -> tuple[int, ...]:
        """Numbers per token of each half all-reduce before attention, in place of one of what goes into it."""
        sequence = self.split.sequence_parallel
        return attention.gathered(self.model, self.tensor, sequence_parallel=sequence, backward=backward)

    def activated(self) -> attention.Elementwise:
        """The activation function of the MLP or of the experts, in a forward."""
        moved, kernels = self.into_mlp + self.out_of_mlp, 1
        if self.unfused_swiglu:  # Per number that comes out: SiLU's is written and read, the sum reads and writes two.
            moved += (6 if self.model.bias else 2) * self.out_of_mlp
            kernels += UNFUSED_SWIGLU_FORWARD
        return attention.Elementwise(self.routed_tokens * moved, kernels)

    @property
    def shared_sum(self) -> float:
        """Numbers per token, read and written, of the sum of what shared experts and the others give."""
        return 3 * self.hidden / self.outside

    def shared(self, *, backward: bool) -> attention.Elementwise:
        """Kernels that are no products, of shared experts: the activation function, a sum, and a gate."""
        if not self.shares:
            return attention.Elementwise()
        activated, summed = self.into_shared + self.out_of_shared, self.shared_sum
        kernels = _SHARED_BACKWARD if backward else _SHARED_FORWARD
        gate = self.model.moe_shared_expert_gate * (2 if backward else 1)
        moved = (1.5 if backward else 1) * activated + (1 + gate) * summed
        if self.unfused_swiglu:
            moved += (8 if backward else 2) * self.out_of_shared
            kernels += UNFUSED_SWIGLU_BACKWARD if backward else UNFUSED_SWIGLU_FORWARD
        return attention.Elementwise(self.tokens * moved, kernels + gate * _GATE)

    def more(self, *, backward: bool) -> attention.Elementwise:
        """Kernels that are no products: attention's norms and positions, and those of shared experts."""
        of_attention = attention.elementwise(self.model, self.tokens, self.tensor, self.outside, backward=backward)
        of_shared = self.shared(backward=backward)
        return attention.Elementwise(of_attention.moved + of_shared.moved, of_attention.kernels + of_shared.kernels)

    def attention_s(self, machine: Machine, passes: int) -> float:
        """Products with scores; ``passes``: 1 forward, 2 backward. Ranks that share sequences have equal shares."""
        of_keys, of_values = attention.core_channels(self.model)
        if not self.fused:
            heads = self.split.microbatch * self.model.num_attention_heads / self.tensor
            length = self.model.seq_length
            both = (machine.product_s(length, length, c, width=self.width, count=heads) for c in (of_keys, of_values))
            return passes * sum(both)
        # A fused backward computes the scores again, three of its five products have keys' channels; causal attention
        # skips half.
        if passes == 1:
            flops = 4 * self.scores * ((of_keys + of_values) / 2)
        else:
            flops = 4 * self.scores * ((3 * of_keys + 2 * of_values) / 5) * 2.5
        causal = 0.5 if self.model.kind is Kind.GPT else 1.0
        return self.split.context * machine.kernel_s + causal * flops / machine.flash_flops_per_s

    def waits_for_keys_s(self, machine: Machine, passes: int) -> float:
        """For keys and values of other ranks; the backward passes their gradients on, too."""
        ranks = self.split.context
        if ranks == 1:
            return 0.0
        keys_and_values = sum(attention.keys_and_values(self.model, self.tensor))
        size_bytes = passes * keys_and_values * self.tokens * self.width
        send_s = machine.pass_on_s(size_bytes, ranks, self.tensor)
        return (ranks - 1) * max(0.0, send_s - self.attention_s(machine, passes) / ranks)

    def exchanges_s(self, machine: Machine) -> float:
        """Of routed tokens, to their experts and back; a tensor-parallel rank sends its share of them."""
        size_bytes = self.tokens * self.routed * self.hidden * self.width / self.tensor
        ranks, stride = self.split.expert, self.split.expert_tensor
        if not self.split.dispatcher.is_flexible:
            return 2 * machine.all_to_all_s(size_bytes, ranks, stride)

        def reached(groups: int) -> float:
            """Of so many groups of experts: those that a token has one in, per expert that it has."""
            experts, chosen = self.model.num_experts, self.model.moe_router_topk
            others = experts - experts / groups
            missed = math.prod(max(others - i, 0) / (experts - i) for i in range(chosen))
            return groups * (1 - missed) / chosen

        return 2 * machine.dispatch_s(size_bytes, ranks, stride, reached=reached)

    def sorted_bytes(self) -> float:
        """Moved to put tokens in the order of their experts and back, those of several local experts once more."""
        numbers = self.tokens * self.routed * self.hidden / self.tensor
        if not self.model.num_experts:
            return 0.0
        if self.split.expert == 1:  # All are here.
            return 4 * self.width * numbers * self.of_mlp
        if self.split.dispatcher.is_flexible:  # Copies are made where they have come.
            return 4 * self.width * numbers
        return 4 * self.width * numbers * (1 + (self.of_mlp if self.experts > 1 else 0))

    def all_reduces_s(self, machine: Machine, products_s: float, *, backward: bool) -> float:
        """One after attention and one after the MLP; with sequence parallelism, as a pair of half ones each.

        More ranks than query groups have half a one more, of queries, keys and values, which no product is beside: they
        gather them in the forward, and scatter sums of their gradients in the backward. Both are in full width.

        That of the MLP is of the tokens of the ranks that split it; behind an exchange, of routed ones. Shared experts
        have one of all tokens.

        Args:
            machine: that runs it.
            products_s: of products with weights, beside which collectives may run: see `hidden_s`.
            backward: whether it is of the backward.
        """
        if self.model.multi_latent_attention:
            attention_s = self._around_latents_s(machine, backward=backward)
        else:
            attention_s = self.all_reduce_s(machine)
        mlp_s, shared_s = self.mlp_all_reduce_s(machine), self.all_reduce_s(machine) if self.shares else 0.0
        beside_products_s = attention_s + shared_s + (0.0 if self.model.num_experts else mlp_s)
        regathered_bytes = self.regathered * self.tokens * self.width
        regathered_s = machine.reduce_scatter_s(regathered_bytes, self.tensor, 1) if self.regathered else 0.0
        return attention_s + shared_s + mlp_s + regathered_s - self.hidden_s(beside_products_s, products_s)

    def all_reduce_s(self, machine: Machine) -> float:
        """Of all tokens: after attention, and after shared experts."""
        return machine.all_reduce_s(self._gathered_share * self.tokens * self.hidden * self.width, self.tensor, 1)

    def mlp_all_reduce_s(self, machine: Machine) -> float:
        """After the MLP or the experts."""
        tokens = self.routed_tokens if self.split.expert > 1 else self.tokens * self.of_mlp / self.tensor
        return machine.all_reduce_s(self._gathered_share * tokens * self.hidden * self.width, self.of_mlp, 1)

    @property
    def _gathered_share(self) -> float:
        """Of the bytes of collectives, what is left with products in 8 bits."""
        return fp8.gathered_share(self.split.fp8, self.width) if self.split.sequence_parallel else 1

    def hidden_s(self, collectives_s: float, products_s: float) -> float:
        """Of collectives that are cut into a part per rank: all parts but the first come while one is multiplied.

        Rule: ``--tp-comm-overlap``, Transformer Engine's userbuffers (``CommOverlapP2P`` in
        ``transformer_engine/common/comm_gemm_overlap``). Where a product has a name that these do not know, as those of
        latent vectors have, Megatron's ``TELinear`` switches the flag off for all that are made after it.
        """
        if not self.split.overlap_tensor or self.model.multi_latent_attention:
            return 0.0
        return min(collectives_s * (self.tensor - 1) / self.tensor, products_s)

    def gathers_s(self, machine: Machine, counts: Sequence[int]) -> float:
        """Half an all-reduce of so many numbers per token each."""
        per_number = self._gathered_share * self.tokens * self.width
        return sum(machine.reduce_scatter_s(count * per_number, self.tensor, 1) for count in counts)

    def _around_latents_s(self, machine: Machine, *, backward: bool) -> float:
        """Latent vectors where queries, keys and values come out of them, and what attention gives."""
        in_s = self.gathers_s(machine, self.gathered(backward=backward))
        out_bytes = self.hidden * self._gathered_share * self.tokens * self.width
        if self.split.sequence_parallel:
            return in_s + machine.reduce_scatter_s(out_bytes, self.tensor, 1)
        return in_s if backward else machine.all_reduce_s(out_bytes, self.tensor, 1)

    def casts(self, machine: Machine, products: Sequence[Product]) -> tuple[float, int]:
        """Bytes moved and kernels of the casts to 8 bits of what ``products`` read in a forward."""
        recipe, moved, kernels = self.split.fp8, 0.0, 0
        for product in products:
            numbers = product.count * product.rows * product.inner / (self.outside if product.gathers else 1)
            moved += numbers * fp8.cast_bytes(
                recipe, self.width, transposes=machine.transposes, in_norm=product.after_norm
            )
            kernels += fp8.cast_kernels(recipe, in_norm=product.after_norm)
        return moved, kernels

    def gradient_casts(self, machine: Machine) -> tuple[float, int]:
        """The same of the outputs' gradients in a backward; the kernels that sum a bias' gradient cast, too.

        ``layer._BACKWARD`` has four of those, however many products there are.
        """
        numbers = sum(
            product.count * product.rows * product.columns / (self.outside if product.scatters else 1)
            for product in self.products
        )
        kernels = max(0, len(self.products) * fp8.cast_kernels(self.split.fp8) - _BIASES)
        padded, paddings = self.padded()
        cast = fp8.cast_bytes(self.split.fp8, self.width, transposes=machine.transposes)
        return padded + numbers * cast, paddings + kernels

    def padded(self) -> tuple[float, int]:
        """The same of what gives every expert a number of tokens that products in 8 bits take, and takes it away.

        Copies of the tokens and, in a kernel of their own, of their weights: ``quantization_padding`` in
        ``megatron/core/transformer/moe/experts.py``; ``--moe-router-padding-for-quantization`` would spare them, and
        HybridEP does: ``skip_routed_expert_padding``.
        """
        if not self.model.num_experts or self.split.fp8 is Fp8.NONE or self.split.dispatcher is Dispatcher.HYBRIDEP:
            return 0.0, 0
        return 4 * self.width * self.routed_tokens * self.hidden, _PADDING
