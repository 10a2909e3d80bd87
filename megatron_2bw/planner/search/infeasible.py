"""Why a search finds no layout, and the nearest choice with which it would."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from megatron_2bw.planner.errors import MOST, PlanError, Problem
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.multiples import divisors, nearest_multiple
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.rules import impossible_counts
from megatron_2bw.planner.search.candidates import Candidates
from megatron_2bw.planner.search.decisions import STEPS
from megatron_2bw.planner.search.finder import Finder
from megatron_2bw.planner.specs.cluster import Cluster
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
_BEHIND = {
    "shape": (
        *("tensors", "pipelines", "contexts", "experts", "expert_tensors"),
        *("first_stage_layers", "last_stage_layers", "widths"),
    ),
    "schedule": ("schedules",),
}
"""Dimensions whose limits may be why rules of a step are broken."""


class _Choice(NamedTuple):
    """What would leave a layout: other limits, or another cluster or batch."""

    words: str
    changes: dict[str, Any]
    """Of ``Candidates``."""


class _Broken(NamedTuple):
    """A rule that leaves no layout."""

    reason: str
    remedy: str = ""
    dimension: str | None = None
    """Whose limit is to blame."""
    choice: _Choice | None = None
    """With which this limit would leave one."""


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

    @property
    def _limit(self) -> str | None:
        """The dimension whose limit ruled out the last layouts; None if none did."""
        dimension = self._candidates.decisions.furthest
        return None if getattr(self._candidates.space, dimension, None) is None else dimension

    @property
    def _lifted(self) -> Space:
        """Without limits."""
        space = self._candidates.space
        return Space(**{name: getattr(space, name) for name in (*FIXED, "dispatcher", "receives", "settings", "tight")})

    def why(self) -> str:
        """In words, and what would have one."""
        candidates, limit = self._candidates, self._limit
        batch, widths = candidates.global_batch, candidates.shapes.widths
        what = f"no layout of {billions(candidates.model.parameters)} parameters on {candidates.cluster.gpus} GPUs"
        if limit and (found := self._nearest(limit)):
            reason, choice = found
            return f"{what}: {reason}; use {choice.words}"
        if widths and all(batch % width for width in widths):
            return f"{what}: {self._why_batch()}"
        if impossible := impossible_counts(candidates.space):
            return f"{what}: {self._why_impossible(impossible)}"
        if roomy := self._of_other(cluster=_with_memory(candidates.cluster, MOST)):
            return f"{what}: {self._why_at_any_size(roomy)}"
        if limit and (found := self.finder.of_other(space=self._lifted).first()):
            return f"{what}: {self._exclusive(limit)} that fits; without limits there is {name(found)}"
        reason, more = self._too_large()
        return f"{what} fits: {reason}; use {more.words}"

    def _of_other(self, **changes: Any) -> Infeasible | None:
        """The same of other ``Candidates``; None where one of those fits."""
        finder = self.finder.of_other(**changes)
        return None if finder.first() else Infeasible(finder=finder)

    def _has_any(self, choice: _Choice, **more: Any) -> bool:
        """Whether ``choice`` leaves a layout that fits."""
        return self.finder.of_other(**choice.changes, **more).first() is not None

    def _why_impossible(self, problems: dict[str, tuple[Problem, int]]) -> str:
        """Counts that no layout has; if with others there is none either, why not."""
        words = " and ".join(f"{dimension} {count}" for dimension, (_, count) in problems.items())
        possible = {dimension: (count,) for dimension, (_, count) in problems.items()}
        choice = _Choice(f"with {words}", {"space": replace(self._candidates.space, **possible)})
        reason = ", and ".join(problem.reason for problem, _ in problems.values())
        if self._has_any(choice):
            return f"{reason}; use {words}"
        if self._has_any(choice, cluster=_with_memory(self._candidates.cluster, MOST)):
            return self._too_large_with(reason, choice)
        _, _, others = self._of_other(**choice.changes).why().partition(": ")
        return f"{reason}; and {choice.words}, {others}"

    def _why_batch(self) -> str:
        """The batch splits over no number of replicas; with what would have a layout."""
        candidates = self._candidates
        possible = ", ".join(map(str, sorted(candidates.shapes.widths)))
        reason = f"global_batch {candidates.global_batch} does not split over any possible number of replicas"
        reason += f" ({possible})"
        if other := self._nearest_batch(candidates.cluster) or self._more_gpus():
            return f"{reason}; use {other.words}"
        if other := self._nearest_batch(_with_memory(candidates.cluster, MOST)):
            return self._too_large_with(reason, other._replace(words=f"with a global_batch of {other.words}"))
        return f"{reason}; lift a limit, or use another global_batch"

    def _why_at_any_size(self, roomy: Infeasible) -> str:
        """Why not even endless memory, which ``roomy`` has, leaves one, and whether memory is in the way, too."""
        broken = roomy._broken()
        if broken.dimension and (found := self._nearest(broken.dimension)):
            return f"{broken.reason}; use {found[1].words}"
        if broken.dimension:
            return self._too_large_with(broken.reason, broken.choice._replace(words=f"with {broken.choice.words}"))
        lifted = _Choice("without limits", {"space": self._lifted})
        if found := self.finder.of_other(**lifted.changes).first():
            return f"{broken.reason}; {broken.remedy or f'{lifted.words} there is {name(found)}'}"
        if self._has_any(lifted, cluster=roomy._candidates.cluster):
            return self._too_large_with(broken.reason, lifted)
        return f"{broken.reason}; {broken.remedy}"

    def _broken(self) -> _Broken:
        """What memory has no part in."""
        limit = self._limit
        if limit is None:
            return self._last_rule()
        if found := self._nearest(limit):
            reason, choice = found
            return _Broken(reason, dimension=limit, choice=choice)
        lifted = self._of_other(space=self._lifted)
        return _Broken(self._exclusive(limit)) if lifted is None else lifted._last_rule()

    def _last_rule(self) -> _Broken:
        """The rule that comes furthest of those that are broken."""
        rejected = self._candidates.decisions.rejected.values()
        last = max(rejected, key=lambda rejection: (STEPS.index(rejection.step), rejection.count), default=None)
        if last is None:
            return _Broken("the limits exclude each other", "lift one")
        # The rule does not know what else the GPUs and the limits allow.
        for dimension in filter(partial(getattr, self._candidates.space), _BEHIND.get(last.step, ())):
            if found := self._nearest(dimension):
                return _Broken(last.problem.reason, dimension=dimension, choice=found[1])
        return _Broken(*last.problem)  # No text, which only reasons of memory are.

    def _exclusive(self, dimension: str) -> str:
        """That other limits leave nothing within this one."""
        given = ", ".join(map(str, getattr(self._candidates.space, dimension)))
        return f"{field_of(dimension)} {given} and the other limits leave none"

    def _nearest(self, dimension: str) -> tuple[str, _Choice] | None:
        """(why not as it is limited, the nearest value that leaves any); None if none does."""
        space, field = self._candidates.space, field_of(dimension)
        every = _EVERY | {"contexts": divisors(self._candidates.cluster.gpus)}
        lifted = self.finder.of_other(space=replace(space, **{dimension: every.get(dimension)}))
        if not lifted.first():
            return None
        others = lifted.first_of_each(field)
        pairs = sorted(product(getattr(space, dimension), others), key=lambda pair: _distance(*pair))
        for value, other in pairs[:_TRIALS]:
            layout = others[other]
            count = layout.pipeline if (field, other) == ("mixpipe_k", 0) else other  # Which is what 0 stands for.
            changes = {"space": replace(space, **{dimension: (count,)})}
            if self.finder.of_other(**changes).first():
                return self._rule_broken(layout, field, value), _Choice(f"{field} {count}", changes)
        return None

    def _rule_broken(self, layout: Layout, field: str, value: Any) -> str:
        """Why ``layout`` cannot have ``value``, without a remedy."""
        try:
            problem = self._candidates.problem(layout.but(**{field: value}))
        except PlanError as error:
            return error.reason
        if problem is not None:
            return problem.reason
        return f"{field} {value} {'saves no memory' if field == 'recompute' else 'leaves none'}"

    def _nearest_batch(self, cluster: Cluster) -> _Choice | None:
        """What ``cluster`` has a layout for, of batches that split over its replicas; None if there is none."""
        candidates = self._candidates
        batch, microbatches = candidates.global_batch, candidates.space.microbatches or (1,)
        sizes = {
            nearest_multiple(batch, width * size)
            for width, size in product(candidates.shapes.widths, microbatches)
            if width * size
        }
        choices = (_Choice(str(size), {"global_batch": size}) for size in sorted(sizes, key=partial(_distance, batch)))
        return next((choice for choice in choices if self._has_any(choice, cluster=cluster)), None)

    def _too_large_with(self, reason: str, choice: _Choice) -> str:
        """``reason``, and that it is not the only one: with ``choice``, which would do without it, nothing fits."""
        too_large, more = self._of_other(**choice.changes)._too_large()
        # With as many GPUs, what is asked for may be possible.
        never = impossible_counts(self._candidates.space)
        as_asked = None if never else self._more_gpus(most=more.changes["cluster"].nodes)
        remedy = f"use {as_asked.words}" if as_asked else f"{choice.words}, use {more.words}"
        return f"{reason}, and none {choice.words} fits: {too_large}; {remedy}"

    def _too_large(self) -> tuple[str, _Choice]:
        """(what of memory is missing, the cluster that has enough), where one does."""
        self.finder.weigh_skipped()
        needed, layout = self._leanest()
        reason = f"{self._candidates.shapes.does_not_fit(layout, needed)} ({self._largest_parts(layout)})"
        return reason, self._more_gpus() or self._more_memory(needed)

    def _leanest(self) -> tuple[float, Layout]:
        """(bytes, layout) of what needs least, if possible under one of the schedules that are asked for.

        Shapes are out when Megatron's own, which needs least, does not fit: then it stands for the others.
        """
        shapes, schedules = self._candidates.shapes, self._candidates.space.schedules or ()
        asked = [shapes.leanest_of[schedule] for schedule in schedules if schedule in shapes.leanest_of]
        return min(asked, key=lambda least: least[0], default=shapes.leanest)

    def _largest_parts(self, layout: Layout) -> str:
        """What takes most memory."""
        parts = memory.largest(self._candidates.model, layout).parts
        most = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
        return ", ".join(f"{part} {gib(parts[part])}" for part in most)

    def _more_gpus(self, most: float = math.inf) -> _Choice | None:
        """Of round numbers of nodes up to ``most``, the fewest that are enough, for the same batch if possible."""
        cluster, batch = self._candidates.cluster, self._candidates.global_batch
        node = cluster.whole_node
        whole = cluster if node is None else replace(cluster, gpus_per_node=node, whole_node=None)
        least = cluster.nodes + (node is None)
        counts = {count for factor in _ROUND for count in (factor, cluster.nodes * factor)}
        counts = sorted(count for count in counts if least <= count <= most)
        for share in (False, True):
            for count in counts:
                more = replace(whole, nodes=count)
                words, changes = f"{more.gpus} GPUs", {"cluster": more}
                if share:
                    changes["global_batch"] = max(batch * more.gpus // cluster.gpus, 1)
                    words += f" and a global_batch of {changes['global_batch']}"
                if self.finder.of_other(**changes).first():
                    return _Choice(words, changes)
        return None

    def _more_memory(self, needed: float) -> _Choice:
        """GPUs on which one of these layouts fits, of which the leanest needs so many bytes."""
        cluster = self._candidates.cluster
        sizes = [math.ceil(needed / GIB * factor) for factor in _MEMORIES]
        any_one = self.finder.of_other(cluster=_with_memory(cluster, MOST)).first()
        # Limits may need more than the layout that needs least.
        sizes.append(math.ceil(memory.largest(self._candidates.model, any_one).total_bytes / GIB))
        choices = (_Choice(f"GPUs with {size} GiB", {"cluster": _with_memory(cluster, size)}) for size in sizes)
        return next(choice for choice in choices if self.finder.of_other(**choice.changes).first())


def _with_memory(cluster: Cluster, memory_gb: int) -> Cluster:
    """With other GPUs, of so many GiB."""
    return replace(cluster, gpu=replace(cluster.gpu, memory_gb=memory_gb))


def _distance(value: Any, other: Any) -> tuple[Any, ...]:
    """Of numbers, the smaller one of two being nearer; others are equally near."""
    return (abs(value - other), other) if isinstance(value, int) else (0,)
