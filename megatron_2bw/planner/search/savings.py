"""Ways to fit: recomputation and a gradient buffer less, in steps that need less memory and mostly more time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import chain, combinations
from typing import NamedTuple

from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.memory.activations import of_layer
from megatron_2bw.planner.rules import module_problem
from megatron_2bw.planner.specs.layout import Layout, Recompute, RecomputeMethod, RecomputeModule
from megatron_2bw.planner.specs.model import Model

_OF_MOE = frozenset({RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS})
"""Parts of ``RecomputeModule.MOE``."""

SAVED = frozenset({"gradient_buffers", "recompute", "recompute_method", "recompute_layers", "recompute_modules"})
"""What a ``Saving`` may change of its base."""


class Saving(NamedTuple):
    """One way to save memory, in one or more steps."""

    base: Layout
    gradient_buffers: int
    recompute: Recompute
    method: RecomputeMethod
    steps: Sequence[int | tuple[RecomputeModule, ...]]
    """Values of ``recompute_layers``, or of ``recompute_modules``: less time first; with equal times, the usual one."""

    @property
    def falls(self) -> bool:
        """Each step needs less memory, and more time, than the one before."""
        return self.recompute == Recompute.FULL and self.method == RecomputeMethod.BLOCK

    @property
    def is_uniform(self) -> bool:
        """Every layer is computed again, whatever the step."""
        return self.recompute == Recompute.FULL and self.method == RecomputeMethod.UNIFORM

    def layout(self, step: int | tuple[RecomputeModule, ...]) -> Layout:
        if self.recompute == Recompute.NONE and self.gradient_buffers == self.base.gradient_buffers:
            return self.base
        return self.base.but(
            gradient_buffers=self.gradient_buffers,
            recompute=self.recompute,
            recompute_method=self.method,
            **{"recompute_modules" if self.recompute == Recompute.SELECTIVE else "recompute_layers": step},
        )


def min_until[Thing](found: Iterable[tuple[Thing, float]], enough: float) -> tuple[Thing, float]:
    """The first pair whose number is at most ``enough``, else the one with the smallest.

    >>> min_until([("a", 5), ("b", 3), ("c", 1)], 3), min_until([("a", 5), ("b", 4)], 3)
    (('b', 3), ('b', 4))
    """
    best = None
    for pair in found:
        if best is None or pair[1] < best[1]:
            best = pair
        if pair[1] <= enough:
            return pair
    return best


def module_sets(
    model: Model, layout: Layout, machine: Machine, *, but: Collection[RecomputeModule] = ()
) -> tuple[tuple[tuple[RecomputeModule, ...], ...], ...]:
    """Modules that save memory if they are computed again, alone and together, in chains: what takes less time first.

    Sets of one chain take as long as each other in layers without experts, so that the first that fits is the fastest.
    ``but``: modules that are out.

    >>> from megatron_2bw.planner.specs.cluster import CLUSTERS
    >>> from megatron_2bw.planner.specs.models import MODELS
    >>> from megatron_2bw.planner.cost.speeds import machine_of
    >>> layout = Layout(schedule="2bw", pipeline=4, data=8, expert=8, global_batch=64)
    >>> (chain,) = module_sets(MODELS["mixtral-8x7b"], layout, machine_of(CLUSTERS["dgx-h100"]))
    >>> for modules in chain:
    ...     print(*modules)
    layernorm
    moe_act
    layernorm moe_act
    moe
    layernorm moe
    """
    kinds = (model, model.dense) if model.dense_layers else (model,)
    whole = layout.but(recompute=Recompute.NONE)

    def of(*modules: RecomputeModule) -> Layout:
        return layout.but(recompute=Recompute.SELECTIVE, recompute_modules=modules)

    @cache
    def again_s(modules: tuple[RecomputeModule, ...]) -> tuple[float, float]:
        works = works_of(model, Split.of(of(*modules)), machine)
        return works.layer.again_s, works.dense.again_s

    useful = [
        module
        for module in RecomputeModule
        if module not in but
        and not module_problem(model, (module,), layout.fp8)
        and any(of_layer(kind, of(module)).kept < of_layer(kind, whole).kept for kind in kinds)
    ]
    together = chain.from_iterable(combinations(useful, count + 1) for count in range(len(useful)))
    sets = [modules for modules in together if RecomputeModule.MOE not in modules or _OF_MOE.isdisjoint(modules)]
    chains: dict[float, list[tuple[RecomputeModule, ...]]] = {}
    for modules in sorted(sets, key=again_s):
        chains.setdefault(again_s(modules)[1], []).append(modules)
    return tuple(map(tuple, chains.values()))


def group_sizes(model: Model, stages: tuple[int, ...]) -> tuple[int, ...]:
    """Of layers that are computed again together: those of further predicted tokens know groups of one alone."""
    return (1,) if model.mtp_num_layers else distinct_group_sizes(stages)


@cache
def distinct_group_sizes(stages: tuple[int, ...]) -> tuple[int, ...]:
    """Smallest sizes of groups that cut the layers of each stage into each possible number of groups.

    >>> distinct_group_sizes((8, 8)), distinct_group_sizes((7, 8))
    ((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8))
    """
    return tuple(sorted({-(-layers // groups) for layers in stages for groups in range(1, layers + 1)}))
