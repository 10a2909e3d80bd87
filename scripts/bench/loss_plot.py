"""Pictures of what time_to_loss.py has tried."""

from __future__ import annotations

import statistics
from pathlib import Path

from language_models import Size
from loss_report import gaps_of, half_interval, times_to_loss
from loss_trials import ARMS, SIZES, Trials
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter
from microbatches import RATIOS, STAGES

BAR = 0.02
"""Gap to training without a delay that is to be kept: nats."""


def plot(trials: Trials, path: Path) -> None:
    """A row for every size: the gap of every arm with its interval, and the time to a loss against m/d."""
    sizes = [(name, size) for name, size in SIZES.items() if any(gaps_of(trials, arm, size) for arm in ARMS)]
    figure = Figure(figsize=(12, 4.2 * len(sizes)), layout="constrained")
    for (name, size), (left, right) in zip(sizes, figure.subplots(len(sizes), 2, squeeze=False), strict=True):
        _gaps(left, trials, size)
        left.set_title(
            f"{name.split()[0]} parameters, {size.kind} on {size.corpus}, batches of {size.batch}", loc="left"
        )
        _times(right, trials, size)
    figure.savefig(path, metadata={"Date": None})


def _gaps(axes: Axes, trials: Trials, size: Size) -> None:
    found = {arm.name: gaps_of(trials, arm, size) for arm in ARMS if not arm.is_baseline}
    found = {name: gaps for name, gaps in found.items() if gaps}
    means, halves = ([of(gaps) for gaps in found.values()] for of in (statistics.mean, half_interval))
    axes.errorbar(means, range(len(found)), xerr=halves, fmt="o", capsize=4)
    axes.axvline(0, color="0.6", linewidth=1)
    axes.axvline(BAR, color="0.6", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("loss above that without a delay, nats per byte, and its 95% interval")


def _times(axes: Axes, trials: Trials, size: Size) -> None:
    for name, times in times_to_loss(trials, size).items():
        shown = [(ratio, t.ratio) for ratio, t in zip(RATIOS, times, strict=True) if t is not None and not t.is_bound]
        if shown:
            axes.plot(
                *zip(*shown, strict=True), marker="o", linestyle="-" if name.startswith("2bw") else "--", label=name
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel(f"microbatches per stage, m/d (d = {STAGES})")
    axes.set_ylabel("time to the loss, without idling 100%")
    axes.legend(fontsize="small")
