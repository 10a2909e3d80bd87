"""What exact clipping and overflow checks cost 2BW: the update with and without its global reductions.

    python scripts/bench/clipping.py [--repetitions 6] [--output scripts/bench/results/clipping.txt]

Stages wait instead of computing, so that a difference of one part in a thousand shows; everything
else is real. Both arms update once per batch. In one of them every update waits for the squared
norm and the overflow flag of all stages, summed in the background; in the other it waits for
nobody. The arms alternate; the interval is Student's t over the repetitions.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading
from timed_stage import Run, measure, steady_period_s

from megatron_2bw.schedule.action import Reduction

FORWARD_S, BACKWARD_S = 0.02, 0.04
BATCHES = 32
STAGES = (2, 4, 8)
QUANTILES = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Of Student's t at 97.5%, by degrees of freedom."""
ARMS = ((Reduction.GRADIENTS, Reduction.NORM), (Reduction.GRADIENTS,))


def extra_shares(stages: int, repetitions: int) -> list[float]:
    """By what share of its time a batch is longer with the global reductions, per repetition."""
    shares = []
    for repetition in range(repetitions):
        seconds = {}
        for reductions in ARMS if repetition % 2 == 0 else reversed(ARMS):
            run = Run(
                schedule="2bw",
                stages=stages,
                microbatches=stages,
                batches=BATCHES,
                forward_s=FORWARD_S,
                backward_s=BACKWARD_S,
                reductions=reductions,
            )
            seconds[reductions] = steady_period_s(measure(run), stages)
        with_norm, without = (seconds[reductions] for reductions in ARMS)
        shares.append(with_norm / without - 1)
        print(f"d = m = {stages}: {1000 * without:.2f} ms, {1000 * with_norm:.2f} ms with clipping", flush=True)
    return shares


def report(repetitions: int) -> list[str]:
    """A line per depth."""
    lines = [
        *heading(),
        "",
        f"2bw with timed stages, F = {FORWARD_S} s, B = {BACKWARD_S} s, {BATCHES} batches: time per batch with the",
        "global norm and overflow flag over time without, minus 1",
        "",
        f"{'d = m':>5} {'mean':>8} {'95% interval':>20}",
    ]
    for stages in STAGES:
        shares = extra_shares(stages, repetitions)
        mean = statistics.fmean(shares)
        half = QUANTILES[repetitions - 1] * statistics.stdev(shares) / math.sqrt(repetitions)
        lines.append(f"{stages:>5} {mean:>8.2%} {f'{mean - half:.2%} to {mean + half:.2%}':>20}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=6, choices=range(3, 11))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = "\n".join([*report(options.repetitions), ""])
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
