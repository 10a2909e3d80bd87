"""Candidates priced, best first, without pricing everything.

A layout that recomputes, or saves a gradient buffer, takes at least as long as the same one that does not; so the time
without either bounds all of them from below, and once a schedule has enough layouts that beat a bound, what is behind
it cannot be among the best. What fits on a base is priced once no bound is below its own. Nor is anything priced on a
base on which even the inputs of layers would not fit.
``tests/planner/test_search.py`` compares with the pricing of every layout.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Any

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.memory.memory import StageMemory
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.rules import least_microbatches
from megatron_2bw.planner.search.candidates import ROUNDING, Candidates
from megatron_2bw.planner.search.efficiency import EXACT, Progress
from megatron_2bw.planner.search.savings import SAVED, Saving, min_until
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.registry import TWO_BW


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout that runs and fits."""

    layout: Layout
    iteration: costs.Iteration
    memory: StageMemory
    """Of the stage that needs most."""
    headroom_bytes: float
    """That this stage leaves free."""
    loss_time_s: float
    """Time for the progress of one synchronous batch."""
    measured_s: float | None = None
    """Time of a batch where it ran, the median: ``--verify-top``."""
    measured_range_s: tuple[float, float] | None = None
    """The shortest and the longest."""

    def to_loss_s(self, time_s: float) -> float:
        """The same if a batch takes ``time_s``, not what is predicted."""
        return time_s * self.loss_time_s / self.iteration.time_s


def price(model: Model, layout: Layout, cluster: Cluster, *, progress: Progress = EXACT) -> Choice:
    """Time and memory of ``layout``, whether it fits or not."""
    iteration, fullest = costs.iteration(model, layout, cluster), memory.largest(model, layout)
    return Choice(
        layout=layout,
        iteration=iteration,
        memory=fullest,
        headroom_bytes=cluster.memory_bytes - fullest.total_bytes,
        loss_time_s=progress.loss_time_s(model, layout, cluster, iteration.time_s),
    )


class _Bound(Enum):
    """What no layout on a base, or no batch of a layout, is faster than."""

    OF_WORK = auto()
    OF_BASE = auto()
    OF_WHAT_FITS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Prices candidates, best first."""

    candidates: Candidates
    progress: Progress
    skipped: list[Layout] = field(init=False, default_factory=list)
    """Bases of which it is quick to tell that nothing fits."""

    def best(self, keep: int) -> list[Choice]:
        """The best ``keep`` kinds, with what else is as good, and the best of every schedule."""
        # Most are behind the best by their work alone, which is quick to tell.
        ids = itertools.count()
        bounds = [
            (self._bound_s(costs.work_s, base), next(ids), _Bound.OF_WORK, base) for base in self.candidates.bases()
        ]
        heapify(bounds)
        kept: list[Choice] = []
        leaders: dict[str, Choice] = {}

        last: Choice | None = None

        def is_beaten(schedule: str, bound_s: float) -> bool:
            rivals = leaders.get(schedule), last
            # Sums of the same times in another order may be apart in their last digits.
            return all(rival is not None and bound_s > rival.loss_time_s * (1 + ROUNDING) for rival in rivals)

        def push(layout: Layout, kind: _Bound) -> None:
            heappush(bounds, (self._bound_s(costs.least_s, layout), next(ids), kind, layout))

        while bounds:
            bound_s, _, kind, layout = heappop(bounds)
            if is_beaten(layout.schedule, bound_s):
                continue
            if kind is _Bound.OF_WORK:
                if self._may_fit(layout):
                    push(layout, _Bound.OF_BASE)
                continue
            if kind is _Bound.OF_BASE:
                for fitting in self._fitting(layout, is_beaten):
                    push(fitting, _Bound.OF_WHAT_FITS)
                continue
            choice = price(self.candidates.model, layout, self.candidates.cluster, progress=self.progress)
            insort(kept, choice, key=_order)
            leaders[layout.schedule] = min(choice, leaders.get(layout.schedule, choice), key=_order)
            firsts = [*first_of_kinds(kept).values()]
            if len(firsts) >= keep:
                last = firsts[keep - 1]
                del kept[kept.index(last) + 1 :]
        others = [choice for choice in leaders.values() if choice not in kept]
        return sorted([*kept, *others], key=_order)

    def _bound_s(self, least: Callable[[Model, Layout, Cluster], float], base: Layout) -> float:
        """What no layout on ``base`` is faster than, if no batch of ``base`` is faster than ``least`` says."""
        return self.progress.least_loss_time_s(base, least(self.candidates.model, base, self.candidates.cluster))

    def _may_fit(self, base: Layout) -> bool:
        """Whether something on ``base`` may fit, as far as is quick to tell."""
        candidates = self.candidates
        # Of the first that does not, the reason says how much it needs.
        if "memory" not in candidates.decisions.rejected:
            return True
        if not memory.needs_more(candidates.model, base, candidates.cluster.memory_bytes):
            return True
        self.skipped.append(base)
        candidates.decisions.count("memory")
        return False

    def weigh_skipped(self) -> None:
        """Find out how much they need that is quick to tell not to fit."""
        for base in self.skipped:
            if least := self._least(base):
                self.candidates.shapes.does_not_fit(*least)

    def _least(self, base: Layout) -> tuple[Layout, float] | None:
        """(layout, bytes) that needs least of ``base``, of which nothing fits; None if it has no layout.

        Where all need more than another one that does not fit, any of them, with less than it needs.
        """
        candidates = self.candidates
        # Of what needs more than another layout that does not fit, nobody asks how much more, but of the first.
        known = candidates.shapes.leanest_of if "memory" in candidates.decisions.rejected else {}
        leanest_bytes, _ = known.get(base.schedule, (math.inf, base))
        found = [self._first_that_fits(saving, leanest_bytes) for saving in self._savings(base, leanest_bytes)]
        return min(found, key=lambda pair: pair[1], default=None)

    def _fitting(self, base: Layout, is_beaten: Callable[[str, float], bool] | None = None) -> Iterator[Layout]:
        """What fits of ``base`` and may not be beaten, without layouts that save more memory than they have to."""
        candidates, capacity_bytes, nothing_fits = self.candidates, self.candidates.cluster.memory_bytes, True
        for saving in self._savings(base, capacity_bytes):
            if is_beaten and saving.is_uniform:
                work_s = self._bound_s(costs.work_s, saving.layout(saving.steps[0]))
                if is_beaten(base.schedule, work_s):
                    nothing_fits = False  # As far as anyone needs to know.
                    continue
            layout, needed = self._first_that_fits(saving, capacity_bytes)
            if needed <= capacity_bytes:
                nothing_fits = False
                yield layout
                if layout == base:
                    return
        if nothing_fits and (least := self._least(base)):
            candidates.decisions.reject("memory", "memory", candidates.shapes.does_not_fit(*least), name(least[0]))

    def with_fewest_delayed(self, choice: Choice) -> Choice:
        """``choice`` with as few delayed microbatches as take no more time, where their number is free."""
        layout, candidates = choice.layout, self.candidates
        is_free = candidates.delayed < 1 and candidates.space.delayed_microbatches is None
        if not is_free or layout.schedule not in TWO_BW:
            return choice
        most_s = choice.iteration.time_s * (1 + ROUNDING)
        counts = range(
            least_microbatches(layout.schedule, layout.pipeline, layout.extra_in_flight), layout.delayed_microbatches
        )

        def is_enough(count: int) -> bool:
            fewer = layout.but(delayed_microbatches=count)
            return costs.iteration(candidates.model, fewer, candidates.cluster).time_s <= most_s

        fewest = bisect_left(counts, True, key=is_enough)
        if fewest == len(counts):
            return choice
        fewer = layout.but(delayed_microbatches=counts[fewest])
        return price(candidates.model, fewer, candidates.cluster, progress=self.progress)

    def _savings(self, base: Layout, enough_bytes: float) -> Iterator[Saving]:
        """Ways to save memory, of which one step will do where not even all modules together save enough."""

        @cache
        def never_saves_enough(gradient_buffers: int) -> bool:
            most = {"recompute": Recompute.SELECTIVE, "gradient_buffers": gradient_buffers}
            return memory.needs_more(self.candidates.model, base, enough_bytes, **most)

        for saving in self.candidates.savings(base):
            if saving.recompute is Recompute.SELECTIVE and never_saves_enough(saving.gradient_buffers):
                yield saving._replace(steps=saving.steps[:1])
            else:
                yield saving

    def _first_that_fits(self, saving: Saving, enough_bytes: float) -> tuple[Layout, float]:
        """(layout, bytes) of the first step that fits, else of one that needs little.

        Of more than ``enough_bytes``, at least what a GPU has, the bytes may be fewer than it needs.
        """
        model, capacity_bytes = self.candidates.model, self.candidates.cluster.memory_bytes

        def needs(index: int) -> tuple[Layout, float]:
            layout = saving.layout(saving.steps[index])
            return layout, memory.largest(model, layout, enough_bytes=enough_bytes).total_bytes

        last = len(saving.steps) - 1
        if not saving.falls:
            return min_until(map(needs, range(last + 1)), capacity_bytes)
        best = needs(last)
        low, high = 0, last
        while best[1] <= capacity_bytes and low < high:
            middle = (low + high) // 2
            found = needs(middle)
            if found[1] <= capacity_bytes:
                best, high = found, middle
            else:
                low = middle + 1
        return best

    def of_other(self, **changes: Any) -> Finder:
        """The same of other ``Candidates``."""
        return replace(self, candidates=replace(self.candidates, **changes))

    def first(self) -> Layout | None:
        """One that runs and fits; None if there is none."""
        bases = filter(self._may_fit, self.candidates.bases())
        return next((layout for base in bases for layout in self._fitting(base)), None)

    def first_of_each(self, field: str) -> dict[Any, Layout]:
        """The first layout that runs, whether it fits or not, by the value of ``field``."""
        found: dict[Any, Layout] = {}
        for base in self.candidates.bases():
            if field in SAVED or getattr(base, field) not in found:
                for layout in self.candidates.layouts(base):
                    found.setdefault(getattr(layout, field), layout)
        return found


def first_of_kinds(choices: Iterable[Choice]) -> dict[tuple[object, ...], Choice]:
    """The first of those that differ only in how they save memory and spread layers."""
    firsts: dict[tuple[object, ...], Choice] = {}
    for choice in choices:
        layout = choice.layout
        sizes = layout.pipeline, layout.tensor, layout.context, layout.expert, layout.microbatch, layout.chunks
        firsts.setdefault((layout.schedule, *sizes), choice)
    return firsts


def _order(choice: Choice) -> tuple[float, float]:
    """Fastest first; of those as fast but for rounding, the one with most memory left."""
    return float(f"{choice.loss_time_s:.9g}"), -choice.headroom_bytes
