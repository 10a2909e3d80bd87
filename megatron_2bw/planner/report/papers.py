"""The planners of the papers as ``plan --cost-model`` shows them, in their own terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.papers import mixpipe, paper
from megatron_2bw.planner.report.report import flags_of, launch_lines
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.space import Space
from megatron_2bw.planner.table import gib, table
from megatron_2bw.schedule.registry import MEGATRON

COST_MODELS = {
    "paper": (paper.plan, "PipeDream-2BW, Appendix A: no tensor parallelism, embeddings, logits or flushes"),
    "mixpipe": (mixpipe.plan, "MixPipe's performance model: two pipelines in opposite directions"),
}
"""Each: the search, and what it leaves out."""
_UNITS = {"memory_bytes": ("memory/GiB", gib), "samples_per_s": ("samples/s", lambda rate: f"{rate:,.1f}")}


def paper_lines(cost_model: str, model: Model, cluster: Cluster, global_batch: int, top: int) -> Iterator[str]:
    """The best configurations under one of ``COST_MODELS``, and the flags of the best.

    Raises:
        PlanError: nothing fits.
    """
    search, remark = COST_MODELS[cost_model]
    plans = search(model, cluster, global_batch)
    yield f"{remark}."
    yield ""
    yield from _table(plans[:top])
    layout = layout_of(plans[0], cluster, global_batch)
    yield ""
    refused = problem(model, layout)
    if refused:
        yield f"There are no flags for the best: {refused}."
    else:
        yield from launch_lines(model, layout, cluster, flags_of(model, layout))


def paper_flags(cost_model: str, model: Model, cluster: Cluster, global_batch: int) -> tuple[list[str], int]:
    """Flags of the best configuration, and on how many GPUs: the papers' planners may leave some idle.

    Raises:
        PlanError: nothing fits, or the best does not run, with the reason.
    """
    best = COST_MODELS[cost_model][0](model, cluster, global_batch)[0]
    layout = layout_of(best, cluster, global_batch)
    refused = problem(model, layout)
    if refused:
        raise PlanError(f"--cost-model {cost_model}: {refused}")
    return flags_of(model, layout), layout.gpus


def paper_json(cost_model: str, model: Model, cluster: Cluster, global_batch: int, top: int) -> dict[str, Any]:
    """The best configurations, with the fields of the paper's terms."""
    plans = COST_MODELS[cost_model][0](model, cluster, global_batch)[:top]
    return {"cost_model": cost_model, "choices": [dataclasses.asdict(plan) for plan in plans]}


def layout_of(plan: paper.Plan | mixpipe.Plan, cluster: Cluster, global_batch: int) -> Layout:
    """The Layout of ``plan``, which may not run: the papers' models leave out some rules."""
    if isinstance(plan, mixpipe.Plan):
        more = {"schedule": "mixpipe", "mixpipe_k": plan.injected, "mixpipe_gamma": plan.extra}
    else:
        recompute = Recompute.FULL if plan.recompute else Recompute.NONE
        more = {"schedule": plan.schedule if plan.depth > 1 else MEGATRON, "recompute": recompute}
    usual = Space().on(cluster.gpu)
    return Layout(
        pipeline=plan.depth,
        data=plan.width,
        microbatch=plan.microbatch,
        global_batch=global_batch,
        precision=usual.precision,
        fused_attention=usual.fused_attention,
        **more,
    )


def _table(plans: Sequence[paper.Plan | mixpipe.Plan]) -> Iterator[str]:
    names = [field.name for field in dataclasses.fields(plans[0])]
    heads, formats = zip(*(_UNITS.get(name, (name, str)) for name in names), strict=True)
    rows = ([show(getattr(plan, name)) for name, show in zip(names, formats, strict=True)] for plan in plans)
    return table(heads, rows)
