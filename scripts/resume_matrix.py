"""Stop 2BW after every batch of a run, continue it, and hold the rest against the uninterrupted run, bit for bit.

python scripts/resume_matrix.py                 # about ten minutes on two cores
python scripts/resume_matrix.py --drawn 60 --seed 7   # combinations of features, drawn at random, each stopped twice
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

from tests.mcore.case import Case
from tests.mcore.compare import differing
from tests.mcore.drawn import Stopped, stopped, words
from tests.mcore.harness import Results, refusal_in, run
from tests.mcore.saved import BATCHES, CASE, FORMATS, TRACKER, rest, resume, save, saving

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
ABOUT_DRAWN = """\
Each line: a run that saves after every batch, one that continues it from a batch drawn at random and saves, too, and
one that continues that, from a later batch. "equal": losses, gradient norms, loss scales, skipped updates, learning
rates and final weights of both are those of the uninterrupted run, to the last bit. "refused": Megatron cannot save or
load what was drawn. The line below says what that was: fields of the tests' Case that are not their defaults."""


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
    found: list[str] = []
    lines, about = _lines(options.only, found), ABOUT
    if options.drawn:
        seeds = [f"{options.seed}-{i}" for i in range(options.drawn)]
        lines, about = _drawn([seed for seed in seeds if options.only in f"drawn {seed}"], found), ABOUT_DRAWN
    put_each(chain((*heading(), "", about, ""), lines), options.output)
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
            problems += _different(saved.resumed(iteration), saved.results, SETTINGS[name], iteration)
        return problems


def _drawn(seeds: list[str], found: list[str]) -> Iterator[str]:
    """The outcome of each setting and what it is; all problems go to ``found``."""
    equal = 0
    for seed in seeds:
        setting = stopped(seed)
        try:
            problems = _problems_of(setting)
        except RuntimeError as error:
            if (refusal := refusal_in(error)) is None:
                raise
            problems, verdict = [], f"refused: {refusal}"
        else:
            equal += not problems
            verdict = "; ".join(problems) or "equal"
        found += problems
        yield f"drawn {seed}, {setting.format}, stopped after {setting.after[0]} and {setting.after[1]}: {verdict}"
        yield f"    {words(replace(setting.case, record_gradients=True))} {' '.join(setting.flags)}"
        run.cache_clear()
    yield ""
    yield f"{len(seeds)} settings, {equal} equal"


def _problems_of(setting: Stopped) -> list[str]:
    case, (first, second) = setting.case, setting.after
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / part for part in ("first", "second")]
        whole = run(saving(case, folders[0], setting.format, 1, *setting.flags))
        (folders[0] / TRACKER).write_text(str(first))
        after = saving(case.rest(first), folders[1], setting.format, 1, *setting.flags)
        problems = _different(resume(after, folders[0], setting.format), whole, case, first)
        (folders[1] / TRACKER).write_text(str(second))
        return problems + _different(resume(case.rest(second), folders[1], setting.format), whole, case, second)


def _different(found: Results, whole: Results, case: Case, iteration: int) -> list[str]:
    expected = rest(whole, case.ends().index(iteration) + 1, case.rows_until(iteration))
    different = differing(found, expected)
    different += [] if found.rates == expected.rates else ["learning rates"]
    return [f"after batch {iteration}: {', '.join(different)}"] if different else []


if __name__ == "__main__":
    raise SystemExit(main())
