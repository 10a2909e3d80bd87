"""Run 2BW in every cell of the matrix, and with many models and modes, and hold it against the oracle.

python scripts/oracle_matrix.py                         # everything; about half an hour on two cores
python scripts/oracle_matrix.py --only "PP2xTP2, bf16"
python scripts/oracle_matrix.py --drawn 100 --seed 7   # combinations of features, drawn at random
python scripts/oracle_matrix.py --output scripts/bench/results/oracle_matrix.txt
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading, put_each

from tests.mcore import matrix
from tests.mcore.case import Case
from tests.mcore.compare import FLOOR, Deviation, deviation
from tests.mcore.drawn import drawn, words
from tests.mcore.features import EXACT, MORE
from tests.mcore.harness import run
from tests.mcore.oracle import oracle

ABOUT = f"""\
Each line: a run under --pipeline-schedule 2bw, of 12 batches clipped to norm 1.0 where nothing else is said, beside the
oracle of delay-1 training in the same precision (tests/mcore/oracle.py; one process, or as many as tensor and context
parallelism have), which clips by the run's norms. "equal": losses, loss scales, skipped updates, the gradient of
every weight in every update, final weights and main weights are equal to the last bit; so are learning rates. norm:
largest relative difference between a batch's global norm and the one that the oracle computes itself, limit
{FLOOR:.1e}. clipped: share of updates that clipping changed."""
ABOUT_RANKS = """
Tensor parallelism adds up in another order than one process: the lines below such a setting give how far the run is
from the one-process oracle (losses, norms, final weights, gradients), and how far Megatron's own training is, in the
same setting, without a delay."""
ABOUT_DRAWN = """
The line below says what was drawn: fields of the tests' Case that are not their defaults (no clipping, 20 batches)."""


def main() -> int:
    """Run the settings, print the outcome of each and write all lines to a file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the settings whose name contains this")
    parser.add_argument("--output", type=Path, help="write the report here")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="run so many settings drawn at random instead"
    )
    parser.add_argument("--seed", default="0", help="of these; the same ones for the same seed")
    options = parser.parse_args()
    settings = [(str(cell), cell.case()) for cell in matrix.ALL]
    settings += [(name, replace(case, layers=4)) for name, case in (EXACT | MORE).items()]
    if options.drawn:
        settings = [(f"drawn {options.seed}-{i}", drawn(f"{options.seed}-{i}")) for i in range(options.drawn)]
    chosen = [(name, case) for name, case in settings if options.only in name]
    about = (*heading(), "", ABOUT, ABOUT_DRAWN if options.drawn else ABOUT_RANKS, "")
    failed: list[str] = []
    put_each(chain(about, _lines(chosen, _words if options.drawn else _one_process, failed)), options.output)
    return 1 if failed or not chosen else 0


def _lines(chosen: list[tuple[str, Case]], more: Callable[[Case], Iterator[str]], failed: list[str]) -> Iterator[str]:
    """The outcome of each setting; the names of those that are not equal go to ``failed``."""
    for _, together in groupby(chosen, key=lambda setting: replace(setting[1], recompute="no", tied=True)):
        for name, case in together:
            problems, report = _report(name, case, more)
            failed += [name] * bool(problems)
            yield from report
        matrix.forget()  # Only settings of one group share oracles; all their gradients would fill the memory.
    yield from ("", f"{len(chosen)} settings, {len(chosen) - len(failed)} equal to the oracle, {len(failed)} not")


def _report(name: str, case: Case, more: Callable[[Case], Iterator[str]]) -> tuple[list[str], list[str]]:
    """What is wrong, and the lines to print."""
    start_s = time.monotonic()
    comparison = matrix.compared(case)
    problems = comparison.problems()
    verdict = "NOT equal" if problems else "equal"
    seconds = time.monotonic() - start_s
    line = f"{name:<66} {verdict:<10} norm {comparison.norms:.1e}  clipped {comparison.clipped:.0%}  {seconds:3.0f} s"
    return problems, [line, *(f"    {problem}" for problem in problems), *more(case)]


def _words(case: Case) -> Iterator[str]:
    yield f"    {words(case)}"


def _one_process(case: Case) -> Iterator[str]:
    if case.tensor_parallel == 1:
        return
    alone = replace(case, tensor_parallel=1, sequence_parallel=False)
    yield f"    from one process  {_text(deviation(run(case), oracle(alone, delay=1)))}"
    yield f"    Megatron          {_text(deviation(oracle(case, delay=0), oracle(alone, delay=0)))}"


def _text(apart: Deviation) -> str:
    return "  ".join(f"{name} {value:.1e}" for name, value in apart._asdict().items())


if __name__ == "__main__":
    sys.exit(main())
