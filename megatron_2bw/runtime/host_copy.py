"""What the host wants to know of a device, without holding up either."""

from __future__ import annotations

import torch


class HostCopy:
    """A tensor on its way to the host, behind all that its stream was told so far.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._there = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def read(self) -> torch.Tensor:
        """On the host; waits until it is there."""
        if self._there is not None:
            self._there.synchronize()
        return self._tensor
