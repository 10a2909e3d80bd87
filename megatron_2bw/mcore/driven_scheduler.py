"""Megatron's learning-rate schedule under a delay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_2bw.mcore.optimizer import DelayedOptimizer


class DrivenScheduler:
    """Megatron's learning-rate schedule, for a training loop that must not move it.

    The loop moves it after an update that it believes to be successful; under a delay the optimizer
    does so itself. All else is the wrapped schedule's.
    """

    def __init__(self, inner: Any, optimizer: DelayedOptimizer) -> None:
        self._inner = inner
        self._optimizer = optimizer

    def step(self, increment: int) -> None:
        """Does nothing; see `DelayedOptimizer`.

        Raises:
            RuntimeError: the loop counts something else than the optimizer has counted.
        """
        if increment != self._optimizer.samples:
            raise RuntimeError(
                f"the training loop moves the learning-rate schedule by {increment}, and a batch has "
                f"{self._optimizer.samples} samples: make its warm-up and decay count samples, as Megatron's do"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)
