"""Give Megatron each of its flags alone, with and without this extension, and compare the two runs bit for bit.

python scripts/every_flag.py                    # an hour on two cores
python scripts/every_flag.py --only moe-router
python scripts/every_flag.py --drawn 100 --seed 1     # several at a time, drawn at random
python scripts/every_flag.py --output scripts/bench/results/every_flag.txt
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading, put_each

from tests.mcore.case import Case
from tests.mcore.compare import differing
from tests.mcore.drawn import words as words_of
from tests.mcore.features import EXPERTS, LATENT, SEVERAL_TOKENS
from tests.mcore.harness import ENVIRONMENT, Results, refusal_in, run

BATCHES = 4
PLAIN = Case(stages=2, microbatches=3, batches=BATCHES, clip=1.0, precision="bf16")
SHARDED = replace(PLAIN, replicas=2, distributed_optimizer=True)
BASES = (
    ("moe|expert|router", replace(PLAIN, model=EXPERTS)),
    ("lora|rotary|rope|yarn|mla|qk-head|v-head|mscale", replace(PLAIN, model=LATENT)),
    ("mtp", replace(PLAIN, model=SEVERAL_TOKENS)),
    ("loss-scale|fp16|hysteresis", replace(PLAIN, precision="fp16")),
    ("muon", replace(PLAIN, optimizer="muon")),
    ("dist|ddp|overlap|bucket|reduce|gather|replica|optimizer|nccl|gloo|fsdp|param|grad", SHARDED),
    ("eval|log|timing|exit", replace(PLAIN, flags=("--eval-interval", "2", "--eval-iters", "1"))),
    ("tensor-model|tp-|sequence-par", replace(PLAIN, tensor_parallel=2)),
    ("", PLAIN),
)
"""What a flag is added to, by the first pattern that is in its name."""
DRAINED = ("--eval-interval", "1", "--eval-iters", "1")
"""What keeps forwards from running ahead into the next batch."""
STARTS_BEFORE = frozenset({"--tokenizer-type", "--distributed-backend", "--transformer-impl", "--num-workers"})
"""Flags without which nothing runs here, on CPUs and without data."""
ABOUT = f"""\
Each line: a flag of Megatron's parser, added to a run of {BATCHES} batches on CPUs, clipped to norm 1.0, once in stock
Megatron and once under --pipeline-schedule 2bw with --synchronous-warmup-iters {BATCHES}: through our executor, updates
and reductions, but without the delay, so that both have to compute the same. Switches are set; of several choices each
is taken; numbers are halved, raised by one or set to 2; flags that take other text are left out. "equal": losses, norms
and final weights are, to the last bit; "changes": so they are, and the flag makes them others than without it; and the
same holds with the delay, of a run whose forwards run ahead and one that evaluates after each batch, so that none do.
"refused": we say that it does not work with 2bw, and stock Megatron runs. "neither": stock Megatron does not run, for
a flag more is missing, or a GPU, or a package."""
ABOUT_DRAWN = """\
Here, two to six flags at a time, of those that run alone, drawn at random; so is the run that they are added to."""
ALONE = Path(__file__).parent / "bench" / "results" / "every_flag.txt"
_RAN = re.compile(r"^(--\S+(?: \S+)?) +(equal|changes)$", re.MULTILINE)


def main() -> int:
    """Run every flag, print the outcome of each and write all lines to a file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="flags in whose name this is found")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="so many groups of flags, drawn at random")
    parser.add_argument("--seed", default="0", help="of these; the same ones for the same seed")
    parser.add_argument("--output", type=Path, help="write the report here")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if options.drawn:
        alone = {tuple(words.split()): outcome for words, outcome in _RAN.findall(ALONE.read_text())}
        settings = [_drawn(f"{options.seed}-{index}", alone) for index in range(options.drawn)]
    else:
        settings = [(_base(words), words) for words in _settings() if re.search(options.only, words[0])]
    counts: Counter[str] = Counter()
    about = (*heading(), "", ABOUT, *[ABOUT_DRAWN] * (options.drawn > 0), "")
    put_each(chain(about, _lines(settings, counts)), options.output)
    return 1 if counts["NOT equal"] or counts["FAILED"] or not counts else 0


def _lines(settings: list[tuple[Case, tuple[str, ...]]], counts: Counter[str]) -> Iterator[str]:
    # Two at a time, as the tests run: the ranks of one wait for each other, too.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        outcomes = pool.map(_outcome, *zip(*settings, strict=True))
        for (base, words), (outcome, why) in zip(settings, outcomes, strict=True):
            counts[outcome] += 1
            beside = [] if base == _base(words) else [words_of(base, PLAIN)]
            yield f"{' '.join((*words, *beside)):<64} {outcome}{why and ': '}{why}"
    yield ""
    yield ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def _settings() -> Iterator[tuple[str, ...]]:
    """Every flag, with each value that is tried."""
    importlib.import_module("tests.mcore.preload")  # Megatron's parser needs what ranks need.
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    for action in parser._actions:
        if action.option_strings[0] not in STARTS_BEFORE:
            yield from _words(action)


def _words(action: argparse.Action) -> Iterator[tuple[str, ...]]:
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        yield (next(word for word in action.option_strings if word.startswith("--no-") is bool(action.default)),)
    elif action.nargs == 0:
        yield (flag,)
    elif action.choices:
        yield from ((flag, str(choice)) for choice in action.choices if choice not in (action.default, None))
    elif action.type in (int, float):
        default = action.default if isinstance(action.default, int | float) else 0
        other = default + 1 if action.type is int else default / 2
        yield flag, repr(other) if default else "2" if action.type is int else "0.5"


def _base(words: tuple[str, ...]) -> Case:
    return next(base for pattern, base in BASES if re.search(pattern, words[0]))


def _drawn(seed: str, alone: dict[tuple[str, ...], str]) -> tuple[Case, tuple[str, ...]]:
    """Some of the flags in ``alone``, with their outcomes there: those that change numbers as often as all others."""
    draw = random.Random(seed)
    base = draw.choice([base for _, base in BASES])
    suitable = {words: outcome for words, outcome in alone.items() if _base(words) in (base, PLAIN)}
    flags: dict[str, tuple[str, ...]] = {}
    for _ in range(draw.randint(2, 6)):
        kind = draw.choice(("equal", "changes"))
        words = draw.choice([words for words, outcome in suitable.items() if outcome == kind])
        flags[words[0]] = words
    return base, tuple(chain.from_iterable(flags.values()))


def _outcome(base: Case, words: tuple[str, ...]) -> tuple[str, str]:
    """In a word, and why."""
    case = replace(base, model=(*base.model, *words))
    ours, stock = _tried(replace(case, schedule="2bw", synchronous=BATCHES)), _tried(replace(case, schedule=None))
    if not isinstance(stock, Results):
        return "neither", ""
    if not isinstance(ours, Results):
        refusal = refusal_in(ours)
        return ("refused", refusal) if refusal else ("FAILED", str(ours)[-500:])
    if apart := _differing(ours, stock):
        return "NOT equal", "; ".join(apart)
    if not _differing(stock, run(replace(base, schedule=None))):
        return "equal", ""
    delayed = replace(case, schedule="2bw")
    ahead, drained = _tried(delayed), _tried(replace(delayed, flags=(*delayed.flags, *DRAINED)))
    if not isinstance(ahead, Results) or not isinstance(drained, Results):
        return "FAILED", str(drained if isinstance(ahead, Results) else ahead)[-500:]
    apart = _differing(drained, ahead)
    return "NOT equal" if apart else "changes", "; ".join(apart)


def _tried(case: Case) -> Results | Exception:
    try:
        return run(case)
    except (RuntimeError, FileNotFoundError) as error:  # The second one: it has ended before there were results.
        return error


def _differing(found: Results, expected: Results) -> list[str]:
    if found.losses.shape != expected.losses.shape or found.final.keys() != expected.final.keys():
        return ["what was computed"]
    return differing(found, expected)


if __name__ == "__main__":
    sys.exit(main())
