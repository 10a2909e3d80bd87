"""What exact clipping and overflow checks cost 2BW: the update with and without its global reductions.

    python scripts/bench/clipping.py [--pairs 20] [--output scripts/bench/results/clipping.txt]

Stages wait instead of computing, so that a difference of one part in a thousand shows; everything
else is real. Both arms update once per batch. In one of them every update waits for the squared
norm and the overflow flag of all stages, summed in the background; in the other it waits for
nobody. The same processes run blocks of either arm in turn, and neighbouring blocks are compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from interval import COST_HEADING, cost_line
from report import heading
from timed_stage import Arm, Run, block_periods_s, measure

from megatron_2bw.schedule.action import Reduction

FORWARD_S, BACKWARD_S = 0.05, 0.1
"""As in ``schedules.py``."""
BATCHES = 8
STAGES = (2, 4, 8)
ARMS = (Arm((Reduction.GRADIENTS, Reduction.NORM)), Arm((Reduction.GRADIENTS,)))


def report(pairs: int) -> list[str]:
    """A line per depth."""
    lines = [
        *heading(),
        "",
        f"2bw with timed stages, F = {FORWARD_S} s, B = {BACKWARD_S} s, {pairs} pairs of blocks of {BATCHES} batches:",
        "time per batch with the global norm and overflow flag over time without, minus 1",
        "",
        COST_HEADING,
    ]
    for stages in STAGES:
        run = Run(
            schedule="2bw",
            stages=stages,
            microbatches=stages,
            batches=BATCHES,
            forward_s=FORWARD_S,
            backward_s=BACKWARD_S,
            arms=ARMS,
            blocks=2 * pairs,
        )
        periods_s = block_periods_s(measure(run), run)
        lines.append(cost_line(stages, with_=periods_s[::2], without=periods_s[1::2]))
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = "\n".join([*report(options.pairs), ""])
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
