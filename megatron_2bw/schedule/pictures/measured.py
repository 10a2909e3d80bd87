"""Runs that were recorded, and what keeps them from the time that was simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple

from megatron_2bw.schedule.action import COMPUTE, WORK, ActionType
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.simulate import simulate, steady_state
from megatron_2bw.schedule.timeline import DATA, Event, Timeline

SETTLED = slice(2, -1)
"""Of the batches: the first ones fill the pipeline, the last one drains it."""
_LEAST_BATCHES = 12
_MOST_REPLAYED = 256

STEPS = {
    "even": "every stage with the mean forward and backward",
    "stages": "stages are uneven",
    "data": "forwards wait for data",
    "updates": "updates",
    "moments": "stages are slow at different moments",
    "rest": "transfers, and what runs between calls",
}
"""What a batch takes, one cause after the other."""


class Waits(NamedTuple):
    """Of one rank; seconds per batch."""

    activations_s: float
    """Until the output of the stage before is here."""
    gradients_s: float
    """Until the gradient from the stage behind is here."""
    reductions_s: float
    """Until sums over replicas, tied embeddings or norms are complete."""
    outside_s: float
    """Between actions and between calls: logging, evaluation, Megatron's training loop."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a pipeline did, recorded by ``--pipeline-trace``."""

    schedule: Schedule
    timeline: Timeline
    """With waits, and on rows beside: reductions, and the reading of data."""

    @cached_property
    def bubble(self) -> float:
        """Share of time in which a stage has nothing to do, once the pipeline is full.

        A batch lasts, at a rank, from the last microbatch's backward in the batch before to that in its own;
        forwards, backwards and delayed updates are work. In a synchronous schedule all stages reduce
        and update together, while nothing else can run: that counts as idle. The median over batches
        leaves out those with an evaluation or a checkpoint; then the mean over stages. Where batches
        grow, only those of the last size count; where the first ones had no delay, those after them.
        0 for fewer than five batches.
        """
        work = work_of(self.schedule)
        return fmean(
            median([1 - spent_s(batch.events, work) / batch.period_s for batch in batches]) if batches else 0.0
            for batches in self._settled
        )

    @property
    def batches(self) -> int:
        """How many were recorded that count: with those that fill and drain the pipeline."""
        return 1 + min(map(len, self._ended))

    @property
    def flush_bubble(self) -> float:
        """What a flush would leave idle at least (Narayanan et al., SC 2021, section 2.2.1)."""
        stages, microbatches = self.schedule.stages, self.schedule.microbatches
        return (stages - 1) / (microbatches + stages - 1)

    def check_long_enough(self) -> None:
        """Whether there is something between filling and draining the pipeline.

        Raises:
            ScheduleError: too few batches to say what is usual.
        """
        if self.batches < _LEAST_BATCHES:
            raise ScheduleError(
                f"the trace holds {self.batches} batches of {self.schedule.name} with "
                f"{self.schedule.microbatches} microbatches, too few to leave out those that fill and drain the pipeline; "
                f"record at least {_LEAST_BATCHES}"
            )

    @property
    def period_s(self) -> float:
        """Per batch, on the first stage."""
        return median(batch.period_s for batch in self._settled[0])

    def duration_s(self, type_: ActionType) -> tuple[float, ...]:
        """Median over all actions of a type, per stage; 0 where there is none.

        Of the two stages of a rank, it updates its own.
        """
        settled = (
            (rank, event) for rank, batches in enumerate(self._settled) for batch in batches for event in batch.events
        )
        return self._per_stage(
            event
            for rank, event in settled
            if event.action.type is type_ and (type_ is not ActionType.UPDATE or event.action.stage == rank)
        )

    def data_s(self) -> tuple[float, ...]:
        """Median time in which a forward waits for data, per stage."""
        return self._per_stage(chain.from_iterable(self.timeline.beside.get(DATA, ())))

    def _per_stage(self, events: Iterable[Event]) -> tuple[float, ...]:
        durations_s: list[list[float]] = [[] for _ in range(self.schedule.stages)]
        for event in events:
            durations_s[event.action.stage].append(event.end_s - event.start_s)
        return tuple(median(of_stage or [0.0]) for of_stage in durations_s)

    def waits(self) -> list[Waits]:
        """Per rank, medians over batches."""

        def per_batch(batches: list[Batch], share: Callable[[Batch], float]) -> float:
            return median(map(share, batches))

        def type_s(type_: ActionType) -> Callable[[Batch], float]:
            return lambda batch: spent_s(batch.events, {type_})

        return [
            Waits(
                per_batch(batches, type_s(ActionType.RECV_FORWARD)),
                per_batch(batches, type_s(ActionType.RECV_BACKWARD)),
                per_batch(batches, type_s(ActionType.REDUCE_WAIT)),
                per_batch(batches, lambda batch: batch.period_s - spent_s(batch.events, set(ActionType))),
            )
            for batches in self._settled
        ]

    def simulated(self, *, batches: int) -> Timeline:
        """The same schedule with forwards and backwards as long as here, and all else free."""
        return simulate(self.schedule, self._durations(), batches)

    @property
    def simulated_bubble(self) -> float:
        """Of an endless run of that: every forward and backward of a stage takes its median."""
        return float(steady_state(self.schedule, self._durations()).bubble_ratio)

    @property
    def replayed_bubble(self) -> float:
        """Of the same, with every single forward and backward as long as it was."""
        return self._replayed(self._durations(), COMPUTE).bubble

    def causes(self) -> dict[str, float]:
        """Seconds per batch by ``STEPS``; they add up to ``period_s``.

        Each step simulates with one more thing as it was measured, and counts what that adds.
        """
        data_s = self.data_s()
        forward_s, backward_s = self.duration_s(ActionType.FORWARD), self.duration_s(ActionType.BACKWARD)
        # A rank with two stages has two updates in its Program, and one to do.
        stages_of_rank = len(self.schedule.stages_of(0))
        update_s = tuple(one_s / stages_of_rank for one_s in self.duration_s(ActionType.UPDATE))
        without_data_s = tuple(max(f - d, 0.0) for f, d in zip(forward_s, data_s, strict=True))
        steps = {
            "even": Durations(forward_s=fmean(without_data_s), backward_s=fmean(backward_s)),
            "stages": Durations(forward_s=without_data_s, backward_s=backward_s),
            "data": Durations(forward_s=forward_s, backward_s=backward_s),
            "updates": Durations(forward_s=forward_s, backward_s=backward_s, update_s=update_s),
        }
        periods_s = {step: float(steady_state(self.schedule, durations).period_s) for step, durations in steps.items()}
        periods_s |= {
            "moments": self._replayed(steps["updates"], WORK).period_s,
            "rest": self.period_s,
        }
        before_s = [0.0, *periods_s.values()]
        return {step: period_s - before for (step, period_s), before in zip(periods_s.items(), before_s, strict=False)}

    def window(self, *, batches: int) -> Timeline:
        """Some batches in the middle of the run, cut at the ends of the first stage's batches."""
        settled = self._settled[0]
        first = max((len(settled) - batches) // 2, 0)
        shown = settled[first : first + batches]
        return cut(self.timeline, shown[0].began_s, shown[-1].ended_s)

    def _durations(self) -> Durations:
        return Durations(forward_s=self.duration_s(ActionType.FORWARD), backward_s=self.duration_s(ActionType.BACKWARD))

    def _replayed(self, durations: Durations, types: frozenset[ActionType]) -> Run:
        """A simulation in which every action of these types takes as long as it did here, all else as in ``durations``."""
        common = set.intersection(*({batch.number for batch in batches} for batches in self._settled))
        first = min(common)
        count = next(n for n in range(1, _MOST_REPLAYED + 1) if first + n not in common or n == _MOST_REPLAYED)
        stages = self.schedule.stages
        delays = {
            (rank, event.action.shifted(-first)): event.end_s
            - event.start_s
            - durations.of_stage(event.action.type, event.action.stage, stages)
            for rank, events in enumerate(self.timeline.events)
            for event in events
            if event.action.type in types and first <= event.action.batch < first + count
        }
        return Run(schedule=self.schedule, timeline=simulate(self.schedule, durations, count, delays=delays))

    @cached_property
    def _settled(self) -> list[list[Batch]]:
        """Per rank, in order, without those that fill and drain the pipeline."""
        return [batches[SETTLED] for batches in self._ended]

    @cached_property
    def _ended(self) -> list[list[Batch]]:
        """Per rank, in order, from the second one on; without those before a delay began."""
        last = self.schedule.microbatches - 1
        return [[b for b in batches_of(events, last) if self._is_of_schedule(b)] for events in self.timeline.events]

    def _is_of_schedule(self, batch: Batch) -> bool:
        """By its first microbatch: the last one may have no delay in any case."""
        first = next(e.action for e in batch.events if e.action.type is ActionType.BACKWARD)
        return first.version == self.schedule.version_of(first)


class Batch(NamedTuple):
    """One batch at one stage."""

    number: int
    began_s: float
    ended_s: float
    events: list[Event]
    """Between the backward of the last microbatch of the batch before and its own."""

    @property
    def period_s(self) -> float:
        return self.ended_s - self.began_s


def batches_of(events: Sequence[Event], last_microbatch: int) -> Iterator[Batch]:
    """What one stage did after the first last backward of a batch, batch by batch."""
    began_s: float | None = None
    during: list[Event] = []
    for event in events:
        during.append(event)
        if event.action.type is ActionType.BACKWARD and event.action.microbatch == last_microbatch:
            if began_s is not None:
                yield Batch(event.action.batch, began_s, event.end_s, during)
            during, began_s = [], event.end_s


def work_of(schedule: Schedule) -> frozenset[ActionType]:
    """What a stage is busy with; see ``Run.bubble``."""
    return WORK if any(schedule.delay) else COMPUTE


def spent_s(events: list[Event], types: frozenset[ActionType] | set[ActionType]) -> float:
    """Seconds in events of these types."""
    return sum(event.end_s - event.start_s for event in events if event.action.type in types)


def cut(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """What happened between two moments."""
    return Timeline(
        events=tuple(
            tuple(
                Event(event.action, max(event.start_s, start_s), min(event.end_s, end_s))
                for event in events
                if event.end_s > start_s and event.start_s < end_s
            )
            for events in timeline.events
        ),
        name=timeline.name,
    )
