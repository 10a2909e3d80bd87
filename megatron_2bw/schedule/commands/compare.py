"""Schedules of one size beside each other, as the table that ``show --compare`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_2bw.schedule.durations import Durations, Seconds
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.simulate import simulate
from megatron_2bw.schedule.timeline import percent

_HEAD = ("schedule", "bubble", "activations in flight", "weight copies", "delay in updates")


def comparison(schedules: Iterable[Schedule], bubbles: Iterable[Seconds], durations: Durations) -> Iterator[str]:
    """Lines of a Markdown table: bubble of an endless run, and what each rank keeps at most.

    A rank that is part of two pipelines has the weights of two stages.
    """
    yield from (_line(_HEAD), _line(["---"] * len(_HEAD)))
    for schedule, bubble in zip(schedules, bubbles, strict=True):
        timeline = simulate(schedule, durations, 2 * schedule.stages)
        ranks = range(len(schedule.programs))
        copies = [timeline.peak_versions[rank] * len(schedule.stages_of(rank)) for rank in ranks]
        yield _line(
            [
                f"`{schedule.name}`",
                percent(bubble),
                _per_rank(timeline.peak_in_flight),
                _per_rank(copies),
                _per_rank(schedule.delay),
            ]
        )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _per_rank(values: Sequence[int]) -> str:
    """One number where all are equal."""
    return str(values[0]) if len(set(values)) == 1 else " ".join(map(str, values))
