"""``megatron-2bw validate``: for which sizes schedules work."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_2bw.schedule.commands.arguments import count
from megatron_2bw.schedule.registry import SCHEDULES, canonical_name


def add(commands: Any) -> None:
    """Add the command to the parser of ``megatron-2bw``."""
    check = commands.add_parser("validate", help="find out for which stages and microbatches schedules work")
    check.set_defaults(command=_validate)
    check.add_argument("schedules", nargs="*", metavar="SCHEDULE", help="default: all")
    check.add_argument("--max-stages", type=count, default=8, metavar="D", help="(default: %(default)s)")
    check.add_argument("--max-microbatches", type=count, default=16, metavar="M", help="(default: %(default)s)")


def _validate(args: argparse.Namespace) -> int:
    from megatron_2bw.schedule.validation.feasible import refusal

    names = dict.fromkeys(canonical_name(name) for name in args.schedules or SCHEDULES)
    found_all = True
    for name in names:
        valid: set[tuple[int, int]] = set()
        first = None
        for stages in range(1, args.max_stages + 1):
            for microbatches in range(1, args.max_microbatches + 1):
                problem = refusal(name, stages=stages, microbatches=microbatches)
                if problem is None:
                    valid.add((stages, microbatches))
                else:
                    first = first or problem
        pairs = args.max_stages * args.max_microbatches
        region = feasible_region(valid, args.max_stages, args.max_microbatches)
        print(f"{name}: {region} ({len(valid)} of {pairs} valid: d <= {args.max_stages}, m <= {args.max_microbatches})")
        if first:
            print(f"  first refusal: {first}")
        found_all = found_all and (bool(valid) or not args.schedules)
    return 0 if found_all else 1


def feasible_region(valid: set[tuple[int, int]], max_stages: int, max_microbatches: int) -> str:
    """Describe which (stages, microbatches) are valid, by a rule where there is one.

    >>> feasible_region({(d, m) for d in range(1, 5) for m in range(1, 9) if m >= d - 1}, 4, 8)
    'm >= d-1'
    >>> feasible_region({(2, 2), (2, 4), (4, 4)}, 4, 4)
    'd even, m a multiple of d'
    """
    pairs = {(d, m) for d in range(1, max_stages + 1) for m in range(1, max_microbatches + 1)}
    even = {(d, m) for d, m in pairs if d % 2 == 0}
    if not valid:
        return "none"
    if valid == pairs:
        return "all d and m"
    if valid == {(d, m) for d, m in pairs if m == 1}:
        return "m = 1"
    if valid == even:
        return "d even, all m"
    if valid == {(d, m) for d, m in even if m % d == 0}:
        return "d even, m a multiple of d"
    if valid == {(d, m) for d, m in even if m >= d and m % 2 == 0}:
        return "d even, m even and m >= d"
    for offset in range(-max_stages, max_microbatches + 1):
        if valid == {(d, m) for d, m in pairs if m >= d + offset}:
            return f"m >= d{offset:+d}" if offset else "m >= d"
    return "no rule known; valid (d, m): " + ", ".join(map(str, sorted(valid)))
