"""The experts' losses that Megatron logs, kept apart by batch.

What a forward records, or full recomputation in the backward, Megatron's tracker adds up until the
next report. Under a delay forwards of the next batch come before that report, so each batch has a
tracker of its own here. A report is a meeting of all stages; batches that Megatron does not log wait
for the next one that it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker


class MoEMetrics:
    """One of Megatron's trackers per batch in flight, until `close`.

    Args:
        logs_this_batch: whether Megatron logs the batch whose call has just ended; all ranks say the same.
    """

    def __init__(self, logs_this_batch: Callable[[], bool]) -> None:
        self._logs_this_batch = logs_this_batch
        self._in_flight: dict[int, _BatchTracker] = {}
        self._unlogged = _UnloggedBatches()
        self._of_megatron = moe_logging.get_moe_metrics_tracker()

    def use(self, batch: int) -> None:
        """From here on, what is recorded is of ``batch``."""
        if batch not in self._in_flight:
            self._in_flight[batch] = _BatchTracker(self._unlogged, self._logs_this_batch)
        moe_logging.set_moe_metrics_tracker(self._in_flight[batch])

    def end(self, batch: int) -> None:
        """Show ``batch``, which is complete, to Megatron's next report."""
        self.use(batch)
        del self._in_flight[batch]

    def close(self) -> None:
        """Give Megatron back the tracker that it had."""
        moe_logging.set_moe_metrics_tracker(self._of_megatron)


class _BatchTracker(MoEMetricsTracker):
    """What was recorded of one batch; reported once, by Megatron's ``training_log``."""

    def __init__(self, unlogged: _UnloggedBatches, is_logged: Callable[[], bool]) -> None:
        super().__init__()
        self._unlogged = unlogged
        self._is_logged = is_logged

    def report(self, *, loss_scale: float, **keywords: Any) -> str:
        """Megatron's report, or none where no log shows it."""
        if not self._is_logged():
            self._unlogged.add(self, loss_scale)
            return ""
        self._unlogged.report_totals(keywords)
        return super().report(loss_scale=loss_scale, **keywords)


class _UnloggedBatches(MoEMetricsTracker):
    """Sum over the batches since the last report, each times its ``loss_scale``, on this rank.

    Sums and means over ranks are linear: reduced once, the sum is that of what Megatron would have
    reduced batch by batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batches = 0

    def add(self, batch: MoEMetricsTracker, loss_scale: float) -> None:
        """Add one batch; a stage without experts has nothing to add, and takes part in the report."""
        self._batches += 1
        for name, entry in batch.metrics.items():
            self.ensure_initialized(name, entry.values.numel(), entry.values.device)
            total = self.metrics[name]
            total.values += entry.values * loss_scale
            total.reduce_group, total.avg_group = entry.reduce_group, entry.avg_group
            total.needs_dp_avg = entry.needs_dp_avg

    def report_totals(self, keywords: dict[str, Any]) -> None:
        """Add the sum to ``total_loss_dict``, of which a log line shows the mean, and start again.

        Args:
            keywords: Megatron's, for the report of the batch after these.
        """
        if self._batches == 0:
            return
        elsewhere = {"writer": None, "wandb_writer": None, "per_layer_logging": False}
        self.report(loss_scale=1.0, **keywords | elsewhere)
        self._batches = 0
