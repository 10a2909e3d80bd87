"""Seconds of the parts of a layer that selective recomputation computes again: ``--recompute-modules``.

What each module covers is in ``TransformerLayer``, ``MLASelfAttention``, ``MoELayer`` and ``TEGroupedMLP`` of
``megatron/core/transformer``; with Transformer Engine, a norm that is part of the product behind it is computed again
with that product alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_2bw.planner.cost import attention
from megatron_2bw.planner.cost.sizes import SORTING, Sizes
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.cost.work import Parts, launched
from megatron_2bw.planner.specs.layout import RecomputeModule


class Piece(NamedTuple):
    """Of a forward."""

    parts: Parts
    launches: int
    """Kernels and collectives."""


def selected(sizes: Sizes, machine: Machine, core: Piece) -> Parts:
    """Of all modules that the layer has; ``core``: attention's."""
    pieces = list(_pieces(sizes, machine, core))
    parts = Parts.sum(piece.parts for piece in pieces)
    return launched(parts, machine, sum(piece.launches for piece in pieces))


def _pieces(sizes: Sizes, machine: Machine, core: Piece) -> Iterator[Piece]:
    modules, has_experts = sizes.split.modules_again, sizes.model.num_experts > 0
    has_latents = sizes.model.multi_latent_attention
    if RecomputeModule.CORE_ATTN in modules:
        yield core
    if RecomputeModule.LAYERNORM in modules and (count := has_latents + has_experts):
        yield _norms(sizes, machine, count)
    if RecomputeModule.MLA_UP_PROJ in modules and has_latents:
        yield _up_projections(sizes, machine)
    if not has_experts:
        if RecomputeModule.MLP in modules:
            yield _norms(sizes, machine, 1)
            yield _mlp(sizes, machine)
    elif RecomputeModule.MOE in modules:
        yield _mlp(sizes, machine)
        if sizes.shares:
            yield _shared(sizes, machine, summed=True)
    else:
        if RecomputeModule.MOE_ACT in modules:
            activated = sizes.activated()
            yield _elementwise(machine, sizes.width * activated.moved, activated.kernels)
        if RecomputeModule.SHARED_EXPERTS in modules and sizes.shares:
            yield _shared(sizes, machine, summed=False)


def _elementwise(machine: Machine, moved_bytes: float, kernels: int) -> Piece:
    return Piece(Parts(elementwise_s=machine.elementwise_s(moved_bytes, kernels)), kernels)


def _norms(sizes: Sizes, machine: Machine, count: int) -> Piece:
    moved = 2 * sizes.width * sizes.tokens * sizes.hidden / sizes.outside
    return _elementwise(machine, count * moved, count)


def _up_projections(sizes: Sizes, machine: Machine) -> Piece:
    """With the norms of latent vectors, and positions."""
    products = attention.up_products(sizes.model, sizes.tokens, sizes.tensor)
    more = attention.elementwise(sizes.model, sizes.tokens, sizes.tensor, sizes.outside)
    cast, casts = sizes.casts(machine, products)
    gathered = sizes.gathered(backward=False)[: len(products)]  # That of the positions' channels is before.
    parts = Parts(
        products_s=sizes.products_s(machine, products),
        elementwise_s=machine.elementwise_s(sizes.width * more.moved + cast, more.kernels + casts),
        tensor_parallel_s=sizes.gathers_s(machine, gathered),
    )
    return Piece(parts, len(products) + more.kernels + casts + len(gathered))


def _mlp(sizes: Sizes, machine: Machine) -> Piece:
    """Or the experts."""
    has_experts, shares_experts = sizes.model.num_experts > 0, sizes.split.expert > 1
    products, activated = sizes.mlp_products()[:2], sizes.activated()
    products_s, collective_s = sizes.products_s(machine, products), sizes.mlp_all_reduce_s(machine)
    (cast, casts), (padded, paddings) = sizes.casts(machine, products), sizes.padded()
    moved = sizes.width * activated.moved + sizes.sorted_bytes() + cast + padded
    kernels = activated.kernels + SORTING * has_experts + casts + paddings
    parts = Parts(
        products_s=products_s,
        elementwise_s=machine.elementwise_s(moved, kernels),
        tensor_parallel_s=collective_s - (0.0 if has_experts else sizes.hidden_s(collective_s, products_s)),
        expert_parallel_s=sizes.exchanges_s(machine),
    )
    return Piece(parts, len(products) + kernels + (sizes.of_mlp > 1) + 2 * shares_experts)


def _shared(sizes: Sizes, machine: Machine, *, summed: bool) -> Piece:
    """``summed``: with the sum of what they and the others give."""
    products, more = sizes.mlp_products()[2:], sizes.shared(backward=False)
    if not summed:
        more = attention.Elementwise(more.moved - sizes.tokens * sizes.shared_sum, more.kernels - 1)
    products_s, collective_s = sizes.products_s(machine, products), sizes.all_reduce_s(machine)
    cast, casts = sizes.casts(machine, products)
    parts = Parts(
        products_s=products_s,
        elementwise_s=machine.elementwise_s(sizes.width * more.moved + cast, more.kernels + casts),
        tensor_parallel_s=collective_s - sizes.hidden_s(collective_s, products_s),
    )
    return Piece(parts, len(products) + more.kernels + casts + (sizes.tensor > 1))
