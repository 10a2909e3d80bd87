"""``megatron-2bw show``: schedules as they are simulated, or a run as it was measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_2bw.schedule.commands.arguments import (
    add_size,
    count,
    duration,
    names,
    natural,
    plural,
    table,
)
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.registry import PER_MICROBATCH, SCHEDULES, build, canonical_name, options_of
from megatron_2bw.schedule.timeline import percent

if TYPE_CHECKING:
    from megatron_2bw.schedule.program import Schedule
    from megatron_2bw.schedule.timeline import Timeline

_MOST_SLOTS = 8
_DEFAULTS = {
    "forward_time": Fraction(1),
    "backward_time": Fraction(2),
    "extra_in_flight": 0,
    "delayed_microbatches": None,
    "mixpipe_k": None,
    "mixpipe_gamma": 0,
    "compare": False,
}
"""Of what is simulated, and not of what is measured."""
_LETTERS = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><text y="9" font-family="{}">{}</text></svg>'


def add(commands: Any) -> None:
    """Add the command to the parser of ``megatron-2bw``."""
    show = commands.add_parser("show", help="draw schedules as simulated, or a run as measured")
    show.set_defaults(command=_show)
    show.add_argument("schedules", nargs="*", metavar="SCHEDULE", help=f"one or more of {', '.join(names())}")
    add_size(show, default=None)
    show.add_argument("--batches", type=count, default=3, metavar="N", help="batches to show (default: %(default)s)")
    show.add_argument("--forward-time", type=duration, metavar="F", help="of a stage (default: %(default)s)")
    show.add_argument("--backward-time", type=duration, metavar="B", help="of a stage (default: %(default)s)")
    show.add_argument(
        "--extra-in-flight",
        type=natural,
        metavar="N",
        help="activations that 2bw keeps in flight beyond what it needs, per stage boundary (default: %(default)s)",
    )
    show.add_argument(
        "--delayed-microbatches",
        type=count,
        metavar="N",
        help="of a batch of 2bw, computed with the older weights; the others with the newest (default: all)",
    )
    show.add_argument("--mixpipe-k", type=count, metavar="K", help="microbatches that mixpipe starts with (default: d)")
    show.add_argument(
        "--mixpipe-gamma", type=natural, metavar="G", help="and takes in more on the way (default: %(default)s)"
    )
    show.add_argument(
        "--compare", action="store_true", help="draw all schedules that work for this size, and a table of them"
    )
    show.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a trace that --pipeline-trace wrote, in place of SCHEDULE and its size",
    )
    show.add_argument("--svg", type=Path, metavar="FILE", help="write a picture, all timelines on one time axis")
    show.add_argument("--png", type=Path, metavar="FILE", help="the same, as pixels; needs the package resvg-py")
    show.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    show.set_defaults(**_DEFAULTS)
    show.add_argument("--programs", action="store_true", help="print what every rank executes")


def _show(args: argparse.Namespace) -> int:
    if args.measured is not None:
        return _show_measured(args)
    for name in args.schedules:
        canonical_name(name)
    for name in ("schedules", "stages", "microbatches"):
        if not getattr(args, name) and not (name == "schedules" and args.compare):
            what = "a SCHEDULE, --compare" if name == "schedules" else f"--{name}"
            raise ScheduleError(f"show needs {what}, or a run to show: --measured FILE")
    return _show_simulated(args)


def _show_simulated(args: argparse.Namespace) -> int:
    from megatron_2bw.schedule.durations import Durations
    from megatron_2bw.schedule.simulate import simulate, steady_state

    durations = Durations(forward_s=args.forward_time, backward_s=args.backward_time)
    schedules = list(_schedules(args))
    timelines = [simulate(schedule, durations, _count(schedule, args)) for schedule in schedules]
    bubbles = [steady_state(schedule, durations).bubble_ratio for schedule in schedules]
    for schedule, timeline, bubble in zip(schedules, timelines, bubbles, strict=True):
        print("\n".join(_shown(schedule, timeline, bubble, args)), end="\n\n")
    if args.compare:
        from megatron_2bw.schedule.commands.compare import comparison

        print("\n".join(comparison(schedules, bubbles, durations)))
    title = f"{_batches(args)} of {plural(args.microbatches, 'microbatch')} on {_stages(args)}"
    notes = [_endless(timeline, bubble) for timeline, bubble in zip(timelines, bubbles, strict=True)]
    _write(args, timelines, title, notes)
    return 0


def _show_measured(args: argparse.Namespace) -> int:
    from megatron_2bw.schedule.commands.measured import beside_each_other, report
    from megatron_2bw.schedule.pictures.run_file import read_run

    others = {"schedules": [], "stages": None, "microbatches": None, "programs": False, **_DEFAULTS}
    given = [name.replace("_", "-") for name, default in others.items() if getattr(args, name) != default]
    if given:
        raise ScheduleError(f"--measured says what ran: leave out {', '.join(given)}")
    run = read_run(args.measured)
    print("\n".join(report(run)))
    title = f"{_batches(args)} of {plural(run.schedule.microbatches, 'microbatch')}"
    _write(args, beside_each_other(run, args.batches), title, ["", " from forwards and backwards alone"])
    return 0


def _write(args: argparse.Namespace, timelines: list[Timeline], title: str, notes: list[str]) -> None:
    """The files that were asked for."""
    if args.svg or args.png:
        from megatron_2bw.schedule.pictures.svg import svg

        picture = svg(*timelines, title=title, notes=notes)
        if args.svg:
            args.svg.write_text(picture, encoding="utf-8")
        if args.png:
            args.png.write_bytes(_pixels(picture))
    if args.trace:
        from megatron_2bw.schedule.pictures.trace import chrome_trace

        args.trace.write_text(json.dumps(chrome_trace(*timelines)), encoding="utf-8")


def _pixels(picture: str) -> bytes:
    try:
        import resvg_py
    except ImportError as error:
        raise ScheduleError("--png needs a package that draws SVG: pip install resvg-py, or use --svg") from error

    from megatron_2bw.schedule.pictures.svg import FONTS

    def pixels(drawn: str) -> bytes:
        return bytes(resvg_py.svg_to_bytes(svg_string=drawn, zoom=2))

    if pixels(_LETTERS.format(FONTS, "A")) == pixels(_LETTERS.format(FONTS, "")):
        raise ScheduleError("--png finds no font on this machine: install one, such as fonts-dejavu-core, or use --svg")
    return pixels(picture)


def _shown(schedule: Schedule, timeline: Timeline, steady_bubble: Fraction, args: argparse.Namespace) -> Iterable[str]:
    from megatron_2bw.schedule.calls import WHOLE, lowered
    from megatron_2bw.schedule.pictures.draw import grid
    from megatron_2bw.schedule.validation.listing import listing

    unit_s = min(args.forward_time, args.backward_time)
    forward, backward = (min(round(t / unit_s), _MOST_SLOTS) for t in (args.forward_time, args.backward_time))
    batches = _count(schedule, args)
    size = f"{plural(schedule.microbatches, 'microbatch')}, {plural(batches, 'batch')}"
    yield f"{schedule.name}: {_stages(args)}, {size}"
    yield grid(schedule, batches=batches, forward_slots=forward, backward_slots=backward)
    if Fraction(forward, backward) != args.forward_time / args.backward_time:
        yield f"(drawn with a backward of {backward} and a forward of {forward} slots; the numbers are exact)"
    yield ""
    yield f"bubble {percent(timeline.bubble_ratio)}{_endless(timeline, steady_bubble)}"
    yield from table(
        ("rank", range(len(timeline.events))),
        ("peak activations", timeline.peak_in_flight),
        ("peak weight versions", timeline.peak_versions),
    )
    if args.programs:
        for part in WHOLE.values():
            yield from ("", listing(lowered(schedule), part))


def _schedules(args: argparse.Namespace) -> Iterator[Schedule]:
    """Those that are named, or else all that work. Each takes its own of the options.

    Raises:
        ScheduleError: a named one does not work, with the number of microbatches that it needs; or none takes an
            option.
    """
    from megatron_2bw.schedule.validation.feasible import enough_microbatches, refusal

    options = {
        "extra_in_flight": args.extra_in_flight,
        "delayed_microbatches": args.delayed_microbatches,
        "k": args.mixpipe_k,
        "gamma": args.mixpipe_gamma,
    }
    names = dict.fromkeys(canonical_name(name) for name in args.schedules or SCHEDULES)
    taken = frozenset().union(*map(options_of, names))
    for name in names:
        # Beside the others, as many batches of one microbatch.
        microbatches = 1 if args.compare and name in PER_MICROBATCH else args.microbatches
        size = {"stages": args.stages, "microbatches": microbatches}
        own = {option: options[option] for option in options if option in options_of(name) or option not in taken}
        problem = refusal(name, **size, **own)
        if problem is None:
            yield build(name, **size, **own)
        elif args.schedules or any(own.values()):
            enough = enough_microbatches(name, **size, **own)
            if enough is None:
                raise ScheduleError(problem)
            delayed = own.get("delayed_microbatches") or enough
            what = "microbatches" if microbatches < enough else "delayed microbatches"
            what += ", and as many delayed" if what == "microbatches" and delayed < enough else ""
            next_one = f"with {args.stages} stages, the next number that {name} works with is {enough} {what}"
            raise ScheduleError(f"{next_one}; {problem}")


def _count(schedule: Schedule, args: argparse.Namespace) -> int:
    """Batches, of as many microbatches in all."""
    return args.batches * args.microbatches // schedule.microbatches


def _endless(timeline: Timeline, steady_bubble: Fraction) -> str:
    return "" if timeline.bubble_ratio == steady_bubble else f", {percent(steady_bubble)} in an endless run"


def _stages(args: argparse.Namespace) -> str:
    return plural(args.stages, "stage")


def _batches(args: argparse.Namespace) -> str:
    return plural(args.batches, "batch")
