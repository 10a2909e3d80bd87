"""Seconds that Muon takes to orthogonalize the momenta of a stage, beyond reading and writing them.

Five steps of Newton-Schulz for every matrix X of m x n, m <= n: A = X X', B = b A + c A A, X = a X + B X (Jordan,
"Muon", 2024; ``TensorParallelMuon`` in ``megatron/core/optimizer/emerging_optimizers.py``), in 16 bits: fp32 products
of precision ``medium``. Each tensor-parallel rank orthogonalizes the part of a matrix that it has, as Megatron's
``blockwise`` does; queries, keys and values are matrices of their own. With the distributed optimizer, replicas share
the matrices out.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_2bw.planner.cost.layer import matrices
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.pipeline.stages import Contents
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Model

STEPS = 5
"""``--muon-num-ns-steps``, its default."""
_WIDTH = 2


def orthogonalized_s(model: Model, layout: Layout, machine: Machine, chunks: Sequence[Contents]) -> float:
    """Of a stage with these chunks; routers and position embeddings are too small to price."""
    split = Split.of(layout)
    layers, dense = sum(held.layers for held in chunks), sum(held.dense for held in chunks)
    predicted = sum(held.mtp for held in chunks)
    total_s = dense * _share_s(model.dense, split._replace(expert=1), layout, machine)
    total_s += (layers - dense + predicted) * _share_s(model, split, layout, machine)
    projection_s = newton_schulz_s(model.hidden_size / layout.tensor, 2 * model.hidden_size, machine)
    return total_s + predicted * projection_s / layout.shards(layout.replicas)


def _share_s(model: Model, split: Split, layout: Layout, machine: Machine) -> float:
    """Of one layer, on each of the ranks that share it."""
    total_s = 0.0
    for rows, columns, count, is_of_expert in matrices(model, split):
        replicas = layout.expert_replicas if is_of_expert else layout.replicas
        total_s += count * newton_schulz_s(rows, columns, machine) / layout.shards(replicas)
    return total_s


def newton_schulz_s(rows: float, columns: float, machine: Machine) -> float:
    """Of one matrix."""
    small, large = sorted((rows, columns))
    return STEPS * (
        machine.product_s(small, small, large, width=_WIDTH)
        + machine.product_s(small, small, small, width=_WIDTH)
        + machine.product_s(small, large, small, width=_WIDTH)
    )
