"""Every layout of a model on a cluster: the best ones, and the reason for each that is out.

Exhaustive without pricing everything. A layout that recomputes, or saves a gradient buffer, takes at least as long as
the same one that does not; so the time without either bounds all of them from below, and once a schedule has enough
layouts that beat a bound, what is behind it cannot be among the best. ``tests/planner/test_search.py`` compares with
the pricing of every layout.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any

from megatron_2bw.planner import costs, memory
from megatron_2bw.planner.candidates import ROUNDING, Candidates
from megatron_2bw.planner.cluster import Cluster
from megatron_2bw.planner.decisions import STEPS, Rejection
from megatron_2bw.planner.efficiency import EXACT, Progress
from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.layout import Layout
from megatron_2bw.planner.memory import StageMemory
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.multiples import divisors, nearest_multiple
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.rules import MEGATRON, TWO_BW, count_problem, delay_of, least_microbatches, model_problem
from megatron_2bw.planner.savings import Saving, min_until
from megatron_2bw.planner.space import Space, field_of
from megatron_2bw.planner.table import GIB, billions, gib
from megatron_2bw.schedule.two_bw import MOST_EXTRA_IN_FLIGHT

MOST_LAYERS = 10_000
"""A bound on the time of a search."""
_FACTORS = tuple(sorted(size * 2**exponent for size in (1, 3) for exponent in range(12)))
"""Of more nodes, where there are not enough."""
_MEMORIES = (1, 1.25, 1.5, 2, 3, 4)
"""Times as much as the layout that needs least, where no number of nodes is enough."""
_TRIALS = 8
"""Values of a limit to try, the nearest first."""
_EVERY = {"extra_in_flight": tuple(range(MOST_EXTRA_IN_FLIGHT + 1))}
"""All values of dimensions that are searched for some of them."""
_OF_SHAPE = (
    "tensors",
    "pipelines",
    "contexts",
    "experts",
    "expert_tensors",
    "first_stage_layers",
    "last_stage_layers",
    "widths",
)
"""Dimensions that decide on how GPUs and layers are split."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The outcome of a search."""

    model: Model
    cluster: Cluster
    global_batch: int
    progress: Progress
    """With gradients one step old."""
    choices: tuple[Choice, ...]
    """The best ones, and the best one of every schedule; the best of all first."""
    rejected: tuple[Rejection, ...]
    layouts: int
    """Decided on: rejected, beaten or priced."""
    assumption: str = ""
    """What the progress rests on, if it was not given."""

    @property
    def best(self) -> Choice:
        """The shortest time to a loss."""
        return self.choices[0]

    def best_of(self, *, delayed: bool) -> Choice | None:
        """The best with gradients one step old, or with exact ones."""
        delay = 1 if delayed else 0
        ranked = (c for c in self.choices if delay_of(c.layout) == delay and c.layout.schedule != "pipedream")
        return next(ranked, None)


def search(
    model: Model,
    cluster: Cluster,
    global_batch: int,
    space: Space | None = None,
    *,
    progress: Progress = EXACT,
    keep: int = 20,
) -> Plan:
    """Find the layouts with the shortest time to a loss.

    Args:
        model: to train.
        cluster: all of its GPUs are used.
        global_batch: samples B = b * w * m.
        space: limits of the search.
        progress: with gradients one step old.
        keep: how many layouts to return, beside the best one of every schedule.

    Raises:
        PlanError: no layout runs and fits; with the reason and the nearest choice that does.
    """
    if global_batch < 1:
        raise PlanError(f"global_batch {global_batch}: give a whole number of at least 1")
    if model.num_layers > MOST_LAYERS:
        raise PlanError(f"num_layers {model.num_layers}: the search handles at most {MOST_LAYERS}; use {MOST_LAYERS}")
    candidates = Candidates(
        model=model, cluster=cluster, global_batch=global_batch, space=space or Space(), delayed=progress.delayed
    )
    found = _Search(candidates=candidates, progress=progress)
    choices = [found.with_fewest_delayed(choice) for choice in found.best(keep)]
    if not choices:
        raise PlanError(found.why_none())
    for field in ("extra_in_flight", "gradient_buffers", "mixpipe_k"):
        for count in getattr(candidates.space, field) or ():
            if impossible := count_problem(field, count):  # Another schedule, without it, was found.
                raise PlanError(impossible)
    return Plan(
        model=model,
        cluster=cluster,
        global_batch=global_batch,
        progress=progress,
        choices=tuple(choices),
        rejected=tuple(sorted(candidates.decisions.rejected.values(), key=lambda rejection: -rejection.count)),
        layouts=candidates.decisions.layouts,
    )


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


def parts_of(stage: StageMemory) -> dict[str, float]:
    """Bytes of ``stage`` by component, in words."""
    names = [field.name for field in fields(stage) if field.name.endswith("_bytes")]
    return {name.removesuffix("_bytes").replace("_", " "): getattr(stage, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Prices candidates, best first."""

    candidates: Candidates
    progress: Progress

    def best(self, keep: int) -> list[Choice]:
        """The best ``keep``, and the best of every schedule."""
        # Most are behind the best by their work alone, which is quick to tell.
        bounds = [(self._bound_s(costs.work_s, base), i, base, False) for i, base in enumerate(self.candidates.bases())]
        heapify(bounds)
        kept: list[Choice] = []
        leaders: dict[str, Choice] = {}
        while bounds:
            bound_s, i, base, is_closest = heappop(bounds)
            leader = leaders.get(base.schedule)
            rivals = [leader, kept[-1] if len(kept) == keep else None]
            if all(rival is not None and bound_s > rival.loss_time_s for rival in rivals):
                continue
            if not is_closest:
                heappush(bounds, (self._bound_s(costs.least_s, base), i, base, True))
                continue
            for choice in self._fitting(base):
                insort(kept, choice, key=_order)
                leaders[base.schedule] = min(choice, leaders.get(base.schedule, choice), key=_order)
            del kept[keep:]
        others = [choice for choice in leaders.values() if choice not in kept]
        return sorted([*kept, *others], key=_order)

    def _bound_s(self, least: Callable[[Model, Layout, Cluster], float], base: Layout) -> float:
        """What no layout on ``base`` is faster than, if no batch of ``base`` is faster than ``least`` says."""
        return self.progress.least_loss_time_s(base, least(self.candidates.model, base, self.candidates.cluster))

    def _fitting(self, base: Layout) -> Iterator[Choice]:
        """What fits of ``base``, without layouts that save more memory than they have to."""
        candidates, smallest = self.candidates, (math.inf, base)
        for saving in candidates.savings(base):
            needed, layout = self._first_that_fits(saving)
            if needed <= candidates.cluster.memory_bytes:
                yield price(candidates.model, layout, candidates.cluster, progress=self.progress)
                if layout == base:
                    return
            smallest = min(smallest, (needed, layout), key=lambda pair: pair[0])
        if candidates.cluster.memory_bytes < smallest[0] < math.inf:
            candidates.decisions.reject(
                "memory", "memory", candidates.shapes.does_not_fit(smallest[1], smallest[0]), name(smallest[1])
            )

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
            fewer = replace(layout, delayed_microbatches=count)
            return costs.iteration(candidates.model, fewer, candidates.cluster).time_s <= most_s

        fewest = bisect_left(counts, True, key=is_enough)
        if fewest == len(counts):
            return choice
        fewer = replace(layout, delayed_microbatches=counts[fewest])
        return price(candidates.model, fewer, candidates.cluster, progress=self.progress)

    def _first_that_fits(self, saving: Saving) -> tuple[float, Layout]:
        """(bytes, layout) of the first size that fits, else of one that needs little."""

        model, capacity_bytes = self.candidates.model, self.candidates.cluster.memory_bytes

        def needs(index: int) -> tuple[float, Layout]:
            layout = saving.layout(saving.sizes[index])
            return memory.largest(model, layout).total_bytes, layout

        last = len(saving.sizes) - 1
        if not saving.falls:
            found = (needs(index) for index in range(last + 1))
            return min_until(found, capacity_bytes)
        best = needs(last)
        low, high = 0, last
        while best[0] <= capacity_bytes and low < high:
            middle = (low + high) // 2
            needed = needs(middle)
            if needed[0] <= capacity_bytes:
                best, high = needed, middle
            else:
                low = middle + 1
        return best

    def why_none(self) -> str:
        """Why there is no layout, and what would have one."""
        candidates = self.candidates
        batch, widths = candidates.global_batch, candidates.shapes.widths
        what = f"no layout of {billions(candidates.model.parameters)} parameters on {candidates.cluster.gpus} GPUs"
        limited = self._why_limited()
        if limited:
            return f"{what}: {limited}"
        if widths and all(batch % width for width in widths):
            possible = ", ".join(map(str, sorted(widths)))
            reason = f"global_batch {batch} does not split over any possible number of replicas ({possible})"
            return f"{what}: {reason}{self._nearest_batch()}"
        if candidates.shapes.leanest is None or candidates.decisions.furthest == "schedule":
            return f"{what}: {self._last_rule()}"
        if refused := self._refused_model():
            return f"{what}: {refused}"
        needed, layout = self._leanest()
        reason = f"{candidates.shapes.does_not_fit(layout, needed)} ({self._largest_parts(layout)})"
        return f"{what} fits: {reason}; {self._more_gpus()}"

    def _refused_model(self) -> Problem | None:
        """Why none of the schedules that are asked for trains the model, on any number of GPUs; None if one does."""
        _, layout = self.candidates.shapes.leanest
        schedules = self.candidates.space.schedules or (MEGATRON,)
        refused = [model_problem(self.candidates.model, replace(layout, schedule=schedule)) for schedule in schedules]
        return refused[0] if all(refused) else None

    def _leanest(self) -> tuple[float, Layout]:
        """(bytes, layout) of what needs least, if possible under one of the schedules that are asked for.

        Shapes are out when Megatron's own, which needs least, does not fit: then it stands for the others.
        """
        shapes, schedules = self.candidates.shapes, self.candidates.space.schedules or ()
        asked = [shapes.leanest_of[schedule] for schedule in schedules if schedule in shapes.leanest_of]
        return min(asked, key=lambda least: least[0], default=shapes.leanest)

    def _nearest_batch(self) -> str:
        """What to use in place of a batch that splits over no number of replicas; empty if that is not enough."""
        candidates = self.candidates
        batch, microbatches = candidates.global_batch, candidates.space.microbatches or (1,)
        sizes = {
            nearest_multiple(batch, width * size) for width, size in product(candidates.shapes.widths, microbatches)
        }
        nearest = sorted(sizes, key=lambda size: _distance(batch, size))
        return next((f"; use {size}" for size in nearest if self._with(global_batch=size)._any()), "")

    def _last_rule(self) -> str:
        """The rule that comes furthest of those that are broken, and the nearest choice."""
        rejected = self.candidates.decisions.rejected.values()
        last = max(rejected, key=lambda rejection: (STEPS.index(rejection.step), rejection.count), default=None)
        if last is None:
            return "the limits exclude each other; lift one"
        if last.step == "shape":
            # The rule does not know what else the GPUs and the limits allow.
            limited = (dimension for dimension in _OF_SHAPE if getattr(self.candidates.space, dimension))
            nearest = next(((field_of(one), found) for one in limited if (found := self._nearest(one))), None)
            if nearest is not None:
                field, (_, layout) = nearest
                return f"{PlanError(last.problem).reason}; use {field} {getattr(layout, field)}"
        return last.reason

    def _nearest(self, dimension: str) -> tuple[Any, Layout] | None:
        """(value of the limit, layout with the nearest one that leaves any); None if none does."""
        space, field = self.candidates.space, field_of(dimension)
        others: dict[Any, Layout] = {}
        every = _EVERY | {"contexts": divisors(self.candidates.cluster.gpus)}
        for layout in self._with(space=replace(space, **{dimension: every.get(dimension)}))._all():
            others.setdefault(getattr(layout, field), layout)
        pairs = sorted(product(getattr(space, dimension), others), key=lambda pair: _distance(*pair))
        for value, other in pairs[:_TRIALS]:
            if self._with(space=replace(space, **{dimension: (other,)}))._any():
                return value, others[other]
        return None

    def _why_limited(self) -> str | None:
        """Which limit leaves no layout, the rule behind it and the nearest value that leaves one; None if none does."""
        space, dimension = self.candidates.space, self.candidates.decisions.furthest
        limit = getattr(space, dimension, None)
        if limit is None:
            return None
        field, nearest = field_of(dimension), self._nearest(dimension)
        if nearest is not None:
            value, layout = nearest
            return f"{self._rule_broken(layout, field, value)}; use {field} {getattr(layout, field)}"
        kept = {name: getattr(space, name) for name in ("optimizer", "precision", "fp8", "fused_attention", "tight")}
        lifted = Space(**kept)
        found = self._with(space=lifted)._any()
        given = ", ".join(map(str, limit))
        return (
            found and f"{field} {given} and the other limits leave none; without limits there is {name(found.layout)}"
        )

    def _rule_broken(self, layout: Layout, field: str, value: Any) -> str:
        """Why ``layout`` cannot have ``value``, without a remedy."""
        try:
            problem = self.candidates.problem(replace(layout, **{field: value}))
        except PlanError as error:
            return error.reason
        return f"{field} {value} leaves none" if problem is None else problem.reason

    def _with(self, **changes: Any) -> _Search:
        """Another search, of other ``Candidates``."""
        given = {
            name: getattr(self.candidates, name) for name in ("model", "cluster", "global_batch", "space", "delayed")
        }
        return replace(self, candidates=Candidates(**given | changes))

    def _any(self) -> Choice | None:
        """A layout that runs and fits."""
        return next((choice for base in self.candidates.bases() for choice in self._fitting(base)), None)

    def _all(self) -> Iterator[Layout]:
        """Every layout that runs, whether it fits or not."""
        for base in self.candidates.bases():
            for saving in self.candidates.savings(base):
                yield from (saving.layout(size) for size in saving.sizes)

    def _largest_parts(self, layout: Layout) -> str:
        """What takes most memory."""
        parts = parts_of(memory.largest(self.candidates.model, layout))
        most = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
        return ", ".join(f"{part} {gib(parts[part])}" for part in most)

    def _more_gpus(self) -> str:
        """The fewest more nodes that are enough, for the same batch if possible."""
        cluster, batch, node = self.candidates.cluster, self.candidates.global_batch, self.candidates.cluster.whole_node
        whole = cluster if node is None else replace(cluster, gpus_per_node=node, whole_node=None)
        counts = [cluster.nodes * factor for factor in _FACTORS if factor > 1 or node is not None]
        for share in (False, True):
            for count in counts:
                more = replace(whole, nodes=count)
                size = batch * more.gpus // cluster.gpus if share else batch
                if self._with(cluster=more, global_batch=size)._any():
                    return f"use {more.gpus} GPUs" + (f" and a global_batch of {size}" if share else "")
        for factor in _MEMORIES:  # Limits may need more than the layout that needs least.
            memory_gb = math.ceil(self._leanest()[0] / GIB * factor)
            if self._with(cluster=replace(cluster, gpu=replace(cluster.gpu, memory_gb=memory_gb)))._any():
                return f"use GPUs with {memory_gb} GiB"
        return "lift a limit"


def _distance(value: Any, other: Any) -> tuple[Any, ...]:
    """Of numbers, the smaller one of two being nearer; others are equally near."""
    return (abs(value - other), other) if isinstance(value, int) else (0,)


def _order(choice: Choice) -> tuple[float, float]:
    return choice.loss_time_s, -choice.headroom_bytes
