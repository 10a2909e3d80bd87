"""What it costs 2BW to compute half of a batch with newer weights, whose update then has to be done sooner.

    python scripts/bench/delayed_microbatches.py [--pairs 12] [--output scripts/bench/results/delayed_microbatches.txt]

Stages wait instead of computing; transfers, reductions and updates are real. With m = 2d, in one arm only the first d
microbatches of a batch (or d-1, which leaves no time to hide an update) are computed with the weights of one update
before, in the other one all of them. The same processes run blocks of either arm in turn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cost import cost_report
from report import heading, put
from timed_stage import Arm

PER_STAGE = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = [
        line
        for name, fewer in (("d", 0), ("d-1", 1))
        for line in cost_report(
            f"only {name} of m = {PER_STAGE}d microbatches delayed",
            lambda stages, fewer=fewer: (Arm(delayed_microbatches=stages - fewer), Arm()),
            per_stage=PER_STAGE,
            pairs=options.pairs,
        )
    ]
    put([*heading(), *found], options.output)


if __name__ == "__main__":
    main()
