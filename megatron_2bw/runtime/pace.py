"""How far the host may be ahead of the GPU."""

from __future__ import annotations

from collections import deque

import torch

MOST = 2
"""Computations that the device may have before it when the host goes on: enough to hide the launches of one."""


class Pace:
    """Waits on the host until the GPU has few computations left.

    Tensors that are on their way stay in memory until the device is through with them, so that a host which is a whole
    batch ahead of it would need room for a batch of them. A computation waits for what its rank has issued before it,
    and for other ranks that get there, as ``validate`` has shown; a transfer may wait for what is yet to be issued.

    Args:
        device: with a CPU, nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computations: deque[torch.cuda.Event] = deque()

    def computed(self) -> None:
        """Another computation has been launched on the current stream."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._computations.append(event)
        if len(self._computations) > MOST:
            self._computations.popleft().synchronize()
