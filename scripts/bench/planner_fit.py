"""Fit the constants of the planner's cost model on the development rows.

    python scripts/bench/planner_fit.py

Development rows: the layer times of Korthikanti et al., Table 4; vTrain's 18.4B model; vTrain's single-node rows on 8
GPUs. Minimised is the sum over the three sets of the mean of ``|log(predicted/measured)|``, one constant at a time, in
steps that shrink from 10% to 1%. The constants in ``planner/cost/speeds.py`` are the result with two digits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from planner_accuracy import fitted_rows

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.speeds import A100, Speed, machine_of
from tests.planner import measured
from tests.planner.measured import Row

MOST = {"gemm_efficiency": 0.87, "hbm_efficiency": 0.95, "nvlink_efficiency": 0.90, "network_efficiency": 0.95}
"""What nothing reaches: of the peak, the largest product measured on A100."""


class Development:
    """The rows, and how far a set of constants is from them."""

    def __init__(self) -> None:
        self._layers = list(measured.layer_times())
        self._sets = [fitted_rows(which) for which in ("multi_node", "single_node")]

    def error(self, speed: Speed) -> float:
        """The sum of the mean errors."""
        return statistics.mean(self._layer_errors(speed)) + sum(_mean_error(rows, speed) for rows in self._sets)

    def _layer_errors(self, speed: Speed) -> Iterable[float]:
        machine = machine_of(measured.a100s(8, measured.SELENE_GBIT_S), speed)
        for _, split, forward_s, backward_s in self._layers:
            layer = works_of(measured.LAYER_22B, split, machine).layer
            yield abs(math.log(layer.forward_s / forward_s))
            yield abs(math.log((layer.backward_s + layer.again_s) / backward_s))


def _mean_error(rows: list[Row], speed: Speed) -> float:
    times = ((costs.iteration(row.model, row.layout, row.cluster, speed).time_s, row.measured) for row in rows)
    return statistics.mean(abs(math.log(predicted / true)) for predicted, true in times)


def fit(development: Development, speed: Speed) -> tuple[float, Speed]:
    """Error and constants at the end of the descent."""
    best, step = development.error(speed), 0.10
    while step >= 0.01:
        improved = False
        for name in (field.name for field in fields(Speed)):
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(speed, name) * factor
                if value > MOST.get(name, math.inf):
                    continue
                tried = replace(speed, **{name: value})
                error = development.error(tried)
                if error < best - 1e-6:
                    best, speed, improved = error, tried, True
        if not improved:
            step /= 2
    return best, speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    development = Development()
    print(f"as they are: {development.error(A100):.4f}")
    error, speed = fit(development, A100)
    print(f"fitted:      {error:.4f}")
    for field in fields(Speed):
        print(f"    {field.name} = {getattr(speed, field.name):.3g}")


if __name__ == "__main__":
    main()
