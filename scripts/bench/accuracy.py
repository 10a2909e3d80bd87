"""Numbers that say how good predictions are, and the simple predictors to compare with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_2bw.planner.cost.costs import model_flops
from tests.planner.measured import Row

Predict = Callable[[Row], float]


HEADING = f"{'':<44} {'rows':>4} {'MAPE':>7} {'median':>7} {'bias':>7} {'most':>7} {'Spearman':>9} {'regret':>7}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Of predictions for some rows; shares."""

    rows: int
    mean_error: float
    median_error: float
    bias: float
    most: float
    spearman: float
    """Over all rows."""
    regret: float
    """Most of all groups: how much slower than the best the row is that was predicted to be the best."""

    @classmethod
    def of(cls, predict: Predict, rows: Sequence[Row]) -> Accuracy:
        """Compare ``predict`` with what was measured."""
        times = {row: predict(row) for row in rows}
        errors = [times[row] / row.measured - 1 for row in rows]
        sizes = [abs(error) for error in errors]
        regrets = []
        for group in by_group(rows).values():
            chosen = min(group, key=lambda row: times[row])
            regrets.append(chosen.measured / min(row.measured for row in group) - 1)
        return cls(
            rows=len(rows),
            mean_error=statistics.mean(sizes),
            median_error=statistics.median(sizes),
            bias=statistics.mean(errors),
            most=max(sizes),
            spearman=spearman([times[row] for row in rows], [row.measured for row in rows]),
            regret=max(regrets),
        )

    def line(self, name: str) -> str:
        """One row of a table."""
        return (
            f"{name:<44} {self.rows:>4} {self.mean_error:>7.1%} {self.median_error:>7.1%} {self.bias:>+7.1%} "
            f"{self.most:>7.1%} {self.spearman:>9.3f} {self.regret:>7.1%}"
        )


def by_group(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of the same model, GPUs and batch."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks; equal values share theirs."""
    return statistics.correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def naive(rows: Sequence[Row]) -> Predict:
    """``FLOPs/(n*X) * (1 + (d-1)/m)``, X the median over ``rows``."""

    def at_one_flop(row: Row) -> float:
        layout = row.layout
        stretched = 1 + (layout.pipeline - 1) / layout.microbatches
        return model_flops(row.model, layout.global_batch) / layout.gpus * stretched

    seconds_per_flop = statistics.median(row.measured / at_one_flop(row) for row in rows)
    return lambda row: at_one_flop(row) * seconds_per_flop


def linear(rows: Sequence[Row]) -> Predict:
    """Seven constants by least squares of the relative error on ``rows``."""
    columns = np.array([features(row) for row in rows]) / [[row.measured] for row in rows]
    lengths = np.linalg.norm(columns, axis=0)
    lengths[lengths == 0] = 1.0  # A feature that none of the rows has.
    weights = np.linalg.lstsq(columns / lengths, np.ones(len(rows)))[0] / lengths
    return lambda row: float(weights @ features(row))


def features(row: Row) -> list[float]:
    """Work with bubble and without, bytes of every collective, layers passed, and one."""
    model, layout = row.model, row.layout
    m, d, t, w = layout.microbatches, layout.pipeline, layout.tensor, layout.data
    work = model_flops(model, layout.global_batch) / layout.gpus / 1e15
    layers_passed = m * model.num_layers / d
    tensor_bytes = layout.microbatch * model.seq_length * model.hidden_size / 1e9
    gradient_bytes = model.parameters / (t * d) / 1e9
    stretched = (m + d - 1) / m
    return [
        work * stretched,
        work,
        layers_passed * stretched * tensor_bytes * (t - 1) / t,
        gradient_bytes * (w - 1) / w,
        m * tensor_bytes * (d > 1),
        layers_passed * stretched / 1e3,
        1.0,
    ]
