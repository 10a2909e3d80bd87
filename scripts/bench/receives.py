"""What late receives cost: batches in two orders of receives, simulated.

    python scripts/bench/receives.py [--output scripts/bench/results/receives.txt]

A transfer begins when both sides have issued it, each behind what its rank has issued before, as over NCCL. Batches are
those of an endless run. A transfer takes the given share of a microbatch's forward and backward on one stage;
a backward takes twice a forward. "slow" has one stage, in the middle, that takes 15% longer than the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading, put

from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.engine import Model
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import steady_state

SIZES = ((2, 4), (4, 4), (4, 8), (8, 8), (8, 16))
SHARES = (Fraction(1, 100), Fraction(3, 100), Fraction(10, 100))
SCHEDULES = (("2bw", 0), ("2bw", 1), ("1f1b-flush", 0), ("gems", 0), ("chimera", 0), ("mixpipe", 0))
"""With so many more activations in flight."""
SLOWER = Fraction(115, 100)


def ratios(early: Schedule) -> Iterator[Fraction]:
    """Of the times of a batch with late receives and without, in the order of columns."""
    for slowest in (Fraction(1), SLOWER):
        forward_s = tuple(slowest if stage == early.stages // 2 else Fraction(1) for stage in range(early.stages))
        for share in SHARES:
            durations = Durations(forward_s=forward_s, backward_s=tuple(2 * s for s in forward_s), send_s=3 * share)
            late_s, early_s = (
                steady_state(replace(early, late_receives=late), durations, model=Model.POSTED).period_s
                for late in (True, False)
            )
            yield late_s / early_s


def report() -> Iterator[str]:
    """A row for each schedule and size."""
    columns = [f"{kind} {float(share):.0%}" for kind in ("even", "slow") for share in SHARES]
    yield "Time of a batch with late receives over that without. A transfer takes a share of a microbatch's forward and"
    yield f"backward, named by the column; slow: the stage in the middle takes {SLOWER - 1:.0%} longer than the others."
    yield ""
    yield f"{'':32}" + "".join(f"{column:>10}" for column in columns)
    for name, extra in SCHEDULES:
        for stages, microbatches in SIZES:
            if microbatches < (1 + extra) * (stages - 1):
                continue
            options = {"extra_in_flight": extra} if extra else {}
            early = lower(build(name, stages=stages, microbatches=microbatches, **options), (Reduction.GRADIENTS,))
            row = f"{name}, d={stages}, m={microbatches}" + f", {extra} more in flight" * bool(extra)
            yield f"{row:32}" + "".join(f"{float(ratio):>10.3f}" for ratio in ratios(early))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    put([*heading(), "", *report()], options.output)


if __name__ == "__main__":
    main()
