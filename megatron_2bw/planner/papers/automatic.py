"""K and Gamma of MixPipe for a depth and a microbatch size: the paper's optimisation, with the default memory model."""

from __future__ import annotations

from megatron_2bw.planner.memory.memory import largest
from megatron_2bw.planner.papers.mixpipe import choices
from megatron_2bw.planner.pipeline.programs import programs_of
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.clock import passes

AUTO = "auto"
"""Value of ``--mixpipe-k`` that asks for it."""


def has_choice(layout: Layout) -> bool:
    """Whether there is a K to choose: more microbatches than stages come with a rule of their own."""
    return layout.microbatches == layout.pipeline


def choose(model: Model, layout: Layout, memory_bytes: float) -> Layout:
    """``layout`` with the K and Gamma that take least time of those that fit; if none does, least memory.

    Time is that of the Programs, with a backward that takes two forwards: some need more than the paper's formula.

    Args:
        model: to train.
        layout: of mixpipe, with a choice.
        memory_bytes: of a GPU.
    """
    options = [layout.but(mixpipe_k=injected, mixpipe_gamma=extra) for injected, extra in choices(layout.pipeline)]
    needed = {option: largest(model, option).total_bytes for option in options}
    fitting = [option for option in options if needed[option] <= memory_bytes]
    if not fitting:
        return min(options, key=needed.__getitem__)
    return min(fitting, key=lambda option: (max(passes(programs_of(option)).values()), needed[option]))
