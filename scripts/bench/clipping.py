"""What exact clipping and overflow checks cost 2BW: the update with and without its global reductions.

    python scripts/bench/clipping.py [--stages 2 4 8] [--pairs 20] [--output scripts/bench/results/clipping.txt]

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

from cost import STAGES, cost_report
from report import heading, put
from timed_stage import Arm

from megatron_2bw.schedule.action import Reduction

ARMS = (Arm((Reduction.GRADIENTS, Reduction.NORM)), Arm((Reduction.GRADIENTS,)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = cost_report("the global norm and overflow flag", lambda _: ARMS, depths=options.stages, pairs=options.pairs)
    put([*heading(), *found], options.output)


if __name__ == "__main__":
    main()
