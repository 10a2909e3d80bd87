"""Megatron's training log for people: what matters while it runs, and a summary at the end.

    torchrun ... 2>&1 | python scripts/training_log.py follow LOG
    python scripts/training_log.py summary LOG --trace TRACE --checkpoint FOLDER

Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ITERATION = re.compile(
    r"iteration +(?P<iteration>\d+)/ +(?P<last>\d+) .*elapsed time per iteration \(ms\): (?P<time_ms>[\d.]+)"
    r".*lm loss: (?P<loss>\S+)"
)
VALIDATION = re.compile(
    r"validation loss at iteration (?P<iteration>\d+)(?P<at_end> on validation set)? \| lm loss value: (?P<loss>\S+)"
)
SHOWN = re.compile(r"^megatron_2bw: |(saving|successfully saved|successfully loaded) .*checkpoint|^ERROR")
TRACEBACK = "Traceback (most recent call last)"
REFUSAL = re.compile(r"^\S+: error: ")
"""A message for the user that stands alone; argparse prints all of Megatron's flags around it."""
LAUNCHER_REPORT = re.compile(r"torch/distributed/elastic/.*failed \(exitcode")
"""torchrun names the rank that failed, then repeats what it said."""
LAST_LOSSES = 10
"""The last training loss is the mean of this many, because one batch's loss is noisy."""


LEAST_BATCHES = 5
"""A trace of fewer has no bubble: 0, which says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a log and a trace say about one run."""

    iterations: int
    first_loss: float
    last_loss: float
    """Mean of the last ``LAST_LOSSES`` logged losses."""
    validation_losses: tuple[float, ...]
    """In order; empty if the run never evaluated."""
    iteration_time_s: float
    """Median over the logged times."""
    pipeline: dict[str, Any] | None
    """``otherData`` of the trace, if there is one: schedule, stages, microbatches, bubble, flush_bubble."""


def summarize(log: Iterable[str], trace: dict[str, Any] | None = None) -> Summary:
    """Read a run's log, and its pipeline trace where there is one.

    Raises:
        ValueError: the log holds no training iteration.
    """
    rows: list[tuple[int, float, float]] = []
    validation: dict[int, float] = {}
    for line in log:
        if match := ITERATION.search(line):
            rows.append((int(match["iteration"]), float(match["time_ms"]), float(match["loss"])))
        elif match := VALIDATION.search(line):
            # Where a run ends with an evaluation, Megatron evaluates once more on other samples.
            validation.setdefault(int(match["iteration"]), float(match["loss"]))
    if not rows:
        raise ValueError("the log holds no training iteration; did training start, with --log-interval small enough?")
    losses = [loss for _, _, loss in rows]
    return Summary(
        iterations=rows[-1][0],
        first_loss=losses[0],
        last_loss=statistics.fmean(losses[-LAST_LOSSES:]),
        validation_losses=tuple(validation.values()),
        iteration_time_s=statistics.median(time_ms for _, time_ms, _ in rows) / 1e3,
        pipeline=trace["otherData"] if trace else None,
    )


def render(summary: Summary, places: dict[str, Path]) -> str:
    """The summary as a table; ``places`` are the files to point to."""
    rows = [
        ("iterations", f"{summary.iterations}"),
        ("training loss", f"{summary.first_loss:.3f} -> {summary.last_loss:.3f}"),
    ]
    if losses := summary.validation_losses:
        first = f"{losses[0]:.3f} -> " if len(losses) > 1 else ""
        rows.append(("validation loss", f"{first}{losses[-1]:.3f}"))
    rows.append(("iteration time", f"{summary.iteration_time_s * 1e3:.1f} ms (median)"))
    if pipeline := summary.pipeline:
        layout = f"{pipeline['stages']} stages, {pipeline['microbatches']} microbatches per batch"
        batches = pipeline["batches"]
        measured = f"{pipeline['bubble']:.1%} measured over {batches} batches"
        if batches < LEAST_BATCHES:
            measured = f"not measured, {batches} batches only fill and drain the pipeline"
        rows.append(("schedule", f"{pipeline['schedule']}, {layout}"))
        rows.append(("pipeline bubble", f"{measured}; with a flush at least {pipeline['flush_bubble']:.1%}"))
    rows += [(title, str(path)) for title, path in places.items()]
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"  {title:<{width}}  {value}" for title, value in rows)


def follow(lines: Iterable[str], log: TextIO, *, every: int) -> None:
    """Copy all lines to ``log`` and print those that matter; of a rank that fails, its whole traceback."""
    failing = told = False
    for line in lines:
        log.write(line)
        if told:
            continue
        told = bool(REFUSAL.search(line) or LAUNCHER_REPORT.search(line))
        failing = failing or TRACEBACK in line
        shown = line.rstrip() if told or failing or SHOWN.search(line) else _progress(line, every)
        if shown is not None:
            print(shown, flush=True)


def _progress(line: str, every: int) -> str | None:
    if (match := VALIDATION.search(line)) and not match["at_end"]:
        return f"  validation loss {float(match['loss']):.4f}"
    if match := ITERATION.search(line):
        iteration, last = int(match["iteration"]), int(match["last"])
        if iteration in (1, last) or iteration % every == 0:
            position = f"{iteration:>{len(str(last))}}/{last}"
            return f"  iteration {position}   loss {float(match['loss']):.4f}   {float(match['time_ms']):.0f} ms"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    following = commands.add_parser("follow", help="filter a running job's output from standard input")
    following.add_argument("log", type=Path, help="where the whole output goes")
    following.add_argument("--append", action="store_true", help="to a log of earlier runs")
    following.add_argument("--every", type=int, default=20, help="print one iteration in so many (default %(default)s)")
    summary = commands.add_parser("summary", help="print the numbers of a finished job")
    summary.add_argument("log", type=Path)
    summary.add_argument("--trace", type=Path, default=None, help="file written by --pipeline-trace")
    summary.add_argument("--checkpoint", type=Path, default=None, help="folder to point to")
    args = parser.parse_args()
    if args.command == "follow":
        for number in (signal.SIGINT, signal.SIGTERM):  # The job ends by them, and may have more to say and to save.
            signal.signal(number, signal.SIG_IGN)
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # Ranks may write into each other's characters.
        sys.stdout.reconfigure(errors="replace")  # A terminal may lack some.
        with args.log.open("a" if args.append else "w", encoding="utf-8") as log:
            follow(sys.stdin, log, every=args.every)
        return
    trace = json.loads(args.trace.read_text(encoding="utf-8")) if args.trace else None
    try:
        with args.log.open(encoding="utf-8") as log:
            result = summarize(log, trace)
    except ValueError as error:
        sys.exit(f"training_log: {args.log}: {error}")
    places = {"checkpoint": args.checkpoint, "timeline": args.trace, "full log": args.log}
    print(render(result, {title: path for title, path in places.items() if path is not None}))


if __name__ == "__main__":
    main()
