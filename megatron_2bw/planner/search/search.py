"""Every layout of a model on a cluster: the best ones, and the reason for each that is out."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.rules import delay_of, impossible_counts, module_problem
from megatron_2bw.planner.search.candidates import Candidates
from megatron_2bw.planner.search.decisions import Rejection
from megatron_2bw.planner.search.efficiency import EXACT, Progress
from megatron_2bw.planner.search.finder import Choice, Finder
from megatron_2bw.planner.search.infeasible import Infeasible
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.pipeline_layout import layout_problem, stages_of
from megatron_2bw.planner.specs.space import Space

MOST_LAYERS = 10_000
"""A bound on the time of a search."""


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
        keep: how many layouts to return that differ in more than how they save memory, beside the best one of every
            schedule.

    Raises:
        PlanError: no layout runs and fits; with the reason and the nearest choice that does.
    """
    if global_batch < 1:
        raise PlanError(f"global_batch {global_batch}: give a whole number of at least 1")
    if model.num_layers > MOST_LAYERS:
        raise PlanError(f"num_layers {model.num_layers}: the search handles at most {MOST_LAYERS}; use {MOST_LAYERS}")
    space = space or Space()
    for modules in space.recompute_modules or ():
        if problem := module_problem(model, modules, space.fp8):
            raise PlanError(problem)
    for text in space.pipeline_layout or ():
        stages = len(stages_of(text))
        sizes = {"num_layers": model.num_layers, "mtp_num_layers": model.mtp_num_layers}
        if problem := layout_problem(text, pipeline=stages, **sizes):
            raise PlanError(problem)
    candidates = Candidates(
        model=model, cluster=cluster, global_batch=global_batch, space=space, delayed=progress.delayed
    )
    found = Finder(candidates=candidates, progress=progress)
    choices = [found.with_fewest_delayed(choice) for choice in found.best(keep)]
    if not choices:
        raise PlanError(Infeasible(finder=found).why())
    for impossible, _ in impossible_counts(candidates.space).values():  # Another schedule, without it, was found.
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
