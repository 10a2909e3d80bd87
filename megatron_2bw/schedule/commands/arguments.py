"""Arguments and words that several of the commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from fractions import Fraction

from megatron_2bw.schedule.registry import ALIASES, SCHEDULES


def add_size(parser: argparse.ArgumentParser, *, default: int | None) -> None:
    """Depth and microbatches."""
    suffix = "" if default is None else " (default: %(default)s)"
    for flag, metavar, text in (("--stages", "D", "pipeline depth"), ("--microbatches", "M", "microbatches per batch")):
        parser.add_argument(flag, type=count, default=default, metavar=metavar, help=f"{text}{suffix}")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give 0 or a larger whole number")
    return int(text)


def duration(text: str) -> Fraction:
    """A number above 0."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; give a number above 0, such as 1.5")
    return value


def names() -> list[str]:
    """Of all schedules, as users may type them."""
    return [*SCHEDULES, *ALIASES]


def plural(number: int, noun: str) -> str:
    """Such as ``2 stages``."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending * (number > 1)}"


def table(*rows: tuple[str, Iterable[object]]) -> list[str]:
    """One line per row, its head in front."""
    heads = [head for head, _ in rows]
    cells = [[str(value) for value in values] for _, values in rows]
    width = max(len(head) for head in heads)
    column = max(len(cell) for row in cells for cell in row)
    return [
        f"{head:<{width}}  {' '.join(f'{cell:>{column}}' for cell in row)}"
        for head, row in zip(heads, cells, strict=True)
    ]
