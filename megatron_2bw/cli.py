"""The command ``megatron-2bw``: look at schedules, check them and plan with them, without torch.

What only one command needs is imported where that command runs, so that each starts at once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_2bw import __version__
from megatron_2bw.planner.commands import add_commands
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.registry import ALIASES, SCHEDULES, build, canonical_name

if TYPE_CHECKING:
    from megatron_2bw.schedule.program import Schedule
    from megatron_2bw.schedule.timeline import Timeline

_MOST_SLOTS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 when nothing could be validated, 2 for bad input."""
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    if flags and not args.takes_flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        return args.command(args, flags) if args.takes_flags else args.command(args)
    except ScheduleError as error:
        message = error.message
    except PlanError as error:
        message = str(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The reader has seen enough.
        return 1
    except OSError as error:
        message = f"cannot write {error.filename}: {error.strerror}"
    print(f"megatron-2bw: error: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-2bw", description="Plan pipelines, look at schedules, check them.")
    parser.set_defaults(takes_flags=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="simulate and draw schedules")
    show.set_defaults(command=_show)
    show.add_argument("schedules", nargs="+", metavar="SCHEDULE", help=f"one or more of {', '.join(_names())}")
    _add_size(show, required=True)
    show.add_argument("--batches", type=_count, default=3, metavar="N", help="batches to run (default: %(default)s)")
    show.add_argument("--forward-time", type=_time, default=Fraction(1), metavar="F", help="of a stage (default: 1)")
    show.add_argument("--backward-time", type=_time, default=Fraction(2), metavar="B", help="of a stage (default: 2)")
    show.add_argument(
        "--extra-in-flight",
        type=_extra,
        default=0,
        metavar="N",
        help="activations that 2bw keeps in flight beyond what it needs, per stage boundary (default: %(default)s)",
    )
    show.add_argument("--svg", type=Path, metavar="FILE", help="write a picture, all schedules on one time axis")
    show.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    show.add_argument("--programs", action="store_true", help="print what every rank executes")

    schedules = commands.add_parser("schedules", help="list the schedules")
    schedules.set_defaults(command=_list)
    _add_size(schedules, required=False)

    check = commands.add_parser("validate", help="find out for which stages and microbatches schedules work")
    check.set_defaults(command=_validate)
    check.add_argument("schedules", nargs="*", metavar="SCHEDULE", help="default: all")
    check.add_argument("--max-stages", type=_count, default=8, metavar="D", help="(default: %(default)s)")
    check.add_argument("--max-microbatches", type=_count, default=16, metavar="M", help="(default: %(default)s)")

    add_commands(commands)
    return parser


def _add_size(parser: argparse.ArgumentParser, *, required: bool) -> None:
    default = None if required else 4
    suffix = "" if required else " (default: %(default)s)"
    for flag, metavar, text in (("--stages", "D", "pipeline depth"), ("--microbatches", "M", "microbatches per batch")):
        parser.add_argument(
            flag, type=_count, required=required, default=default, metavar=metavar, help=f"{text}{suffix}"
        )


def _show(args: argparse.Namespace) -> int:
    from megatron_2bw.schedule.simulate import Durations, simulate, steady_state

    durations = Durations(forward_s=args.forward_time, backward_s=args.backward_time)
    names = dict.fromkeys(canonical_name(name) for name in args.schedules)
    schedules = [_valid(name, args.stages, args.microbatches, args.extra_in_flight) for name in names]
    timelines = [simulate(schedule, durations, args.batches) for schedule in schedules]
    bubbles = [steady_state(schedule, durations).bubble_ratio for schedule in schedules]
    for schedule, timeline, bubble in zip(schedules, timelines, bubbles, strict=True):
        print("\n".join(_shown(schedule, timeline, bubble, args)), end="\n\n")
    if args.svg:
        from megatron_2bw.schedule.svg import svg

        title = f"{_batches(args)} of {_microbatches(args)} on {_stages(args)}"
        notes = [_endless(timeline, bubble) for timeline, bubble in zip(timelines, bubbles, strict=True)]
        args.svg.write_text(svg(*timelines, title=title, notes=notes), encoding="utf-8")
    if args.trace:
        from megatron_2bw.schedule.trace import chrome_trace

        args.trace.write_text(json.dumps(chrome_trace(*timelines)), encoding="utf-8")
    return 0


def _shown(schedule: Schedule, timeline: Timeline, steady_bubble: Fraction, args: argparse.Namespace) -> Iterable[str]:
    from megatron_2bw.schedule.calls import Phase, lowered
    from megatron_2bw.schedule.draw import grid
    from megatron_2bw.schedule.listing import listing

    unit_s = min(args.forward_time, args.backward_time)
    forward, backward = (min(round(t / unit_s), _MOST_SLOTS) for t in (args.forward_time, args.backward_time))
    yield f"{schedule.name}: {_stages(args)}, {_microbatches(args)}, {_batches(args)}"
    yield grid(schedule, batches=args.batches, forward_slots=forward, backward_slots=backward)
    if Fraction(forward, backward) != args.forward_time / args.backward_time:
        yield f"(drawn with a backward of {backward} and a forward of {forward} slots; the numbers are exact)"
    yield ""
    yield f"bubble {_percent(timeline.bubble_ratio)}{_endless(timeline, steady_bubble)}"
    yield from _table(
        ("rank", range(len(timeline.events))),
        ("peak activations", timeline.peak_in_flight),
        ("peak weight versions", timeline.peak_versions),
    )
    if args.programs:
        for phase in Phase:
            yield from ("", listing(lowered(schedule), phase))


def _valid(name: str, stages: int, microbatches: int, extra_in_flight: int) -> Schedule:
    """The schedule, or an error that says how many microbatches it needs."""
    from megatron_2bw.schedule.feasible import enough_microbatches, refusal

    schedule = build(name, stages=stages, microbatches=microbatches, extra_in_flight=extra_in_flight)
    problem = refusal(schedule)
    if problem is None:
        return schedule
    enough = enough_microbatches(name, stages=stages, microbatches=microbatches, extra_in_flight=extra_in_flight)
    if enough is not None:
        problem += f"; {name} works with {stages} stages from {enough} microbatches on: raise --microbatches"
    raise ScheduleError(problem)


def _endless(timeline: Timeline, steady_bubble: Fraction) -> str:
    return "" if timeline.bubble_ratio == steady_bubble else f", {_percent(steady_bubble)} in an endless run"


def _list(args: argparse.Namespace) -> int:
    from megatron_2bw.schedule.feasible import refusal
    from megatron_2bw.schedule.simulate import Durations, simulate, steady_state

    durations = Durations(forward_s=Fraction(1), backward_s=Fraction(2))
    for name, builder in SCHEDULES.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        print(f"{name} (also {', '.join(aliases)})" if aliases else name)
        print(f"  {inspect.getdoc(builder).splitlines()[0].replace('``', '')}")
        schedule = builder(args.stages, args.microbatches)
        if refusal(schedule):
            print(f"  does not work for {_stages(args)} and {_microbatches(args)}\n")
            continue
        timeline = simulate(schedule, durations, 2 * args.stages)
        print(f"  bubble {_percent(steady_state(schedule, durations).bubble_ratio)}")
        rows = _table(
            ("peak activations per rank", timeline.peak_in_flight),
            ("peak weight versions per rank", timeline.peak_versions),
            ("delay per stage", schedule.delay),
        )
        print("\n".join(f"  {row}" for row in rows), end="\n\n")
    print(f"Simulated with {_stages(args)} and {_microbatches(args)} in an endless run, backward twice")
    print("as long as forward, transfers and updates free. Delay: batch t computes with W(max(t - delay, 0)).")
    return 0


def _validate(args: argparse.Namespace) -> int:
    from megatron_2bw.schedule.feasible import refusal

    names = dict.fromkeys(canonical_name(name) for name in args.schedules or SCHEDULES)
    found_all = True
    for name in names:
        valid: set[tuple[int, int]] = set()
        first = None
        for stages in range(1, args.max_stages + 1):
            for microbatches in range(1, args.max_microbatches + 1):
                problem = refusal(build(name, stages=stages, microbatches=microbatches))
                first = first or problem
                if problem is None:
                    valid.add((stages, microbatches))
        pairs = args.max_stages * args.max_microbatches
        region = feasible_region(valid, args.max_stages, args.max_microbatches)
        print(f"{name}: {region} ({len(valid)} of {pairs} valid: d <= {args.max_stages}, m <= {args.max_microbatches})")
        if first:
            print(f"  first refusal: {first}")
        found_all = found_all and bool(valid)
    return 0 if found_all else 1


def feasible_region(valid: set[tuple[int, int]], max_stages: int, max_microbatches: int) -> str:
    """Describe which (stages, microbatches) are valid, as a bound ``m >= d + c`` where there is one.

    >>> feasible_region({(d, m) for d in range(1, 5) for m in range(1, 9) if m >= d - 1}, 4, 8)
    'm >= d-1'
    """
    pairs = {(d, m) for d in range(1, max_stages + 1) for m in range(1, max_microbatches + 1)}
    if valid == pairs:
        return "all d and m"
    if not valid:
        return "none"
    for offset in range(-max_stages, max_microbatches + 1):
        if valid == {(d, m) for d, m in pairs if m >= d + offset}:
            return f"m >= d{offset:+d}" if offset else "m >= d"
    return "no bound of the form m >= d + c; valid (d, m): " + ", ".join(map(str, sorted(valid)))


def _table(*rows: tuple[str, Iterable[object]]) -> list[str]:
    heads = [head for head, _ in rows]
    cells = [[str(value) for value in values] for _, values in rows]
    width = max(len(head) for head in heads)
    column = max(len(cell) for row in cells for cell in row)
    return [
        f"{head:<{width}}  {' '.join(f'{cell:>{column}}' for cell in row)}"
        for head, row in zip(heads, cells, strict=True)
    ]


def _stages(args: argparse.Namespace) -> str:
    return f"{args.stages} stage{'s' * (args.stages > 1)}"


def _microbatches(args: argparse.Namespace) -> str:
    return f"{args.microbatches} microbatch{'es' * (args.microbatches > 1)}"


def _batches(args: argparse.Namespace) -> str:
    return f"{args.batches} batch{'es' * (args.batches > 1)}"


def _names() -> list[str]:
    return [*SCHEDULES, *ALIASES]


def _percent(ratio: Fraction) -> str:
    return f"{100 * float(ratio):.1f}%"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number of at least 1")
    return int(text)


def _extra(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _time(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; give a number above 0, such as 1.5")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
