"""``megatron-2bw schedules``: what there is to choose from."""

from __future__ import annotations

import argparse
import inspect
from fractions import Fraction
from typing import Any

from megatron_2bw.schedule.commands.arguments import add_size, plural, table
from megatron_2bw.schedule.registry import ALIASES, SCHEDULES
from megatron_2bw.schedule.timeline import percent


def add(commands: Any) -> None:
    """Add the command to the parser of ``megatron-2bw``."""
    schedules = commands.add_parser("schedules", help="list the schedules")
    schedules.set_defaults(command=_list)
    add_size(schedules, default=4)


def _list(args: argparse.Namespace) -> int:
    from megatron_2bw.schedule.durations import Durations
    from megatron_2bw.schedule.simulate import simulate, steady_state
    from megatron_2bw.schedule.validation.feasible import works

    size = f"{plural(args.stages, 'stage')} and {plural(args.microbatches, 'microbatch')}"
    durations = Durations(forward_s=Fraction(1), backward_s=Fraction(2))
    for name, builder in SCHEDULES.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        print(f"{name} (also {', '.join(aliases)})" if aliases else name)
        print(f"  {inspect.getdoc(builder).splitlines()[0].replace('``', '')}")
        if not works(name, stages=args.stages, microbatches=args.microbatches):
            print(f"  does not work for {size}\n")
            continue
        schedule = builder(args.stages, args.microbatches)
        timeline = simulate(schedule, durations, 2 * args.stages)
        print(f"  bubble {percent(steady_state(schedule, durations).bubble_ratio)}")
        rows = table(
            ("peak activations per rank", timeline.peak_in_flight),
            ("peak weight versions per rank", timeline.peak_versions),
            ("delay per stage", schedule.delay),
        )
        print("\n".join(f"  {row}" for row in rows), end="\n\n")
    print(f"Simulated with {size} in an endless run, backward twice")
    print("as long as forward, transfers and updates free. Delay: batch t computes with W(max(t - delay, 0)).")
    return 0
