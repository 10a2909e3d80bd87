"""Which part of which weight a tensor is, and whole weights out of the parts that the ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rank's part of a weight: tensor parallelism divides one dimension, a distributed optimizer flat ranges."""

    name: str
    """In the undivided model."""
    shape: tuple[int, ...]
    """Of the weight on this tensor-parallel rank."""
    start: int = 0
    """Where the part begins in the flattened weight of this tensor-parallel rank."""
    dim: int = -1
    """The dimension that tensor parallelism divides; -1: every rank has the whole weight."""
    stride: int = 1
    """So many matrices lie behind each other along ``dim`` and are divided each (gate and up projection)."""
    tensor_rank: int = 0


def whole_shape(shard: Shard, tensor_ranks: int) -> tuple[int, ...]:
    """Shape of the undivided weight."""
    return tuple(size * tensor_ranks if dim == shard.dim else size for dim, size in enumerate(shard.shape))


def part_of(whole: torch.Tensor, shard: Shard, tensor_ranks: int) -> torch.Tensor:
    """What ``shard`` holds of the whole weight."""
    if shard.dim < 0:
        return whole
    pieces = whole.chunk(shard.stride * tensor_ranks, shard.dim)
    return torch.cat(pieces[shard.tensor_rank :: tensor_ranks], shard.dim)


def assemble(held: Iterable[Mapping[Shard, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole weights, or what has their shape, by name.

    Args:
        held: per rank, tensors of shape (n, elements of the shard).

    Returns:
        Tensors of shape (n, shape of the whole weight).

    Raises:
        RuntimeError: copies that differ between ranks, or a part that no rank has.
    """
    local: dict[Shard, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in held:
        for shard, tensor in part.items():
            _fill(local, shard, tensor)
    shards: dict[str, dict[Shard, torch.Tensor]] = {}
    for shard, (values, filled) in sorted(local.items(), key=lambda item: item[0].tensor_rank):
        if not filled.all():
            raise RuntimeError(f"no rank has all of {shard.name}")
        shards.setdefault(shard.name, {})[shard] = values.unflatten(1, shard.shape)
    return {name: _joined(parts) for name, parts in shards.items()}


def _fill(local: dict[Shard, tuple[torch.Tensor, torch.Tensor]], shard: Shard, tensor: torch.Tensor) -> None:
    key = Shard(name=shard.name, shape=shard.shape, dim=shard.dim, stride=shard.stride, tensor_rank=shard.tensor_rank)
    if key not in local:
        size = shard_size(shard)
        local[key] = torch.zeros(tensor.shape[0], size, dtype=tensor.dtype), torch.zeros(size, dtype=torch.bool)
    values, filled = local[key]
    place = slice(shard.start, shard.start + tensor.shape[1])
    known = filled[place]
    if values.shape[0] != tensor.shape[0] or not torch.equal(values[:, place][:, known], tensor[:, known]):
        raise RuntimeError(f"the copies of {shard.name} differ between ranks")
    values[:, place] = tensor
    filled[place] = True


def shard_size(shard: Shard) -> int:
    """Elements of the weight on one tensor-parallel rank."""
    return torch.Size(shard.shape).numel()


def _joined(parts: Mapping[Shard, torch.Tensor]) -> torch.Tensor:
    (shard, first), *others = parts.items()
    if shard.dim < 0:
        if not all(torch.equal(first, other) for _, other in others):
            raise RuntimeError(f"the copies of {shard.name} differ between tensor-parallel ranks")
        return first
    dim = shard.dim + 1
    pieces = [tensor.chunk(shard.stride, dim) for tensor in parts.values()]
    return torch.cat([piece for matrix in zip(*pieces, strict=True) for piece in matrix], dim)
