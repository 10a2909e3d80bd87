"""The layouts that a model, a cluster and a batch allow, and the rules that the others break."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_2bw.planner.cost.costs import PRICED, SCHEDULES
from megatron_2bw.planner.cost.ends import counted_ends
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.multiples import divisors
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.papers import mixpipe
from megatron_2bw.planner.pipeline.stages import layers_of_chunks, layers_of_stages
from megatron_2bw.planner.rules import (
    least_microbatches,
    microbatch_problem,
    model_problem,
    problem,
    recompute_problem,
    schedule_problem,
    stage_problem,
    tensor_problem,
)
from megatron_2bw.planner.search.decisions import Decisions
from megatron_2bw.planner.search.savings import Saving, group_sizes, module_sets
from megatron_2bw.planner.search.shapes import Shape, Shapes
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.kernels import optimizer_problem
from megatron_2bw.planner.specs.layout import WITHOUT_OVERLAP, Layout, Recompute, RecomputeMethod, RecomputeModule
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.pipeline_layout import chunks_of, stages_of
from megatron_2bw.planner.specs.space import Space, field_of
from megatron_2bw.schedule.registry import MEGATRON, TWO_BW
from megatron_2bw.schedule.systems.two_bw import MOST_EXTRA_IN_FLIGHT

_WITHOUT_ENDS = {"first_stage_layers": 0, "last_stage_layers": 0}
"""Where a ``pipeline_layout`` says how many layers they have."""
ROUNDING = 1e-9
"""By which a share of a whole number may miss another one."""


@dataclass(slots=True, kw_only=True)
class Candidates:
    """Layouts to price, and what was ruled out on the way to them."""

    model: Model
    cluster: Cluster
    global_batch: int
    space: Space
    delayed: float = 1.0
    """Share of a batch's microbatches that 2bw delays, at most."""
    decisions: Decisions = field(init=False)
    shapes: Shapes = field(init=False)
    _counts: dict[tuple[object, ...], int] = field(init=False, default_factory=dict)
    _sets: dict[Split, tuple[tuple[tuple[RecomputeModule, ...], ...], ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.space = self.space.on(self.cluster.gpu)
        self.decisions = Decisions(space=self.space)
        self.shapes = Shapes(
            model=self.model, cluster=self.cluster, global_batch=self.global_batch, decisions=self.decisions
        )

    def problem(self, layout: Layout) -> Problem | None:
        """Why the search would not propose ``layout``, however much memory it needs; None if it would."""
        return (
            self.shapes.size_problem(layout.pipeline, layout.tensor, layout.context, layout.data)
            or schedule_problem(layout)
            or self._batch_problem(layout)
            or problem(self.model, layout)
            or recompute_problem(self.model, layout)
            or self.shapes.not_profiled(layout)
        )

    def _batch_problem(self, layout: Layout) -> Problem | None:
        """Why the batch does not have the microbatches that are needed."""
        return self._delayed_problem(layout) or microbatch_problem(layout, self._needed(layout))

    def layout(self, values: dict[str, Any]) -> Layout:
        """The one with these values, by dimension, and what is usual for the others.

        Raises:
            PlanError: a value that no layout has, or no layout on these GPUs.
        """
        fields = {"context": 1, "expert": 1, "expert_tensor": 0} | {
            field_of(dimension): value for dimension, value in values.items()
        }
        sizes = {size: fields[size] for size in ("pipeline", "tensor", "context", "data")}
        broken = self.shapes.size_problem(**sizes)
        if broken:
            raise PlanError(broken)
        shares = {name: fields[name] for name in ("expert", "expert_tensor")}
        shape = Shape(first_stage_layers=0, last_stage_layers=0, **sizes, **shares)
        return self.shapes.layout(shape, {**_overlaps(shape, fields), **fields})

    def bases(self) -> Iterator[Layout]:
        """Layouts without recomputation and with two gradient buffers; all others derive from them."""
        for shape in self.shapes:
            for scheduled in self._schedules(shape):
                for microbatch in self.decisions.allowed("microbatches", self.shapes.microbatches(shape)):
                    base = scheduled | {"microbatch": microbatch}
                    for order in self._orders(shape, base["schedule"], microbatch):
                        yield from self._switched(shape, base | order)

    def _schedules(self, shape: Shape) -> Iterator[dict[str, Any]]:
        """Schedules, with what says how many chunks a stage has and which layers."""
        for schedule in self.decisions.allowed("schedules", PRICED if self.space.schedules else SCHEDULES):
            ways = [*self._spread(shape, interleaves=schedule == MEGATRON and shape.pipeline > 1)]
            counts = self.decisions.allowed("chunks", [way["chunks"] for way in ways])
            for fields in ({"schedule": schedule} | way for way in ways if way["chunks"] in counts):
                layout = self.shapes.layout(shape, fields)
                of_model = model_problem(self.model, layout) or stage_problem(self.model, layout)
                if problem := schedule_problem(layout):
                    self.decisions.reject("schedule", "the schedule suits the depth", problem, name(layout))
                elif of_model:
                    self.decisions.reject("model", "the schedule suits the model", of_model, name(layout))
                else:
                    yield fields

    def _spread(self, shape: Shape, *, interleaves: bool) -> Iterator[dict[str, Any]]:
        """Ways to spread the layers: as given, or evenly, also with embedding and loss counted as layers."""
        if self.space.pipeline_layout is not None:
            for text in self.space.pipeline_layout:
                problem = self._layout_problem(text, shape.pipeline, interleaves=interleaves)
                chunks = 0 if problem else chunks_of(text, shape.pipeline)
                if problem:
                    self.decisions.reject("schedule", "stages are those of the layout", problem, shape.name)
                elif chunks >= (2 if interleaves and self.space.schedules is None else 1):
                    yield {"chunks": chunks, "pipeline_layout": text} | _WITHOUT_ENDS
            return
        even = self.shapes.layout(shape, {"schedule": MEGATRON, "global_batch": shape.data})
        counts = divisors(math.gcd(*layers_of_stages(self.model, even))) if interleaves else (1,)
        if interleaves and self.space.chunks is None and self.space.schedules is None:
            counts = counts[1:]  # With one chunk it is 1f1b-flush.
        yield from ({"chunks": count} for count in counts)
        if interleaves and not self.space.has_ends and not shape.microbatches:
            for count, text in counted_ends(self.model.num_layers, self.model.mtp_num_layers, shape.pipeline):
                yield {"chunks": count, "pipeline_layout": text} | _WITHOUT_ENDS

    def _layout_problem(self, text: str, pipeline: int, *, interleaves: bool) -> Problem | None:
        """Why so many ranks do not run what ``text`` describes, in chunks or without."""
        stages, gpus = len(stages_of(text)), self.cluster.gpus
        reason = f"pipeline_layout {text!r} has {stages} stages"
        depths = [depth for depth in divisors(math.gcd(stages, gpus)) if depth > 1]
        nearest = min(depths, key=lambda depth: abs(depth - pipeline), default=0)
        remedy = f"use pipeline {nearest}" if nearest else f"use a multiple of {divisors(stages)[-1]} GPUs"
        if stages % pipeline:
            return Problem(f"{reason}, no multiple of pipeline {pipeline}", remedy)
        if stages > pipeline and not interleaves:
            return Problem(f"{reason}, and several per rank take schedule {MEGATRON} on several ranks", remedy)
        return None

    def _orders(self, shape: Shape, schedule: str, microbatch: int) -> Iterator[dict[str, int]]:
        """What a schedule leaves open of the order of its actions."""
        if schedule == "mixpipe":
            yield from self._mixpipe_orders(shape, microbatch)
            return
        if schedule not in TWO_BW:
            yield {}
            return
        counts = (0, 1) if self.space.extra_in_flight is None else tuple(range(MOST_EXTRA_IN_FLIGHT + 1))
        for extra in self.decisions.allowed("extra_in_flight", counts):
            for count in self._delayed(shape, microbatch):
                yield {"extra_in_flight": extra, "delayed_microbatches": count}

    def _mixpipe_orders(self, shape: Shape, microbatch: int) -> Iterator[dict[str, int]]:
        """K and Gamma, which more microbatches than stages leave no choice of."""
        ks, gammas, stages = self.space.mixpipe_k, self.space.mixpipe_gamma, shape.pipeline
        has_choice = self.global_batch == stages * shape.data * microbatch
        for injected, extra in mixpipe.choices(stages) if has_choice else [(0, 0)]:
            # As many as stages is the default, and Chimera's order.
            k = injected % stages
            if ks is not None and injected not in ks and k not in ks:
                self.decisions.stop("mixpipe_k")
            elif gammas is not None and extra not in gammas:
                self.decisions.stop("mixpipe_gamma")
            else:
                yield {"mixpipe_k": k, "mixpipe_gamma": extra}

    def _delayed(self, shape: Shape, microbatch: int) -> tuple[int, ...]:
        """How many microbatches of a batch are delayed: what is asked for, or else as many as may be."""
        if self.space.delayed_microbatches is not None:
            return self.space.delayed_microbatches
        return (0,) if self.delayed == 1 else (self._most_delayed(self.global_batch // (shape.data * microbatch)),)

    def _most_delayed(self, microbatches: int) -> int:
        """Of so many; at least one, which may be too many."""
        return max(int(self.delayed * microbatches * (1 + ROUNDING)), 1)

    def _delayed_problem(self, layout: Layout) -> Problem | None:
        """Why the share of a batch that may be delayed, or what was asked for of it, does not suit the batch."""
        count, microbatches = layout.delayed_microbatches, layout.microbatches
        if layout.schedule not in TWO_BW:
            return None
        if count == microbatches > 1:  # The same as all of them.
            return Problem(f"delayed_microbatches {count}: a batch has {microbatches} microbatches", "leave it out")
        if self.delayed == 1:
            return None
        least = least_microbatches(layout.schedule, layout.pipeline, layout.extra_in_flight)
        if least > self.delayed * microbatches * (1 + ROUNDING):
            enough = math.ceil(least / self.delayed * (1 - ROUNDING)) * layout.microbatch * layout.data
            return Problem(
                f"microbatches {microbatches}: {layout.schedule} delays at least {least} of them on {layout.pipeline} "
                f"stages, more than {self.delayed:g} of a batch",
                f"raise global_batch to {enough}",
            )
        most = self._most_delayed(microbatches)
        if not 0 < count <= most:
            given = count or microbatches
            return Problem(f"delayed_microbatches {given}: more than {self.delayed:g} of {microbatches}", f"use {most}")
        return None

    def _needed(self, layout: Layout) -> int:
        """Microbatches, at least."""
        if layout.schedule in TWO_BW and not layout.extra_in_flight and not self.space.tight:
            return layout.pipeline
        return least_microbatches(layout.schedule, layout.pipeline, layout.extra_in_flight)

    def _switched(self, shape: Shape, base: dict[str, object]) -> Iterator[Layout]:
        """Layouts that differ in what is not recomputation."""
        for sequence in self._sequence_parallel(shape):
            for distributed in self._distributed(shape):
                fields = base | {"sequence_parallel": sequence, "distributed_optimizer": distributed}
                layout = self.shapes.layout(shape, fields | _overlaps(shape, fields))
                problem = self._batch_problem(layout)
                unknown = None if problem else self.shapes.not_profiled(layout)
                if problem:
                    self.decisions.reject(
                        "batch", "the batch has the microbatches that the schedule needs", problem, name(layout)
                    )
                elif unknown:
                    self.decisions.reject("batch", "the profile has measured it", unknown, name(layout))
                else:
                    self.decisions.layouts += self._ways(layout)
                    yield layout

    def _ways(self, base: Layout) -> int:
        """How many layouts there are on ``base``: as many as on others whose stages have as many layers."""
        alike = base.schedule in TWO_BW, layers_of_chunks(self.model, base)
        if self.cluster.profile is not None:  # It may have measured recomputation of some sizes only.
            alike += (Split.of(base),)
        if alike not in self._counts:
            self._counts[alike] = sum(len(saving.steps) for saving in self.savings(base))
        return self._counts[alike]

    def _sequence_parallel(self, shape: Shape) -> tuple[bool, ...]:
        """On where it works, unless the space says otherwise: it costs neither time nor memory."""
        choices = self.decisions.allowed("sequence_parallel", (True, False) if shape.tensor > 1 else (False,))
        valid = [on for on in choices if not tensor_problem(self.model, shape, sequence_parallel=on)]
        return tuple(valid[:1])

    def _distributed(self, shape: Shape) -> tuple[bool, ...]:
        usual = (True, False) if shape.replicas > 1 else (False,)
        if self.space.adam_state is not None or self.space.distributed_optimizer == (True,):
            usual = (True,)
        choices = self.decisions.allowed("distributed_optimizer", usual)
        used = self.space.optimizer, self.space.precision
        return tuple(on for on in choices if not optimizer_problem(*used, distributed=on))

    def layouts(self, base: Layout) -> Iterator[Layout]:
        """``base`` with each step of each way to save memory."""
        return (saving.layout(step) for saving in self.savings(base) for step in saving.steps)

    def savings(self, base: Layout) -> Iterator[Saving]:
        """The ways to save memory."""
        space = self.space
        layers = layers_of_chunks(self.model, base)
        recomputes = self.decisions.allowed("recomputes", tuple(Recompute))
        if self.cluster.profile is not None:
            recomputes = [choice for choice in recomputes if not self.shapes.not_profiled(base.but(recompute=choice))]
        for buffers in self.decisions.allowed("gradient_buffers", (2, 1)) if base.schedule in TWO_BW else (2,):
            for recompute in recomputes:
                if recompute == Recompute.FULL:
                    for method in self.decisions.allowed("recompute_methods", tuple(RecomputeMethod)):
                        block = method == RecomputeMethod.BLOCK
                        sizes = range(1, max(layers)) if block else group_sizes(self.model, layers)
                        if space.recompute_layers is not None:
                            most = 1 if self.model.mtp_num_layers and not block else max(layers)
                            sizes = self.decisions.allowed("recompute_layers", tuple(range(1, most + 1)))
                        if sizes:
                            yield Saving(base, buffers, recompute, method, sizes)
                        else:
                            self.decisions.stop("recompute_methods")
                elif recompute == Recompute.NONE:
                    yield Saving(base, buffers, recompute, base.recompute_method, (1,))
                else:
                    chains = self._module_sets(base)
                    if not chains:
                        self.decisions.stop("recomputes")
                    for sets in chains:
                        yield Saving(base, buffers, recompute, base.recompute_method, sets)

    def _module_sets(self, base: Layout) -> tuple[tuple[tuple[RecomputeModule, ...], ...], ...]:
        """Of selective recomputation, in chains of which the first that fits is the fastest."""
        if self.space.recompute_modules is not None:
            return tuple((modules,) for modules in self.space.recompute_modules)
        if self.cluster.profile is not None:  # It has measured what is usual.
            return ((base.recompute_modules,),)
        split = Split.of(base)
        if split not in self._sets:
            lacks = () if self.cluster.gpu.has_bf16 else (RecomputeModule.MOE_ACT,)
            self._sets[split] = module_sets(self.model, base, machine_of(self.cluster), but=lacks)
        return self._sets[split]


def _overlaps(shape: Shape, fields: Mapping[str, Any]) -> dict[str, bool]:
    """What replicas do during forwards and backwards, where that is faster than before and after them."""
    sums = shape.replicas > 1 and fields["schedule"] not in WITHOUT_OVERLAP
    passes_at_once = shape.pipeline == 1 or fields.get("chunks", 1) > 1  # Else each stage waits for the one before.
    gathers = sums and passes_at_once and fields.get("distributed_optimizer", False)
    return {"overlap_gradients": sums, "overlap_parameters": gathers}
