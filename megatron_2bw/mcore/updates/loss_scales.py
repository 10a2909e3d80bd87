"""fp16's dynamic loss scaling under a delay, without a barrier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_2bw.runtime.host_copy import HostCopy
from megatron_2bw.runtime.weights import WeightVersions


class LossScales:
    """The loss scale of every weight version that lives.

    The scale of a batch is the scaler's state after the updates that its version contains, so every stage knows it
    without asking another.

    Args:
        scaler: Megatron's; None without loss scaling.
        weights: whose versions are counted.
    """

    def __init__(self, scaler: Any, weights: WeightVersions) -> None:
        self._scaler, self._weights = scaler, weights
        self.by_version: dict[int, torch.Tensor] = {}
        """Empty without loss scaling."""
        self._running: torch.Tensor | None = None
        """Of the batch whose forward or backward is running."""
        self._on_host = HostCopy(torch.ones(1))
        """That of the newest weights."""
        self.know()

    def of(self, batch: int) -> torch.Tensor | None:
        """That of ``batch``; None without loss scaling."""
        return self.by_version[max(batch - 1, self._weights.first)] if self.by_version else None

    @contextmanager
    def computing(self, batch: int) -> Iterator[None]:
        """Inside, `scaled` takes that of ``batch``."""
        self._running = self.of(batch)
        try:
            yield
        finally:
            self._running = None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the scale of the batch that is computed, or else of the weights in use."""
        return (self.by_version[self._weights.active] if self._running is None else self._running) * loss

    def know(self) -> None:
        """The scaler's state is that of the newest weights: after loading, before the first batch."""
        if self._scaler is not None:
            self.by_version[self._weights.newest] = self._present()

    def newest_on_host(self) -> torch.Tensor:
        """That of the newest weights, one element; 1 without loss scaling. Waits for their update at most."""
        return self._on_host.read()

    def updated(self) -> None:
        """The newest weights have been made, and the scaler has seen their gradients; older scales are let go of."""
        newest = self._weights.newest
        if self._scaler is not None:
            self.by_version = {newest - 1: self.by_version[newest - 1], newest: self._present()}

    def _present(self) -> torch.Tensor:
        scale = self._scaler.scale.clone()
        self._on_host = HostCopy(scale)
        return scale
