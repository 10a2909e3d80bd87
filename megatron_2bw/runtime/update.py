"""The update of a finished batch, pending until its reductions are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from megatron_2bw.runtime.background import Background
from megatron_2bw.runtime.gradients import CapturedGradients
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.timeline import REDUCTIONS


class PendingUpdate:
    """At most one batch between its last backward and its update.

    ``reduce_start`` captures the gradients and queues the links of the chain in the background;
    ``apply`` waits for them and opens the weights. Every action names its batch, so that the same
    Program works after an update was done early (before evaluation, say): what is done is not done
    again.

    Args:
        weights: the versions to update.
        captured: where the gradients of the batch are kept.
        links: for each reduction, a blocking function; on a GPU, those of the gradients only enqueue work there.
        timeout_s: how long to wait for one of them; None for as long as it takes.
    """

    def __init__(
        self,
        weights: WeightVersions,
        captured: CapturedGradients,
        links: Mapping[Reduction, Callable[[], object]],
        timeout_s: float | None = None,
    ) -> None:
        self.weights = weights
        self.captured = captured
        self.batch: int | None = None
        """The batch that is pending; None when there is none."""
        self.recorder: Recorder | None = None
        """Told when each link ran."""
        self._links = links
        self._chain: dict[Reduction, Future] = {}
        self._background = Background(captured.device, "2bw reductions", timeout_s)

    def reduce_start(self, action: Action) -> None:
        """Queue one link; the first link also captures the gradients.

        Raises:
            RuntimeError: another batch is still pending, whose gradients this would overwrite.
        """
        if action.reduction is Reduction.GRADIENTS:
            if self.batch is not None:
                raise RuntimeError(
                    f"batch {action.batch} cannot be captured: the update of batch {self.batch} is pending"
                )
            self.captured.capture()
            self.batch = action.batch
        link = self._links[action.reduction]
        if self.recorder is not None:
            link = self.recorder.timed(REDUCTIONS, action, link)
        run = self._background.submit if action.reduction is Reduction.NORM else self._background.enqueue
        self._chain[action.reduction] = run(link)

    def reduce_wait(self, action: Action) -> None:
        """Block until the link is complete; at once for a batch that is done."""
        if action.batch == self.batch:
            self._background.result(self._chain[action.reduction])

    def run_beside(self, function: Callable[[], object]) -> None:
        """Run ``function`` as the norm is, and wait for it; between batches."""
        self._background.result(self._background.submit(function))

    def close(self) -> None:
        """Nothing will be reduced any more."""
        self._background.close()

    @contextmanager
    def apply(self) -> Iterator[Mapping[Reduction, object]]:
        """Wait for the chain; inside, the weights are those of the update, ready to be changed.

        Yields:
            what the links returned.
        """
        results = {reduction: self._background.result(future) for reduction, future in self._chain.items()}
        with self.weights.update():
            yield results
        self.captured.release()
        self._chain.clear()
        self.batch = None
