"""Megatron's learning-rate schedule under a delay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DrivenScheduler:
    """Megatron's learning-rate schedule, for a training loop that must not move it.

    The loop moves it after an update that it believes to be successful; under a delay the optimizer
    does so itself. All else is the wrapped schedule's.

    Args:
        inner: Megatron's schedule.
        samples_of_batch: by how much the optimizer moves it for the newest batch; None where it no longer does.
    """

    def __init__(self, inner: Any, samples_of_batch: Callable[[], int | None]) -> None:
        self.inner = inner
        self._samples_of_batch = samples_of_batch

    def step(self, increment: int) -> None:
        """Does nothing, as the optimizer has done it, until the pipeline is closed.

        Raises:
            RuntimeError: the loop counts something else than the optimizer has counted.
        """
        samples = self._samples_of_batch()
        if samples is None:
            self.inner.step(increment=increment)
            return
        if increment != samples:
            raise RuntimeError(
                f"the training loop moves the learning-rate schedule by {increment}, and a batch has "
                f"{samples} samples: make its warm-up and decay count samples, as Megatron's do"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)
