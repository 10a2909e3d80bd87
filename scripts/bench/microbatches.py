"""How much longer than its stages work a schedule takes for a batch, against the microbatches per stage, d = 8.

    python scripts/bench/microbatches.py [--batches 6] [--output scripts/bench/results/microbatches.txt]

Stages wait instead of computing; transfers, reductions and updates are real. ``time_to_loss.py report`` reads what
comes out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading, put
from timed_stage import BACKWARD_S, FORWARD_S, Run, measure, steady_period_s

RESULTS = Path(__file__).parent / "results" / "microbatches.txt"
STAGES, RATIOS = 8, (1, 2, 4, 8)
"""d, and m/d."""
SCHEDULES = ("1f1b-flush", "2bw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    put([*heading(), *_lines(options.batches)], options.output)


def _lines(batches: int) -> Iterator[str]:
    yield from ("", f"Timed stages, F = {FORWARD_S} s, B = {BACKWARD_S} s, {batches} batches, d = {STAGES}:")
    yield from ("time per batch over the time that a stage works", "")
    yield f"{'m/d':<12}" + "".join(f"{ratio:>8}" for ratio in RATIOS)
    for name in SCHEDULES:
        line = f"{name:<12}" + "".join(f"{_longer(name, ratio, batches):>8.3f}" for ratio in RATIOS)
        print(line, flush=True)
        yield line


def _longer(name: str, ratio: int, batches: int) -> float:
    microbatches = ratio * STAGES
    run = Run(
        schedule=name,
        stages=STAGES,
        microbatches=microbatches,
        batches=batches,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
    )
    return steady_period_s(measure(run)) / (microbatches * (FORWARD_S + BACKWARD_S))


def measured() -> dict[str, tuple[float, ...]]:
    """The numbers of RESULTS by schedule, one for each of RATIOS."""
    lines = [line.split() for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {words[0]: tuple(map(float, words[1:])) for words in lines if words and words[0] in SCHEDULES}


if __name__ == "__main__":
    main()
