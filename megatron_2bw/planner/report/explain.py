"""Why a layout is not the best one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.naming import chosen, is_whole, name, within
from megatron_2bw.planner.report.report import compared
from megatron_2bw.planner.search.candidates import Candidates
from megatron_2bw.planner.search.finder import Choice, price
from megatron_2bw.planner.search.search import Plan, search
from megatron_2bw.planner.specs.space import Space


def explain(plan: Plan, space: Space, text: str) -> Iterator[str]:
    """Compare the layout that ``text`` names with the best of ``plan``, or say why there is none.

    A name as in the table means that layout; one that leaves out pipeline, tensor, data or microbatch size means the
    best layout that has what it says.

    Raises:
        PlanError: ``text`` is no name of a layout.
    """
    narrowed, whole = within(space, text), is_whole(text)
    try:
        if whole:
            other = _priced(plan, space, text)
        else:
            other = search(plan.model, plan.cluster, plan.global_batch, narrowed, progress=plan.progress, keep=1).best
    except PlanError as error:
        yield f"{text}: {error}"
        return
    if other.layout == plan.best.layout:
        yield f"{name(other.layout)} is the best layout."
        return
    if not whole:
        yield f"The best layout of the form {text}:"
    yield from compared(plan.best, other)


def _priced(plan: Plan, space: Space, text: str) -> Choice:
    """The very layout that ``text`` names.

    Raises:
        PlanError: it does not run, or does not fit.
    """
    candidates = Candidates(
        model=plan.model,
        cluster=plan.cluster,
        global_batch=plan.global_batch,
        space=space,
        delayed=plan.progress.delayed,
    )
    layout = candidates.layout(chosen(text))
    problem = candidates.problem(layout)
    if problem:
        raise PlanError(problem)
    choice = price(plan.model, layout, plan.cluster, progress=plan.progress)
    if choice.headroom_bytes < 0:
        raise PlanError(candidates.shapes.does_not_fit(layout, choice.memory.total_bytes))
    return choice
