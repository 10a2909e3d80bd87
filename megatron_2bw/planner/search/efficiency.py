"""Progress with gradients one step old, given or as measured: ``plan --sample-efficiency``."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.rules import delay_of
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout, Optimizer, Precision
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.registry import TWO_BW

AUTO = "auto"
_MOST = 2.0
"""More is a percentage: a delay that let a sample get twice as far was never seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of a run with gradients one step old, beside synchronous training.

    Raises:
        PlanError: an efficiency outside of (0, 2], or a share of batches outside of [0, 1) or of microbatches outside
            of (0, 1].
    """

    efficiency: float = 1.0
    """Progress per sample, over the whole run, where 1 is that of synchronous training."""
    synchronous: float = 0.0
    """Share of the batches that 2bw first trains without its delay: ``--synchronous-warmup-iters``."""
    delayed: float = 1.0
    """Share of a batch's microbatches that are delayed, at most: ``--pipeline-delayed-microbatches``."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= _MOST:
            raise PlanError(
                f"sample_efficiency {self.efficiency:g}: give a number above 0 and up to {_MOST:g}, such as 0.9"
            )
        if not 0 <= self.synchronous < 1:
            raise PlanError(
                f"synchronous_warmup_fraction {self.synchronous}: give a share from 0 to below 1, such as 0.2"
            )
        if not 0 < self.delayed <= 1:
            raise PlanError(
                f"delayed_microbatches_fraction {self.delayed}: give a share above 0 and up to 1, such as 0.5"
            )

    def loss_time_s(self, model: Model, layout: Layout, cluster: Cluster, time_s: float) -> float:
        """Time of the batches that make as much progress as one batch of synchronous training.

        pipedream, whose gradients are older than 2bw's, makes no more progress than it, and is priced with the same
        beginning, though only 2bw can begin like that.

        Args:
            model: to train.
            layout: of it.
            cluster: to train on.
            time_s: of a batch in ``layout``.
        """
        if self.synchronous and delay_of(layout):
            # What runs on the same stages before the delay begins.
            two_bw = {"extra_in_flight": 0, "delayed_microbatches": 0, "gradient_buffers": 2}
            flushed = layout.but(schedule="1f1b-flush", **two_bw, overlap_gradients=False)
            flush_s = costs.iteration(model, flushed, cluster).time_s
            time_s += self.synchronous * (flush_s - time_s)
        return self.least_loss_time_s(layout, time_s)

    def least_loss_time_s(self, layout: Layout, time_s: float) -> float:
        """The same if a flush took no longer: a bound."""
        return time_s / self.efficiency if delay_of(layout) else time_s


EXACT = Progress()
"""A delay costs nothing."""


MEASURED = (
    Progress(efficiency=0.95, delayed=0.125),
    Progress(efficiency=0.95, delayed=0.5),
    Progress(efficiency=0.9, synchronous=0.2),
    Progress(efficiency=0.8),
)
"""Of Muon, with an eighth of every batch delayed at most, with half of it, after a fifth of the batches without a
delay, and with all of it, which asks for the fewest microbatches; of equals the first is taken.

``worth`` in ``scripts/bench/results/time_to_loss.txt``, rounded down to a multiple of 0.05: an eighth in batches of 64
sequences, the others, with the lead, the lower of two models in batches of 16.
"""
_MUON = "--optimizer muon --muon-extra-scale-factor 0.2 --muon-momentum"
_LEAD = ("--delay-correction", "lead", "--delay-lead", "2")
RECOMMENDED = f"{_MUON} 0.9 --adam-beta1 0.93 {' '.join(_LEAD)}"
"""Flags to train like that, but with an eighth delayed."""
WITHOUT_LEAD = f"{_MUON} 0.8"
"""With an eighth delayed."""


def _delays_little(progress: Progress) -> bool:
    return progress.delayed <= 0.125


def correction_flags(progress: Progress, layout: Layout) -> tuple[str, ...]:
    """What one of ``MEASURED`` asks of 2bw beside ``layout``; nothing where training would refuse it."""
    leads = layout.schedule in TWO_BW and layout.optimizer is not Optimizer.LION and layout.adam_state is None
    return _LEAD if leads and not _delays_little(progress) else ()


def assumption(progress: Progress, best: Layout) -> str:
    """What one of ``MEASURED`` rests on, and whether ``best`` can be trained so."""
    few = _delays_little(progress)
    begun = " and such a beginning" if progress.synchronous else ""
    begun += f" and {'an eighth' if few else 'half'} of every batch delayed" if progress.delayed < 1 else ""
    larger = "" if few else " In batches four times as large, a delay of half or all of them cost more."
    other = ""
    if best.precision is Precision.FP16 or best.optimizer in (Optimizer.SGD, Optimizer.LION):
        theirs = "in fp16, which Muon does not work in," if best.precision is Precision.FP16 else f"of {best.optimizer}"
        other = f" Nothing was measured {theirs} and a delay may cost more there."
    if best.adam_state is not None and not few:
        other += " --use-precision-aware-optimizer takes no --delay-correction, without which a delay costs more."
    return (
        f"A sample efficiency of {progress.efficiency:g} is that of small GPTs with "
        f"{WITHOUT_LEAD if few else RECOMMENDED}{begun}, beside Muon without a delay.{larger}{other} Say yours with "
        "--sample-efficiency."
    )
