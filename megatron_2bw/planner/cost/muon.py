"""Seconds that Muon takes to orthogonalize the momenta of a stage, beyond reading and writing them.

Five steps of Newton-Schulz for every matrix X of m x n, m <= n: A = X X', B = b A + c A A, X = a X + B X (Jordan,
"Muon", 2024; ``TensorParallelMuon`` in ``megatron/core/optimizer/emerging_optimizers.py``), in 16 bits: fp32 products
of precision ``medium``. Each tensor-parallel rank orthogonalizes the part of a matrix that it has, as Megatron's
``blockwise`` does; queries, keys and values are matrices of their own. With the distributed optimizer, replicas share
the matrices out, each of them whole.
"""

from __future__ import annotations

from megatron_2bw.planner.cost.layer import Matrix
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.cost.whole import buffers_of, longest_s
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Model

STEPS = 5
"""``--muon-num-ns-steps``, its default."""
_WIDTH = 2


def orthogonalized_s(model: Model, layout: Layout, machine: Machine, stage: int) -> float:
    """Of the rank of ``stage`` with most to do; routers and position embeddings are too small to price."""

    def time_s(matrix: Matrix) -> float:
        return sum(newton_schulz_s(rows, columns, machine) for rows, columns in matrix)

    found = (buffer for of_chunk in buffers_of(model, layout, stage) for buffer in of_chunk)
    return sum(longest_s(buffer, time_s) for buffer in found)


def newton_schulz_s(rows: float, columns: float, machine: Machine) -> float:
    """Of one matrix."""
    small, large = sorted((rows, columns))
    return STEPS * (
        machine.product_s(small, small, large, width=_WIDTH)
        + machine.product_s(small, small, small, width=_WIDTH)
        + machine.product_s(small, large, small, width=_WIDTH)
    )
