"""Text picture of what every rank runs, for error messages."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest

from megatron_2bw.schedule.action import Action
from megatron_2bw.schedule.calls import WHOLE, Part, Phase
from megatron_2bw.schedule.program import Schedule

MARK = " <-- ERROR HERE"


def listing(
    schedule: Schedule, part: Part = WHOLE[Phase.STEADY], marks: Collection[tuple[int, Action | None]] = frozenset()
) -> str:
    """One column per rank, one row per action, with the actions in ``marks`` marked.

    Args:
        schedule: whose Programs.
        part: which part of each Program to list.
        marks: (rank, action as written); a rank without an action is marked in the heading. Of equal
            actions the last one is marked.

    >>> from megatron_2bw.schedule.registry import build
    >>> action = Action.parse("1B0v-1")
    >>> print(listing(build("2bw", stages=2, microbatches=1), marks={(1, action)}))
    steady  rank 0     rank 1
         0  0UPDATE@-1 1F0v-1
         1  0F0@1v0    1B0v-1 <-- ERROR HERE
         2  0B0v-1     1UPDATE@-1
    """
    columns = [
        [f"rank {rank}" + MARK * ((rank, None) in marks), *_column(rank, actions, marks)]
        for rank, actions in enumerate(part.of(schedule))
    ]
    widths = [max(len(cell) for cell in column) for column in columns]
    numbers = [str(part.phase), *(str(i) for i in range(max(len(column) for column in columns) - 1))]
    rows = zip_longest(numbers, *columns, fillvalue="")
    lines = (
        f"{number:>{len(part.phase)}}  "
        + " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        for number, *cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _column(rank: int, actions: tuple[Action, ...], marks: Collection[tuple[int, Action | None]]) -> list[str]:
    marked = {len(actions) - 1 - actions[::-1].index(action) for r, action in marks if r == rank and action in actions}
    return [f"{action}{MARK if index in marked else ''}" for index, action in enumerate(actions)]
