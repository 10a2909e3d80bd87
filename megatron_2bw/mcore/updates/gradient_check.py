"""Stops a run whose gradients are not finite: Megatron's ``--check-for-nan-in-loss-and-grad``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunMode

from megatron_2bw.runtime.finite import FiniteCheck, NotFiniteError


class GradientCheck:
    """Looks at the norms of a batch; or at this stage's gradients where there are none, and answers a batch later.

    What it finds goes to ``--result-rejected-tracker-filename``, too, as what Megatron finds before its reductions.
    """

    def __init__(self) -> None:
        self._finite = FiniteCheck()
        self._iteration_of_batch_0: int | None = None
        """None in a loop of one's own, where nobody counts for Megatron."""

    def begin(self, batch: int) -> None:
        """``batch`` is that of Megatron's present iteration."""
        machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE  # Asking for it would make one, with a warning.
        if machine is not None and machine.mode is RerunMode.DISABLED and machine.current_iteration >= 0:
            self._iteration_of_batch_0 = machine.current_iteration - batch

    def require(self, batch: int, *, norms: Sequence[float] | None, gradients: Sequence[torch.Tensor]) -> None:
        """Check ``batch`` by its norms, or else its ``gradients``.

        Raises:
            RuntimeError: they are not finite, or those of the batch before were not.
        """
        with self._rejected_as_by_megatron():
            if norms is None:
                self._finite.ask(batch, gradients)
            for norm in norms or ():
                if not math.isfinite(norm):
                    raise NotFiniteError(batch, f"has norm {norm}")

    def settle(self) -> None:
        """Answer for the last batch.

        Raises:
            RuntimeError: its gradients were not finite.
        """
        with self._rejected_as_by_megatron():
            self._finite.answer()

    @contextmanager
    def _rejected_as_by_megatron(self) -> Iterator[None]:
        try:
            yield
        except NotFiniteError as error:
            if self._iteration_of_batch_0 is not None:
                machine = rerun_state_machine.get_rerun_state_machine()
                machine.current_iteration = self._iteration_of_batch_0 + error.batch
                machine.validate_result(math.nan, math.isnan, message=str(error), fatal=True)
            raise
