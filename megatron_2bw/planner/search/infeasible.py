"""Why a search finds no layout, and the nearest choice with which it would."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.multiples import divisors, nearest_multiple
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.rules import MEGATRON, model_problem
from megatron_2bw.planner.search.candidates import Candidates
from megatron_2bw.planner.search.decisions import STEPS
from megatron_2bw.planner.search.finder import Finder, parts_of
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.space import FIXED, Space, field_of
from megatron_2bw.planner.table import GIB, billions, gib
from megatron_2bw.schedule.systems.two_bw import MOST_EXTRA_IN_FLIGHT

_ROUND = tuple(sorted(size * 2**exponent for size in (1, 3) for exponent in range(12)))
"""Numbers of nodes, and of times as many as there are, that models and batches are likely to split over."""
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
class Infeasible:
    """A search that has found nothing.

    Args:
        finder: which has been through all candidates.
    """

    finder: Finder

    @property
    def _candidates(self) -> Candidates:
        return self.finder.candidates

    def why(self) -> str:
        """In words, and what would have one."""
        candidates = self._candidates
        batch, widths = candidates.global_batch, candidates.shapes.widths
        what = f"no layout of {billions(candidates.model.parameters)} parameters on {candidates.cluster.gpus} GPUs"
        limited = self._why_limited()
        if limited:
            return f"{what}: {limited}"
        self.finder.weigh_skipped()
        if widths and all(batch % width for width in widths):
            possible = ", ".join(map(str, sorted(widths)))
            reason = f"global_batch {batch} does not split over any possible number of replicas ({possible})"
            return f"{what}: {reason}; {self._nearest_batch() or self._more_gpus()}"
        if candidates.shapes.leanest is None or candidates.decisions.furthest == "schedule":
            return f"{what}: {self._last_rule()}"
        if refused := self._refused_model():
            return f"{what}: {refused}"
        needed, layout = self._leanest()
        reason = f"{candidates.shapes.does_not_fit(layout, needed)} ({self._largest_parts(layout)})"
        return f"{what} fits: {reason}; {self._more_gpus()}"

    def _refused_model(self) -> Problem | None:
        """Why none of the schedules that are asked for trains the model, on any number of GPUs; None if one does."""
        _, layout = self._candidates.shapes.leanest
        schedules = self._candidates.space.schedules or (MEGATRON,)
        refused = [model_problem(self._candidates.model, replace(layout, schedule=schedule)) for schedule in schedules]
        return refused[0] if all(refused) else None

    def _leanest(self) -> tuple[float, Layout] | None:
        """(bytes, layout) of what needs least, if possible under one of the schedules that are asked for.

        None where no layout was counted.

        Shapes are out when Megatron's own, which needs least, does not fit: then it stands for the others.
        """
        shapes, schedules = self._candidates.shapes, self._candidates.space.schedules or ()
        asked = [shapes.leanest_of[schedule] for schedule in schedules if schedule in shapes.leanest_of]
        return min(asked, key=lambda least: least[0], default=shapes.leanest)

    def _nearest_batch(self) -> str:
        """What to use in place of a batch that splits over no number of replicas; empty if that is not enough."""
        candidates = self._candidates
        batch, microbatches = candidates.global_batch, candidates.space.microbatches or (1,)
        sizes = {
            nearest_multiple(batch, width * size) for width, size in product(candidates.shapes.widths, microbatches)
        }
        nearest = sorted(sizes, key=lambda size: _distance(batch, size))
        return next((f"use {size}" for size in nearest if self.finder.of_other(global_batch=size).first()), "")

    def _last_rule(self) -> str:
        """The rule that comes furthest of those that are broken, and the nearest choice."""
        rejected = self._candidates.decisions.rejected.values()
        last = max(rejected, key=lambda rejection: (STEPS.index(rejection.step), rejection.count), default=None)
        if last is None:
            return "the limits exclude each other; lift one"
        if last.step == "shape":
            # The rule does not know what else the GPUs and the limits allow.
            limited = (dimension for dimension in _OF_SHAPE if getattr(self._candidates.space, dimension))
            nearest = next(((field_of(one), found) for one in limited if (found := self._nearest(one))), None)
            if nearest is not None:
                field, (_, layout) = nearest
                return f"{PlanError(last.problem).reason}; use {field} {getattr(layout, field)}"
        return last.reason

    def _nearest(self, dimension: str) -> tuple[Any, Layout] | None:
        """(value of the limit, layout with the nearest one that leaves any); None if none does."""
        space, field = self._candidates.space, field_of(dimension)
        every = _EVERY | {"contexts": divisors(self._candidates.cluster.gpus)}
        lifted = self.finder.of_other(space=replace(space, **{dimension: every.get(dimension)}))
        others = lifted.first_of_each(field)
        pairs = sorted(product(getattr(space, dimension), others), key=lambda pair: _distance(*pair))
        for value, other in pairs[:_TRIALS]:
            if self.finder.of_other(space=replace(space, **{dimension: (other,)})).first():
                return value, others[other]
        return None

    def _why_limited(self) -> str | None:
        """Which limit leaves no layout, the rule behind it and the nearest value that leaves one; None if none does."""
        space, dimension = self._candidates.space, self._candidates.decisions.furthest
        limit = getattr(space, dimension, None)
        if limit is None:
            return None
        field, nearest = field_of(dimension), self._nearest(dimension)
        if nearest is not None:
            value, layout = nearest
            return f"{self._rule_broken(layout, field, value)}; use {field} {getattr(layout, field)}"
        lifted = Space(**{name: getattr(space, name) for name in (*FIXED, "dispatcher", "tight")})
        found = self.finder.of_other(space=lifted).first()
        given = ", ".join(map(str, limit))
        return (
            found and f"{field} {given} and the other limits leave none; without limits there is {name(found.layout)}"
        )

    def _rule_broken(self, layout: Layout, field: str, value: Any) -> str:
        """Why ``layout`` cannot have ``value``, without a remedy."""
        try:
            problem = self._candidates.problem(replace(layout, **{field: value}))
        except PlanError as error:
            return error.reason
        return f"{field} {value} leaves none" if problem is None else problem.reason

    def _largest_parts(self, layout: Layout) -> str:
        """What takes most memory."""
        parts = parts_of(memory.largest(self._candidates.model, layout))
        most = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
        return ", ".join(f"{part} {gib(parts[part])}" for part in most)

    def _more_gpus(self) -> str:
        """Of round numbers of nodes, the fewest that are enough, for the same batch if possible."""
        cluster, batch = self._candidates.cluster, self._candidates.global_batch
        node = cluster.whole_node
        whole = cluster if node is None else replace(cluster, gpus_per_node=node, whole_node=None)
        least = cluster.nodes + (node is None)
        counts = sorted({count for factor in _ROUND for count in (factor, cluster.nodes * factor) if count >= least})
        for share in (False, True):
            for count in counts:
                more = replace(whole, nodes=count)
                size = max(batch * more.gpus // cluster.gpus, 1) if share else batch
                if self.finder.of_other(cluster=more, global_batch=size).first():
                    return f"use {more.gpus} GPUs" + (f" and a global_batch of {size}" if share else "")
        leanest = self._leanest()
        if leanest is None:
            return "lift a limit, or use another global_batch"
        for factor in _MEMORIES:  # Limits may need more than the layout that needs least.
            memory_gb = math.ceil(leanest[0] / GIB * factor)
            if self.finder.of_other(cluster=replace(cluster, gpu=replace(cluster.gpu, memory_gb=memory_gb))).first():
                return f"use GPUs with {memory_gb} GiB"
        return "lift a limit"


def _distance(value: Any, other: Any) -> tuple[Any, ...]:
    """Of numbers, the smaller one of two being nearer; others are equally near."""
    return (abs(value - other), other) if isinstance(value, int) else (0,)
