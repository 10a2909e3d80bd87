"""Collectives of parts of different sizes, which gloo does not have: of parts filled up to the largest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def gathered(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's ``_gather_along_first_dim``, from ranks with any numbers of rows."""

    @functools.wraps(gather)
    def wrapper(
        input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Sequence[int] | None = None, *rest: Any
    ) -> torch.Tensor:
        sizes = output_split_sizes
        if sizes is None or group.size() == 1:
            return gather(input_, group, sizes, *rest)
        if not max(sizes):
            return input_
        parts = gather(_filled(input_, max(sizes)), group).split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return wrapper


def scattered(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's ``_reduce_scatter_along_first_dim``, to ranks that get any numbers of rows."""

    @functools.wraps(scatter)
    def wrapper(
        input_: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Sequence[int] | None = None, *rest: Any
    ) -> torch.Tensor:
        sizes = input_split_sizes
        if sizes is None or group.size() == 1:
            return scatter(input_, group, sizes, *rest)
        if not max(sizes):
            return input_
        parts = [_filled(part, max(sizes)) for part in input_.split(list(sizes))]
        return scatter(torch.cat(parts), group)[: sizes[group.rank()]]

    return wrapper


def _filled(part: torch.Tensor, rows: int) -> torch.Tensor:
    """With zeros behind it."""
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
