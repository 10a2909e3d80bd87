"""Whether gradients are finite, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class NotFiniteError(RuntimeError):
    """A gradient is infinite or not a number."""

    def __init__(self, batch: int, found: str) -> None:
        super().__init__(f"the gradient of batch {batch} (counted from the start of the run) {found}")
        self.batch = batch


class _Asked(NamedTuple):
    batch: int
    norms: torch.Tensor
    """On the host, once ``there``."""
    there: torch.cuda.Event | None


class FiniteCheck:
    """Asks for every batch, and has the answer when the next one asks.

    To have it at once would hold up the host until the device has done all that it was told, after every batch.
    """

    def __init__(self) -> None:
        self._asked: _Asked | None = None

    def ask(self, batch: int, gradients: Sequence[torch.Tensor]) -> None:
        """Ask for ``batch``, whose gradients are on one device, after the answer for the one before.

        Raises:
            NotFiniteError: as `answer` does.
        """
        self.answer()
        if not gradients:
            return
        # The largest: finite numbers cannot overflow in it.
        norms = torch.stack(torch._foreach_norm(list(gradients), float("inf"))).to("cpu", non_blocking=True)
        on_gpu = gradients[0].is_cuda
        self._asked = _Asked(batch, norms, torch.cuda.current_stream().record_event() if on_gpu else None)

    def answer(self) -> None:
        """For the last batch asked for.

        Raises:
            NotFiniteError: with that batch.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return
        if asked.there is not None:
            asked.there.synchronize()
        if not asked.norms.isfinite().all():
            raise NotFiniteError(asked.batch, "is not finite here")
