"""Tables of what time_to_loss.py has tried."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import NamedTuple

from delayed_training import Trial
from language_models import Size
from loss_trials import ARMS, CHOOSING, FINALISTS, SEEDS, SIZES, WARMUP, Arm, Trials, batches_of, decay_of
from microbatches import RATIOS, STAGES, measured

T_95 = {6: 2.571, 24: 2.069}
"""Student's t for a two-sided 95%, by the number of seeds."""
CHUNKS = 4
"""Of the interleaved schedule whose time to a loss is compared with others'."""
_WIDTH = 36
"""Of the names of arms."""
_NOTES = (
    "grid: tried with one seed; finalists: the best three of that, with three seeds, which choose the best. best:",
    "learning rate, decay of the first moment, and warm-up if it is not a tenth; (edge): at the edge of what was",
    "tried. loss: on validation data, in nats per byte, of other seeds, and 95%: half of Student's interval. gap: that",
    "minus the loss of the same optimizer without a delay, seed by seed; closed: share of the gap of the delay as it",
    "is. worth: share of the batches after which training without a delay, its warm-up as much shorter, ends with that",
    "gap, and with the upper end of its interval. Time to loss: batches until the loss of the same optimizer without a",
    "delay, one over what the loss is worth, each as long as it takes on timed stages (microbatches.txt), interleaved",
    "as long as its bubble makes it in theory, over the time that the stages work. The rate falls from the first batch",
    "on, so that a long warm-up also makes it smaller. Seeds share the validation data: the intervals are those",
    "of training. Rows that belong to no grid any more stay in the file, and nothing above counts them.",
)


def report(trials: Trials) -> list[str]:
    """Tables for every size of which something has been tried."""
    lines: list[str] = []
    for name, size in SIZES.items():
        arms = [arm for arm in ARMS if size in arm.sizes]
        arms = [arm for arm in arms if any(trials.loss(trial) is not None for trial in arm.grid(size))]
        if not arms:
            continue
        tokens = size.steps * size.batch * size.sequence
        lines += [
            "",
            f"{name.split()[0]} parameters, {size.kind}, {size.layers} layers of {size.hidden}, {size.steps} batches "
            f"of {size.batch} x {size.sequence} bytes ({tokens / 1e6:.1f}M) of {size.corpus}, clipping at 1",
            f"{'':<{_WIDTH}} {'grid':>5} {'finalists':>9} {'best':<31} {'loss':>6} {'95%':>6} {'gap':>6} {'95%':>6} "
            f"{'closed':>6} {'worth':>6} {'at least':>8}  of each seed",
        ]
        lines += [_line(trials, arm, size) for arm in arms]
        lines += [_resized(trials, arm, trial, size) for arm in arms for trial in trials.resized(arm, size)]
        lines += ["", *_by_rate(trials, arms, size), "", *_by_depth(trials, size), *_fine_tuned(trials, size)]
    return [*lines, "", *_NOTES]


def _line(trials: Trials, arm: Arm, size: Size) -> str:
    best = trials.best(arm, size)
    done = sum(trials.loss(trial) is not None for trial in trials.tried(arm, size))
    finalists = sum(len(trials.chose(trial)) == len(CHOOSING) for trial in trials.finalists(arm, size))
    counts = f"{arm.name:<{_WIDTH}} {f'{done}/{trials.planned(arm, size)}':>5} {f'{finalists}/{FINALISTS}':>9}"
    losses = trials.losses(best)
    if not losses:
        return counts
    edge = " (edge)" if trials.is_at_edge(arm, best) else ""
    warmup = f", {best.warmup}" if best.warmup != batches_of(WARMUP, size) else ""
    settings = f"lr {best.lr:g}, decay {decay_of(best):g}{warmup}{edge}"
    return f"{counts} {settings:<31} {_interval(losses)} {_gap(trials, arm, size)}  {_seeds(losses)}"


def _resized(trials: Trials, arm: Arm, trial: Trial, size: Size) -> str:
    losses, gaps = trials.losses(trial), _gaps_of(trials, trial, arm, size)
    name = _resized_name(arm, trial, size)
    return f"{name:<{_WIDTH + 48}} {_interval(losses)} {_interval(gaps)} {'':>22}  {_seeds(losses)}" if gaps else name


def _resized_name(arm: Arm, trial: Trial, size: Size) -> str:
    return f"{arm.name}, {trial.size.steps / size.steps:.0%} of the batches"


def _seeds(losses: list[float]) -> str:
    more = f" and of {len(losses) - len(SEEDS)} more" if len(losses) > len(SEEDS) else ""
    return " ".join(f"{loss:.3f}" for loss in losses[: len(SEEDS)]) + more


def _interval(values: list[float]) -> str:
    return f"{statistics.mean(values):>6.3f} {half_interval(values):>6.3f}"


def half_interval(values: list[float]) -> float:
    """Half of the mean's 95% interval."""
    if not all(map(math.isfinite, values)):  # Some seed has diverged.
        return math.inf
    return T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def baseline_of(arm: Arm) -> Arm:
    """The same optimizer without a delay."""
    (baseline,) = (other for other in ARMS if other.name == arm.baseline)
    return baseline


def _gap(trials: Trials, arm: Arm, size: Size) -> str:
    """To the baseline, how much of the plain delay's it leaves, and what the arm's batches are worth."""
    gaps = gaps_of(trials, arm, size)
    if arm.is_baseline or not gaps:
        return f"{'':>36}"
    closed = ""
    for plain in ARMS:
        whole = gaps_of(trials, plain, size)
        is_plain = plain.delay and (plain.correction, plain.delayed, plain.synchronous) == ("none", 1, 0)
        if is_plain and plain.baseline == arm.baseline and arm is not plain and whole:
            closed = f"{1 - statistics.mean(gaps) / statistics.mean(whole):.0%}"
    mean = statistics.mean(gaps)
    worth, least = (_share(worth_of(trials, arm, size, gap)) for gap in (mean, mean + half_interval(gaps)))
    return f"{_interval(gaps)} {closed:>6} {worth:>6} {least:>8}"


def gaps_of(trials: Trials, arm: Arm, size: Size) -> list[float]:
    """Losses of its best minus those of the baseline, for every seed of both; none while some are missing."""
    return _gaps_of(trials, trials.best(arm, size), arm, size)


def _gaps_of(trials: Trials, trial: Trial | None, arm: Arm, size: Size) -> list[float]:
    without = trials.losses(trials.best(baseline_of(arm), size))
    return [loss - other for loss, other in zip(trials.losses(trial), without, strict=False)]


def worth_of(trials: Trials, arm: Arm, size: Size, gap: float) -> float | None:
    """Share of the batches after which the arm's baseline is ``gap`` above its end: between the cuts, on a line.

    At most 1; minus the share of the last cut if even that is better; None while there are no cuts.
    """
    baseline = baseline_of(arm)
    of_cuts = [
        (cut.size.steps / size.steps, _gaps_of(trials, cut, arm, size)) for cut in trials.resized(baseline, size)
    ]
    known = [(1.0, 0.0), *((share, statistics.mean(gaps)) for share, gaps in of_cuts if gaps)]
    if len(known) == 1:
        return None
    if gap <= 0:
        return 1.0
    for (more, lower), (fewer, higher) in itertools.pairwise(known):
        if lower < gap <= higher:
            return more - (more - fewer) * (gap - lower) / (higher - lower)
    return -known[-1][0]


def _share(worth: float | None) -> str:
    if worth is None:
        return ""
    return ">=100%" if worth == 1 else f"{worth:.0%}" if worth > 0 else f"<{-worth:.0%}"


def _fine_tuned(trials: Trials, size: Size) -> list[str]:
    """Accuracy on the task that BERT is fine-tuned on, with the control of fewer batches without a delay."""
    rows = []
    for arm in ARMS:
        best = trials.best(arm, size)
        resized = [(_resized_name(arm, trial, size), trial) for trial in trials.resized(arm, size)]
        for name, trial in [(arm.name, best), *resized]:
            found = trials.accuracies(trial)
            if found:
                rows.append(f"{name:<50} {_interval(found)}  {_seeds(found)}")
    return ["", f"{'fine-tuned: told right':<50} {'mean':>6} {'95%':>6}  of each seed", *rows] if rows else []


def _by_rate(trials: Trials, arms: list[Arm], size: Size) -> list[str]:
    """The best over decays for every learning rate, first seed."""
    rates = sorted({lr for arm in arms for lr in arm.rates_on(size)})
    lines = [f"{'lr':<{_WIDTH}}" + "".join(f"{lr:>8g}" for lr in rates)]
    for arm in arms:
        losses = [[trials.loss(t) for t in arm.grid(size) if t.lr == lr] for lr in rates]
        cells = [min((loss for loss in of_rate if loss is not None), default=None) for of_rate in losses]
        lines.append(f"{arm.name:<{_WIDTH}}" + "".join(f"{'' if cell is None else f'{cell:.3f}':>8}" for cell in cells))
    return lines


def _by_depth(trials: Trials, size: Size) -> list[str]:
    lines = [f"{f'time to loss, d = {STAGES}, m/d':<{_WIDTH + 5}}" + "".join(f"{ratio:>7}" for ratio in RATIOS)]
    for name, times in times_to_loss(trials, size).items():
        cells = ("" if t is None else f"{'>' if t.is_bound else ''}{t.ratio:.2f}" for t in times)
        lines.append(f"{name:<{_WIDTH + 5}}" + "".join(f"{cell:>7}" for cell in cells))
    return lines


class Time(NamedTuple):
    """To a loss."""

    ratio: float
    """To the time that the stages work until training without a delay has it."""
    is_bound: bool = False
    """Whether it is longer than that."""


def times_to_loss(trials: Trials, size: Size) -> dict[str, list[Time | None]]:
    """Until the loss of training without a delay, with the measured time of a batch: one per ratio m/d.

    That of the interleaved schedule has the bubble of theory. None where a batch has not enough microbatches.
    """
    longer = measured()
    flush, without = longer["1f1b-flush"], longer["2bw"]
    rows: dict[str, list[Time | None]] = {
        "1F1B": [Time(times) for times in flush],
        f"interleaved, {CHUNKS} chunks": [Time(1 + (STAGES - 1) / (STAGES * ratio * CHUNKS)) for ratio in RATIOS],
    }
    for arm in (arm for arm in ARMS if arm.delay):
        gaps = gaps_of(trials, arm, size)
        worth = worth_of(trials, arm, size, statistics.mean(gaps)) if gaps else None
        if worth is not None:
            rows[f"2bw, {arm.name}"] = [
                Time((delayed + arm.synchronous * (flushed - delayed)) / abs(worth), is_bound=worth < 0)
                if ratio * arm.delayed >= 1
                else None
                for flushed, delayed, ratio in zip(flush, without, RATIOS, strict=True)
            ]
    return rows
