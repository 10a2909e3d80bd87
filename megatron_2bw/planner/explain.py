"""Why a layout is not the best one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.naming import name, within
from megatron_2bw.planner.report import compared
from megatron_2bw.planner.search import Plan, search
from megatron_2bw.planner.space import Space


def explain(plan: Plan, space: Space, text: str) -> Iterator[str]:
    """Compare the best layout that ``text`` names with the best of ``plan``, or say why there is none.

    Raises:
        PlanError: ``text`` is no name of a layout.
    """
    narrowed = within(space, text)
    try:
        other = search(plan.model, plan.cluster, plan.global_batch, narrowed, progress=plan.progress, keep=1).best
    except PlanError as error:
        yield f"{text}: {error}"
        return
    if other.layout == plan.best.layout:
        yield f"{name(other.layout)} is the best layout."
        return
    if name(other.layout) != text:
        yield f"The best layout of the form {text}:"
    yield from compared(plan.best, other)
