"""Looks for gradients that are wrong: Megatron's ``--check-for-nan-in-loss-and-grad``, ``--check-for-large-grads``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunMode

from megatron_2bw.mcore.symbols import replace
from megatron_2bw.runtime.finite import FiniteCheck, NotFiniteError
from megatron_2bw.runtime.host_copy import HostCopy


class GradientCheck:
    """Stops a run whose gradients are not finite.

    Looks at the norms of a batch; or at this stage's gradients where there are none, and answers a batch later.

    What it finds goes to ``--result-rejected-tracker-filename``, too, as what Megatron finds before its reductions.
    """

    def __init__(self) -> None:
        self._finite = FiniteCheck()
        self._iteration_of_batch_0: int | None = None
        """None in a loop of one's own, where nobody counts for Megatron."""

    def begin(self, batch: int) -> None:
        """``batch`` is that of Megatron's present iteration.

        Raises:
            RuntimeError: as `settle` does.
        """
        machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE  # Asking for it would make one, with a warning.
        if machine is not None and machine.mode is RerunMode.DISABLED and machine.current_iteration >= 0:
            iteration_of_batch_0 = machine.current_iteration - batch
            if iteration_of_batch_0 != self._iteration_of_batch_0:  # Iterations were skipped.
                self.settle()
                self._iteration_of_batch_0 = iteration_of_batch_0

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


class LargeGradients:
    """Warns of gradients that are much larger than those before, and goes on; a batch later, as `FiniteCheck` answers.

    By bucket, of this rank alone, before anything is summed or scaled: what ``check_grads`` of Megatron's bucket groups
    looks at, in its order and with its words, for Megatron compares all of them with one largest number.

    Args:
        model: a stage, wrapped in Megatron's DistributedDataParallel.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        buckets = [bucket for group in groups for bucket in enumerate(group.buckets)]
        self._messages = [
            f"found unexpected large grads in bucket #{index} in backward pass before data-parallel communication "
            "collective"
            for index, _ in buckets
        ]
        self._gradients = [bucket.grad_data for _, bucket in buckets]
        self._asked: tuple[int, HostCopy] | None = None
        """Megatron's iteration and its norms."""

    def ask(self) -> None:
        """Ask for the batch of Megatron's present iteration, after the answer for the one before."""
        self.answer()
        if not self._gradients:
            return
        norms = torch.stack([gradients.norm() for gradients in self._gradients])
        self._asked = rerun_state_machine.get_rerun_state_machine().current_iteration, HostCopy(norms)

    def answer(self) -> None:
        """For the last batch asked for."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        iteration, norms = asked
        machine = rerun_state_machine.get_rerun_state_machine()
        is_large = functools.partial(machine.is_unexpectedly_large, threshold=10, context="grads")  # As Megatron.
        # A loop of one's own may have left it on; what it would run again is another batch.
        with replace(machine, "current_iteration", iteration), replace(machine, "mode", RerunMode.DISABLED):
            for norm, message in zip(norms.read(), self._messages, strict=True):
                machine.validate_result(norm, is_large, message, fatal=False)
