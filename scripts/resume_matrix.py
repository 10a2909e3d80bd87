"""Stop 2BW after every batch of a run, continue it, and hold the rest against the uninterrupted run, bit for bit.

python scripts/resume_matrix.py                 # about ten minutes on two cores
python scripts/resume_matrix.py --output scripts/bench/results/resume_matrix.txt
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading, put_each

from tests.mcore.compare import differing
from tests.mcore.saved import BATCHES, CASE, save, tail
from tests.mcore.test_resume import FORMATS

SETTINGS = {
    "PP2, fp32": CASE,
    "PP2, fp16": replace(CASE, precision="fp16"),
    "PP2xDP2 distributed optimizer, fp32": replace(CASE, replicas=2, distributed_optimizer=True),
    "PP2xDP2 distributed optimizer, bf16": replace(CASE, replicas=2, distributed_optimizer=True, precision="bf16"),
}

ABOUT = f"""\
Each line: a run of {BATCHES} batches with dropout 0.1 and clipping to norm 1.0 that saves after every batch, and for
each checkpoint but the last a run that continues from it. "equal": losses, gradient norms, loss scales, skipped
updates, learning rates and final weights of the continued run are those of the uninterrupted one, to the last bit."""


def main() -> int:
    """Run the settings, print the outcome of each and write all lines to a file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the settings whose name contains this")
    parser.add_argument("--output", type=Path, help="write the report here")
    options = parser.parse_args()
    found: list[str] = []
    put_each(chain((*heading(), "", ABOUT, ""), _lines(options.only, found)), options.output)
    return 1 if found else 0


def _lines(only: str, found: list[str]) -> Iterator[str]:
    """The outcome of each setting whose name contains ``only``; all problems go to ``found``."""
    for name, format_ in product(SETTINGS, FORMATS):
        if only in f"{name}, {format_}":
            problems = _problems(name, format_)
            found += problems
            yield f"{name}, {format_}: " + ("; ".join(problems) or f"equal after each of 1..{BATCHES - 1}")


def _problems(name: str, format_: str) -> list[str]:
    """What differs, by the batch after which the run was stopped."""
    with tempfile.TemporaryDirectory() as folder:
        saved = save(SETTINGS[name], Path(folder), format_)
        problems = []
        for iteration in range(1, BATCHES):
            found, expected = saved.resumed(iteration), tail(saved.results, BATCHES - iteration)
            different = differing(found, expected) + ([] if found.rates == expected.rates else ["learning rates"])
            if different:
                problems.append(f"after batch {iteration}: {', '.join(different)}")
        return problems


if __name__ == "__main__":
    raise SystemExit(main())
