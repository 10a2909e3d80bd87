"""Whether gradients are finite, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_2bw.runtime.host_copy import HostCopy


class NotFiniteError(RuntimeError):
    """A gradient is infinite or not a number."""

    def __init__(self, batch: int, found: str) -> None:
        super().__init__(f"the gradient of batch {batch} (counted from the start of the run) {found}")
        self.batch = batch


class FiniteCheck:
    """Asks for every batch, and has the answer when the next one asks.

    To have it at once would hold up the host until the device has done all that it was told, after every batch.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, HostCopy] | None = None
        """A batch and its norms."""

    def ask(self, batch: int, gradients: Sequence[torch.Tensor]) -> None:
        """Ask for ``batch``, whose gradients are on one device, after the answer for the one before.

        Raises:
            NotFiniteError: as `answer` does.
        """
        self.answer()
        if not gradients:
            return
        # The largest: finite numbers cannot overflow in it.
        self._asked = batch, HostCopy(torch.stack(torch._foreach_norm(list(gradients), float("inf"))))

    def answer(self) -> None:
        """For the last batch asked for.

        Raises:
            NotFiniteError: with that batch.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return
        batch, norms = asked
        if not norms.read().isfinite().all():
            raise NotFiniteError(batch, "is not finite here")
