"""Matrices that stay whole where the optimizer of matrices is distributed, and how replicas share them out.

A rank updates whole matrices, so the shards of a buffer are as long as the fullest of them: with more replicas than
matrices, as the largest matrix. The rest is padding, in weights and in gradients. Rule:
``LayerWiseDistributedOptimizer._compute_per_buffer_param_layout``. Every chunk of a model has buffers of its own, one
of them its experts'. They are cut in buckets where gradients are summed beside backwards, in the first chunk of the
first stage alone (``get_model`` in ``megatron/training/training.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import NamedTuple

from megatron_2bw.planner.cost.layer import Matrix, matrices, size_of
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.pipeline.stages import Contents, contents_of
from megatron_2bw.planner.specs.layout import WITHOUT_OVERLAP, Layout
from megatron_2bw.planner.specs.model import Model

_LEAST_FILLED = 0.9
"""A bucket is this share of what the largest matrix in it makes of it, at least."""
Run = tuple[tuple[Matrix, ...], int]
"""Matrices, and how many layers have them."""


class Packed(NamedTuple):
    """A buffer, with the matrices of its shards."""

    padding: float
    """Weights that are none."""
    shards: frozenset[tuple[tuple[Matrix, int], ...]]
    """Different ones: how many of each matrix."""


class Buffers(NamedTuple):
    """Of a chunk."""

    layers: Packed
    experts: Packed


def buffers_of(model: Model, layout: Layout, stage: int) -> Iterator[Buffers]:
    """Of every chunk of ``stage``; routers and position embeddings, which are small, fill what is left."""
    split = Split.of(layout)
    dense, shards = split._replace(expert=1), layout.shards(layout.replicas)
    is_cut = stage == 0 and layout.overlap_gradients and layout.schedule not in WITHOUT_OVERLAP
    least = least_bucket(layout) if is_cut else None
    projection = ((model.hidden_size / layout.tensor, 2 * model.hidden_size),)
    of_layer, of_experts = _of_layer(model, split)
    for chunk in _one_by_one(contents_of(model, layout, stage)):
        runs = (
            (_of_layer(model.dense, dense)[0], chunk.dense),
            (of_layer, chunk.layers - chunk.dense),
            ((projection, *of_layer), chunk.mtp),
        )
        experts = ((of_experts, chunk.layers - chunk.dense + chunk.mtp),)
        yield Buffers(_packed(runs, shards, least), _packed(experts, layout.shards(layout.expert_replicas), least))
        least = None


def least_bucket(layout: Layout) -> int:
    """Weights of a bucket: ``DistributedDataParallel`` in ``megatron/core/distributed``."""
    return max(40_000_000, 1_000_000 * layout.replicas)


def padding_of(model: Model, layout: Layout, stage: int) -> tuple[float, float]:
    """Weights that are none in the buffers of ``stage``: experts apart, and of experts."""
    if not (layout.optimizer.is_of_matrices and layout.distributed_optimizer):
        return 0.0, 0.0
    found = list(buffers_of(model, layout, stage))
    return sum(one.layers.padding for one in found), sum(one.experts.padding for one in found)


def longest_s(buffers: Packed, time_s: Callable[[Matrix], float]) -> float:
    """What the rank with most to do takes, where a matrix takes ``time_s``."""
    return max(sum(count * time_s(matrix) for matrix, count in shard) for shard in buffers.shards)


@lru_cache(maxsize=256)
def _of_layer(model: Model, split: Split) -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
    """Of one layer on one rank: experts apart, and those of experts."""
    found: tuple[list[Matrix], list[Matrix]] = [], []
    for matrix, count, is_of_expert in matrices(model, split):
        found[is_of_expert].extend([matrix] * round(count))
    return tuple(found[0]), tuple(found[1])


def _one_by_one(held: tuple[Contents, ...]) -> Iterator[Contents]:
    """Chunks that are counted together, each alone: dense layers come first, what predicts further tokens last."""
    for together in held:
        count, left = together.chunks, together.dense
        for chunk in range(count):
            layers = together.layers // count
            dense = min(layers, left)
            left -= dense
            yield together._replace(layers=layers, dense=dense, mtp=together.mtp * (chunk == count - 1), chunks=1)


@lru_cache(maxsize=4096)
def _packed(runs: tuple[Run, ...], shards: int, least: int | None) -> Packed:
    """Of matrices in the order of the model; without ``least``, in one bucket."""
    held = [Counter[Matrix]() for _ in range(shards)]
    padding = 0.0
    for bucket in _buckets(runs, shards, least):
        loads = [(0.0, shard) for shard in range(shards)]
        heapify(loads)
        for matrix in sorted(bucket, key=size_of, reverse=True):
            load, shard = loads[0]
            heapreplace(loads, (load + size_of(matrix), shard))
            held[shard][matrix] += 1
        longest = max(load for load, _ in loads)
        padding += sum(longest - load for load, _ in loads)
    return Packed(padding, frozenset(tuple(sorted(shard.items())) for shard in held))


def _buckets(runs: tuple[Run, ...], shards: int, least: int | None) -> Iterator[list[Matrix]]:
    """Of matrices in the order in which backwards reach them."""
    bucket: list[Matrix] = []
    total = largest = 0.0
    for of_layer, layers in reversed(runs):
        for matrix in (matrix for _ in range(layers) for matrix in reversed(of_layer)):
            bucket.append(matrix)
            total, largest = total + size_of(matrix), max(largest, size_of(matrix))
            if least is not None and total >= max(least, int(shards * largest * _LEAST_FILLED)):
                yield bucket
                bucket, total, largest = [], 0.0, 0.0
    yield bucket
