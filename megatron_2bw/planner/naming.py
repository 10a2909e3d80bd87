"""Layouts as short words: ``2bw:d8,t4,w2,b1,selective,sp,do``."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.specs.inputs import modules_of
from megatron_2bw.planner.specs.layout import Layout, Recompute, RecomputeMethod, RecomputeModule
from megatron_2bw.planner.specs.pipeline_layout import EMBEDDING
from megatron_2bw.planner.specs.space import Space
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.registry import MEGATRON, canonical_name

_COUNTS = {
    "d": "pipelines",
    "t": "tensors",
    "c": "contexts",
    "e": "experts",
    "s": "expert_tensors",
    "w": "widths",
    "b": "microbatches",
    "v": "chunks",
    "f": "first_stage_layers",
    "l": "last_stage_layers",
    "x": "extra_in_flight",
    "n": "delayed_microbatches",
    "g": "gradient_buffers",
    "k": "mixpipe_k",
    "y": "mixpipe_gamma",
}
_SWITCHES = {
    "sp": ("sequence_parallel", True),
    "nosp": ("sequence_parallel", False),
    "do": ("distributed_optimizer", True),
    "nodo": ("distributed_optimizer", False),
}
_RECOMPUTE = re.compile(r"(none|selective|full)|(block|uniform)(\d+)")


def name(layout: Layout) -> str:
    """``layout`` in one word, without what is as usual.

    d, t, c, e, w: pipeline, tensor, context, expert and data-parallel size; s: ranks that split an expert, if not t;
    b: microbatch size; v: chunks; f, l: layers of the first and the last stage, if they have a number of their own;
    such as Et|tL: what each stage holds, where that is chosen freely; sp: sequence parallel; do: distributed optimizer;
    blockN, uniformN: full recomputation; such as moe_act+mlp: modules of selective recomputation; x: extra in flight;
    n: delayed microbatches; g: gradient buffers; k, y: mixpipe's K and Gamma.

    >>> name(Layout(schedule="2bw", pipeline=4, data=2, tensor=8, microbatch=2, global_batch=64, recompute="full"))
    '2bw:d4,t8,w2,b2,uniform1'
    """
    parts = [f"d{layout.pipeline}", f"t{layout.tensor}"]
    parts += [f"c{layout.context}"] * (layout.context > 1) + [f"e{layout.expert}"] * (layout.expert > 1)
    parts += [f"s{layout.expert_tensor}"] * (layout.expert_tensor != layout.tensor)
    parts += [f"w{layout.data}", f"b{layout.microbatch}"]
    parts += [f"v{layout.chunks}"] * (layout.chunks > 1)
    parts += [f"f{layout.first_stage_layers}"] * (layout.first_stage_layers > 0)
    parts += [f"l{layout.last_stage_layers}"] * (layout.last_stage_layers > 0)
    parts += [layout.pipeline_layout.replace(",", "")] * bool(layout.pipeline_layout)
    if layout.recompute == Recompute.FULL:
        parts.append(f"{layout.recompute_method}{layout.recompute_layers}")
    elif layout.modules_again == (RecomputeModule.CORE_ATTN,):
        parts.append(layout.recompute)
    elif layout.modules_again:
        parts.append("+".join(layout.modules_again))
    parts += ["sp"] * layout.sequence_parallel + ["do"] * layout.distributed_optimizer
    parts += [f"x{layout.extra_in_flight}"] * (layout.extra_in_flight > 0)
    parts += [f"n{layout.delayed_microbatches}"] * (layout.delayed_microbatches > 0)
    parts += [f"g{layout.gradient_buffers}"] * (layout.gradient_buffers != 2)
    parts += [f"k{layout.mixpipe_k}"] * (layout.mixpipe_k > 0) + [f"y{layout.mixpipe_gamma}"] * (
        layout.mixpipe_gamma > 0
    )
    return f"{layout.schedule}:{','.join(parts)}"


def chosen(text: str) -> dict[str, Any]:
    """Value by dimension of a Space, of what the name ``text`` says.

    >>> chosen("2bw:d8,sp")
    {'schedules': '2bw', 'pipelines': 8, 'sequence_parallel': True}

    Raises:
        PlanError: ``text`` is no name of a layout.
    """
    schedule, colon, rest = text.partition(":")
    if not colon and "," in schedule:
        raise PlanError(f"layout {text!r} begins with no schedule; write such as 2bw:{text}")
    values: dict[str, Any] = {"schedules": schedule_name(schedule)}
    for part in filter(None, rest.split(",")):
        said = _said(part)
        if said is None:
            raise PlanError(
                f"layout {text!r}: {part!r} is none of {', '.join(f'{key}N' for key in _COUNTS)}, "
                f"{', '.join(_SWITCHES)}, Et|tL, none, selective, full, blockN, uniformN, moe_act+mlp; write "
                "such as 2bw:d4,t2,w1,b1"
            )
        if said.keys() & values.keys():
            raise PlanError(f"layout {text!r}: {part!r} says what another part says; leave one out")
        values |= said
    return values


def _said(part: str) -> dict[str, Any] | None:
    """Value by dimension of a Space, of one part of a name; None if it is none."""
    count, recompute = re.fullmatch(r"([a-z])(\d{1,18})", part), _RECOMPUTE.fullmatch(part)
    if count and count[1] in _COUNTS and part != "s0":
        return {_COUNTS[count[1]]: int(count[2])}
    if part.startswith(EMBEDDING):
        return {"pipeline_layout": part}
    if part in _SWITCHES:
        dimension, value = _SWITCHES[part]
        return {dimension: value}
    if (modules := part.split("+")) and set(modules) <= set(RecomputeModule):
        return {"recomputes": Recompute.SELECTIVE, "recompute_modules": modules_of(modules, "layout")}
    if recompute and recompute[1]:
        return {"recomputes": Recompute(recompute[1])}
    if recompute:
        method, layers = RecomputeMethod(recompute[2]), int(recompute[3])
        return {"recomputes": Recompute.FULL, "recompute_methods": method, "recompute_layers": layers}
    return None


def is_whole(text: str) -> bool:
    """Whether ``text`` has all that the name of every layout says.

    >>> is_whole("2bw:d8,t4,w2,b1"), is_whole("2bw:d8,t4,sp")
    (True, False)
    """
    return chosen(text).keys() >= {"pipelines", "tensors", "widths", "microbatches"}


def within(space: Space, text: str) -> Space:
    """``space`` narrowed to what ``text`` names; parts that it leaves out stay open.

    >>> within(Space(), "2bw:d8,t4").pipelines
    (8,)

    Raises:
        PlanError: ``text`` is no name of a layout.
    """
    return dataclasses.replace(space, **{dimension: (value,) for dimension, value in chosen(text).items()})


def schedule_name(text: str) -> str:
    """The schedule called ``text``, which may be an alias, or Megatron's own.

    Raises:
        PlanError: there is none; the message lists the names.
    """
    try:
        return text if text == MEGATRON else canonical_name(text)
    except ScheduleError as error:
        raise PlanError(f"{error.message}, {MEGATRON}") from error
