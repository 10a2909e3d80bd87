"""Gradients of a finished batch, kept while the next one accumulates its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron_2bw.schedule.program import GradientCopy


class Region(NamedTuple):
    """A flat piece of an accumulation buffer, and what this rank needs of it for its update."""

    whole: torch.Tensor
    """What backward passes add to, all zero at the start of a batch."""
    part: torch.Tensor
    """A view of ``whole``: all of it, or the shard that this rank updates with."""

    @property
    def is_sharded(self) -> bool:
        return self.part.numel() < self.whole.numel()


class CapturedGradients:
    """What is kept of the accumulated gradients of one batch, until its update.

    Args:
        regions: of the accumulation buffers, in the precision of ``main_grad``; emptied of what is there. No
            regions where nothing is trained.
        device: where gradients are, or would be; that of the first region by default.
        second_buffer: keep a copy of every part; otherwise the gradients stay where they are, and
            the next batch must not add to them before the update.
    """

    def __init__(
        self, regions: Iterable[Region], *, device: torch.device | None = None, second_buffer: bool = True
    ) -> None:
        self.regions = tuple(regions)
        for region in self.regions:
            region.whole.zero_()
        self._has_second_buffer = second_buffer
        self.kept = tuple(torch.zeros_like(part) if second_buffer else part for _, part in self.regions)
        """One flat tensor per region, as large as its part."""
        self.device = device or self.kept[0].device
        self._pieces: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for (_, part), kept in zip(self.regions, self.kept, strict=True):
            self._pieces.setdefault(part.untyped_storage().data_ptr(), []).append((part, kept))

    @property
    def copy(self) -> GradientCopy:
        """What is kept apart, which decides what the next batch has to wait for."""
        if not self._has_second_buffer:
            return GradientCopy.NONE
        sharded = any(region.is_sharded for region in self.regions)
        return GradientCopy.SHARD if sharded else GradientCopy.WHOLE

    def capture(self) -> None:
        """Keep the regions without shards; the next batch may accumulate there, from zero."""
        self._keep(sharded=False)

    def capture_shards(self) -> None:
        """The same for regions of which this rank keeps a shard, once that shard is reduced."""
        self._keep(sharded=True)

    def release(self) -> None:
        """After the update: the next batch accumulates from zero where nothing was copied."""
        if not self._has_second_buffer:
            for region in self.regions:
                region.whole.zero_()

    def within(self, grad: torch.Tensor) -> torch.Tensor | None:
        """The captured counterpart of ``grad``, flat, as far as this rank keeps it; None for nothing of it.

        Args:
            grad: a contiguous view of an accumulation buffer.
        """
        start = grad.storage_offset()
        for part, kept in self._pieces.get(grad.untyped_storage().data_ptr(), ()):
            first = max(start - part.storage_offset(), 0)
            last = min(start + grad.numel() - part.storage_offset(), part.numel())
            if first < last:
                return kept[first:last]
        return None

    def view_of(self, grad: torch.Tensor) -> torch.Tensor:
        """The captured counterpart of ``grad``, in its shape.

        Raises:
            ValueError: this rank keeps only a part of it, or nothing.
        """
        if grad.numel() == 0:
            return grad
        captured = self.within(grad)
        if captured is None or captured.numel() != grad.numel():
            raise ValueError(f"a gradient of shape {tuple(grad.shape)} is not captured as a whole")
        return captured.view(grad.shape)

    def _keep(self, *, sharded: bool) -> None:
        if not self._has_second_buffer:
            return
        for region, kept in zip(self.regions, self.kept, strict=True):
            if region.is_sharded is sharded:
                kept.copy_(region.part)
                region.whole.zero_()
