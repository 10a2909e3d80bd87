"""The layouts that a model, a cluster and a batch allow, and the rules that the others break."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from typing import Any, NamedTuple

from megatron_2bw.planner import memory, mixpipe
from megatron_2bw.planner.cluster import Cluster
from megatron_2bw.planner.costs import PRICED, SCHEDULES
from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.layer import Split
from megatron_2bw.planner.layout import WITHOUT_OVERLAP, Layout, Recompute, RecomputeMethod
from megatron_2bw.planner.model import Kind, Model
from megatron_2bw.planner.multiples import divisors, nearest_divisor, nearest_multiple
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.rules import (
    DELAYED,
    MEGATRON,
    context_problem,
    expert_problem,
    least_microbatches,
    microbatch_problem,
    model_problem,
    problem,
    recompute_problem,
    schedule_problem,
    stage_problem,
    tensor_problem,
)
from megatron_2bw.planner.space import LEAST_TOKENS, Space, field_of
from megatron_2bw.planner.stages import layers_of_stages, shorter_ends
from megatron_2bw.schedule.two_bw import MOST_EXTRA_IN_FLIGHT

GIB = 2**30
STEPS = (
    *("pipelines", "tensors", "contexts", "widths", "expert_tensors", "experts", "shape"),
    *("schedules", "chunks", "schedule", "microbatches", "mixpipe_k", "mixpipe_gamma", "extra_in_flight"),
    *("sequence_parallel", "distributed_optimizer", "batch", "gradient_buffers"),
    *("recomputes", "recompute_methods", "recompute_layers", "memory"),
)
"""What decides on a layout, one after the other: dimensions of the space, and the rules on what is chosen so far."""
ROUNDING = 1e-9
"""By which a share of a whole number may miss another one."""


@dataclass(slots=True, kw_only=True)
class Rejection:
    """A rule that some layouts break."""

    step: str
    """One of ``STEPS``."""
    rule: str
    """A few words."""
    problem: Problem | str
    """The rule in full, for the first layout that breaks it."""
    example: str
    count: int = 1
    """How often; once for all layouts that differ only in what the rule does not ask for."""

    @property
    def reason(self) -> str:
        """With its remedy."""
        return str(self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How GPUs and layers are split."""

    pipeline: int
    tensor: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    first_stage_layers: int
    last_stage_layers: int

    @property
    def replicas(self) -> int:
        """Ranks with the same weights."""
        return self.data * self.context

    @property
    def name(self) -> str:
        """As in the name of a layout."""
        shared = [f"c{self.context}"] * (self.context > 1) + [f"e{self.expert}"] * (self.expert > 1)
        shared += [f"s{self.expert_tensor}"] * (self.expert_tensor != self.tensor)
        return ",".join([f"d{self.pipeline}", f"t{self.tensor}", *shared, f"w{self.data}"])


class Saving(NamedTuple):
    """One way to save memory, in one or more steps."""

    base: Layout
    gradient_buffers: int
    recompute: Recompute
    method: RecomputeMethod
    sizes: Sequence[int]
    """Of ``recompute_layers``, less time first; with equal times, the usual one first."""

    @property
    def falls(self) -> bool:
        """Each size needs less memory, and more time, than the one before."""
        return self.recompute == Recompute.FULL and self.method == RecomputeMethod.BLOCK

    def layout(self, size: int) -> Layout:
        if self.recompute == Recompute.NONE and self.gradient_buffers == self.base.gradient_buffers:
            return self.base
        return replace(
            self.base,
            gradient_buffers=self.gradient_buffers,
            recompute=self.recompute,
            recompute_method=self.method,
            recompute_layers=size,
        )


@dataclass(slots=True, kw_only=True)
class Candidates:
    """Layouts to price, and what was ruled out on the way to them."""

    model: Model
    cluster: Cluster
    global_batch: int
    space: Space
    delayed: float = 1.0
    """Share of a batch's microbatches that 2bw delays, at most."""
    rejected: dict[str, Rejection] = field(default_factory=dict)
    """By rule."""
    layouts: int = 0
    """Rejected or found so far."""
    leanest: tuple[float, Layout] | None = None
    """(bytes, layout) that needs least memory, of those that need too much."""
    widths: set[int] = field(default_factory=set)
    """Numbers of replicas that no rule but the batch size forbids."""
    furthest: str = STEPS[0]
    """The last of ``STEPS`` at which a layout was ruled out."""

    def __post_init__(self) -> None:
        self.space = self.space.on(self.cluster.gpu)

    @property
    def capacity_bytes(self) -> float:
        """Memory of one GPU."""
        return self.cluster.memory_bytes

    def stop(self, step: str) -> None:
        """Remember that ``step``, one of ``STEPS``, leaves nothing."""
        self.furthest = max(self.furthest, step, key=STEPS.index)

    def reject(self, step: str, rule: str, problem: Problem | str, example: str) -> None:
        """Count a broken rule."""
        self.stop(step)
        self.layouts += 1
        if rule in self.rejected:
            self.rejected[rule].count += 1
        else:
            self.rejected[rule] = Rejection(step=step, rule=rule, problem=problem, example=example)

    def _allowed[Value](self, dimension: str, values: Sequence[Value]) -> Sequence[Value]:
        """Those of ``values`` within the limits."""
        allowed = self.space.allows(dimension, values)
        if values and not allowed:
            self.stop(dimension)
        return allowed

    def problem(self, layout: Layout) -> Problem | None:
        """Why the search would not propose ``layout``, however much memory it needs; None if it would."""
        return (
            self._size_problem(layout.pipeline, layout.tensor, layout.context, layout.data)
            or schedule_problem(layout)
            or self._batch_problem(layout)
            or problem(self.model, layout)
            or recompute_problem(self.model, layout)
            or self._not_profiled(layout)
        )

    def _batch_problem(self, layout: Layout) -> Problem | None:
        """Why the batch does not have the microbatches that are needed."""
        return self._delayed_problem(layout) or microbatch_problem(layout, self._needed(layout))

    def _size_problem(self, pipeline: int, tensor: int, context: int, data: int) -> Problem | None:
        """Why such a layout does not run on all of the GPUs and no others."""
        gpus = self.cluster.gpus
        if not pipeline or gpus % pipeline:
            return Problem(f"pipeline {pipeline} does not divide {gpus} GPUs", f"use {nearest_divisor(gpus, pipeline)}")
        of_stage = gpus // pipeline
        if not tensor or of_stage % tensor:
            nearest = nearest_divisor(of_stage, tensor)
            return Problem(f"tensor {tensor} does not divide the {of_stage} GPUs of a stage", f"use {nearest}")
        if not context or of_stage // tensor % context:
            nearest = nearest_divisor(of_stage // tensor, context)
            rule = f"context {context} does not divide the {of_stage // tensor} x {tensor} GPUs of a stage"
            return Problem(rule, f"use {nearest}")
        of_replica = tensor * context
        if of_replica * data != of_stage:
            return Problem(
                f"data {data}: a stage has {of_stage} GPUs, {of_replica} per replica", f"use {of_stage // of_replica}"
            )
        return None

    def _shapes(self) -> Iterator[Shape]:
        """Splits of the GPUs that suit model and batch."""
        gpus, space = self.cluster.gpus, self.space
        for pipeline in self._allowed("pipelines", divisors(gpus)):
            first, last = shorter_ends(self.model.num_layers, pipeline)
            ends = product(space.first_stage_layers or (first,), space.last_stage_layers or (last,))
            for sizes, (first, last) in product(self._replicas(gpus // pipeline), ends):
                shape = Shape(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last, **sizes)
                broken = self._shape_problem(shape)
                if broken:
                    self.reject("shape", *broken, shape.name)
                else:
                    yield shape

    def _replicas(self, gpus: int) -> Iterator[dict[str, int]]:
        """What else a Shape has, of a stage with so many GPUs."""
        for tensor in self._allowed("tensors", divisors(gpus)):
            for context in self._allowed("contexts", self._contexts(gpus // tensor)):
                for data in self._allowed("widths", (gpus // (tensor * context),)):
                    sizes = {"tensor": tensor, "context": context, "data": data}
                    for split, expert in self._expert_shares(tensor, context * data):
                        yield sizes | {"expert_tensor": split, "expert": expert}

    def _expert_shares(self, tensor: int, replicas: int) -> Iterator[tuple[int, int]]:
        """(expert_tensor, expert)"""
        experts = self.model.num_experts or 1
        splits = (tensor, 1) if tensor > 1 and self.model.num_experts else (tensor,)
        if self.space.expert_tensors:
            splits = divisors(tensor * replicas)
        for split in self._allowed("expert_tensors", splits):
            ranks = tensor * replicas // split
            shares = divisors(ranks) if self.space.experts else divisors(math.gcd(experts, ranks))
            for expert in self._allowed("experts", shares):
                if expert > 1 or split == tensor or self.space.experts:
                    yield split, expert

    def _contexts(self, gpus: int) -> tuple[int, ...]:
        """Numbers of ranks that may share sequences."""
        counts = divisors(gpus)
        if self.space.contexts is not None:
            return counts
        if self.model.kind is not Kind.GPT or not self.space.fused_attention:
            return (1,)
        length = self.model.seq_length
        return tuple(n for n in counts if n == 1 or (length % (2 * n) == 0 and length // n >= LEAST_TOKENS))

    def _shape_problem(self, shape: Shape) -> tuple[str, Problem | str] | None:
        """(rule, reason)"""
        tensor, node = shape.tensor, self.cluster.gpus_per_node
        if self.space.tensors is None and tensor > node:
            problem = Problem(f"tensor {tensor}: a node has {node} GPUs", f"use {node}")
            return "tensor-parallel groups stay in a node", problem
        sequence = (True, False) if tensor > 1 else (False,)
        problems = [
            tensor_problem(
                self.model,
                tensor,
                sequence_parallel=choice,
                stage_gpus=tensor * shape.replicas,
                context=shape.context,
                expert_tensor=shape.expert_tensor,
            )
            for choice in self.space.allows("sequence_parallel", sequence) or sequence
        ]
        if all(problems):
            return "tensor-parallel ranks share heads, groups and MLP evenly", problems[0]
        least = self._layout(shape, {"global_batch": shape.data, "schedule": MEGATRON})
        problem = context_problem(self.model, least) or expert_problem(self.model, least)
        if problem:
            return "ranks share sequences and experts evenly", problem
        problem = stage_problem(self.model, least)
        if problem:
            return "stages have equally many layers, but for the ends", problem
        self.widths.add(shape.data)
        if self.global_batch % shape.data:
            nearest = nearest_multiple(self.global_batch, shape.data)
            problem = Problem(f"global_batch {self.global_batch} is no multiple of data {shape.data}", f"use {nearest}")
            return "replicas share the batch evenly", problem
        return self._never_fits(shape)

    def _never_fits(self, shape: Shape) -> tuple[str, str] | None:
        """Whether not even the layout that needs least memory fits."""
        sequence = shape.tensor > 1 and self.model.seq_length // shape.context % shape.tensor == 0
        lean = {"schedule": MEGATRON, "sequence_parallel": sequence, "distributed_optimizer": shape.replicas > 1}
        full = {"recompute": Recompute.FULL}
        plain = self._layout(shape, lean)
        fullest = memory.largest(self.model, plain)
        needed, layout = fullest.total_bytes, plain
        lasting_bytes = fullest.weights_bytes + fullest.gradients_bytes + fullest.optimizer_bytes
        # Another shape that does not fit needs less than these alone: how much less recomputing needs is of no use.
        if self.leanest is None or lasting_bytes <= max(self.leanest[0], self.capacity_bytes):
            sizes = ({"recompute_layers": size} for size in distinct_group_sizes(layers_of_stages(self.model, plain)))
            layouts = (self._layout(shape, lean | full | size) for size in sizes)
            sized = ((memory.largest(self.model, layout).total_bytes, layout) for layout in layouts)
            needed, layout = min_until(chain([(needed, plain)], sized), self.capacity_bytes)
        if needed <= self.capacity_bytes:
            return None
        return "memory, with everything recomputed and b = 1", self.does_not_fit(layout, needed)

    def does_not_fit(self, layout: Layout, needed: float) -> str:
        """The reason, in words; remembered if no other layout needs less."""
        if self.leanest is None or needed < self.leanest[0]:
            self.leanest = needed, layout
        return f"{name(layout)} needs {needed / GIB:.1f} GiB of {self.cluster.gpu.memory_gb:g} on its fullest stage"

    def layout(self, values: dict[str, Any]) -> Layout:
        """The one with these values, by dimension, and what is usual for the others.

        Raises:
            PlanError: a value that no layout has, or no layout on these GPUs.
        """
        fields = {"context": 1, "expert": 1, "expert_tensor": 0} | {
            field_of(dimension): value for dimension, value in values.items()
        }
        sizes = {size: fields[size] for size in ("pipeline", "tensor", "context", "data")}
        broken = self._size_problem(**sizes)
        if broken:
            raise PlanError(broken)
        shares = {name: fields[name] for name in ("expert", "expert_tensor")}
        shape = Shape(first_stage_layers=0, last_stage_layers=0, **sizes, **shares)
        return self._layout(shape, {"overlap_gradients": _overlaps(shape, fields["schedule"]), **fields})

    def _layout(self, shape: Shape, more: dict[str, object]) -> Layout:
        defaults = {
            "pipeline": shape.pipeline,
            "tensor": shape.tensor,
            "context": shape.context,
            "expert": shape.expert,
            "expert_tensor": shape.expert_tensor,
            "data": shape.data,
            "first_stage_layers": shape.first_stage_layers,
            "last_stage_layers": shape.last_stage_layers,
            "global_batch": self.global_batch,
            "precision": self.space.precision,
            "fused_attention": self.space.fused_attention,
        }
        return Layout(**(defaults | more))

    def bases(self) -> Iterator[Layout]:
        """Layouts without recomputation and with two gradient buffers; all others derive from them."""
        for shape in self._shapes():
            for schedule, chunks in self._schedules(shape):
                for microbatch in self._allowed("microbatches", divisors(self.global_batch // shape.data)):
                    base = {"schedule": schedule, "chunks": chunks, "microbatch": microbatch}
                    for order in self._orders(shape, schedule, microbatch):
                        yield from self._switched(shape, base | order)

    def _schedules(self, shape: Shape) -> Iterator[tuple[str, int]]:
        """(schedule, chunks)"""
        even = self._layout(shape, {"schedule": MEGATRON, "global_batch": shape.data})
        layers = math.gcd(*layers_of_stages(self.model, even))
        for schedule in self._allowed("schedules", PRICED if self.space.schedules else SCHEDULES):
            interleaves = schedule == MEGATRON and shape.pipeline > 1
            chunks = divisors(layers) if interleaves else (1,)
            if interleaves and self.space.chunks is None and self.space.schedules is None:
                chunks = chunks[1:]  # With one chunk it is 1f1b-flush.
            for count in self._allowed("chunks", chunks):
                layout = self._layout(shape, {"schedule": schedule, "chunks": count})
                problem = (
                    schedule_problem(layout) or model_problem(self.model, layout) or stage_problem(self.model, layout)
                )
                if problem:
                    self.reject("schedule", "the schedule suits depth and model", problem, name(layout))
                else:
                    yield schedule, count

    def _orders(self, shape: Shape, schedule: str, microbatch: int) -> Iterator[dict[str, int]]:
        """What a schedule leaves open of the order of its actions."""
        if schedule == "mixpipe":
            yield from self._mixpipe_orders(shape, microbatch)
            return
        if schedule not in DELAYED:
            yield {}
            return
        counts = (0, 1) if self.space.extra_in_flight is None else tuple(range(MOST_EXTRA_IN_FLIGHT + 1))
        for extra in self._allowed("extra_in_flight", counts):
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
                self.stop("mixpipe_k")
            elif gammas is not None and extra not in gammas:
                self.stop("mixpipe_gamma")
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
        if layout.schedule not in DELAYED:
            return None
        if count >= microbatches > 1:
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
        if layout.schedule in DELAYED and not layout.extra_in_flight and not self.space.tight:
            return layout.pipeline
        return least_microbatches(layout.schedule, layout.pipeline, layout.extra_in_flight)

    def _switched(self, shape: Shape, base: dict[str, object]) -> Iterator[Layout]:
        """Layouts that differ in what is not recomputation."""
        base = base | {"overlap_gradients": _overlaps(shape, base["schedule"])}
        for sequence in self._sequence_parallel(shape):
            for distributed in self._distributed(shape):
                switches = {"sequence_parallel": sequence, "distributed_optimizer": distributed}
                layout = self._layout(shape, base | switches)
                problem = self._batch_problem(layout)
                unknown = None if problem else self._not_profiled(layout)
                if problem:
                    self.reject(
                        "batch", "the batch has the microbatches that the schedule needs", problem, name(layout)
                    )
                elif unknown:
                    self.reject("batch", "the profile has measured it", unknown, name(layout))
                else:
                    self.layouts += sum(len(saving.sizes) for saving in self.savings(layout))
                    yield layout

    def _not_profiled(self, layout: Layout) -> Problem | None:
        """Why the cluster's profile, if it has one, cannot price ``layout``."""
        profile = self.cluster.profile
        return None if profile is None else profile.lacks(Split.of(layout))

    def _sequence_parallel(self, shape: Shape) -> tuple[bool, ...]:
        """On where it works, unless the space says otherwise: it costs neither time nor memory."""
        choices = self._allowed("sequence_parallel", (True, False) if shape.tensor > 1 else (False,))
        sizes = {"tensor": shape.tensor, "context": shape.context, "expert_tensor": shape.expert_tensor}
        valid = [on for on in choices if not tensor_problem(self.model, sequence_parallel=on, **sizes)]
        return tuple(valid[:1])

    def _distributed(self, shape: Shape) -> tuple[bool, ...]:
        return self._allowed("distributed_optimizer", (True, False) if shape.replicas > 1 else (False,))

    def savings(self, base: Layout) -> Iterator[Saving]:
        """The ways to save memory."""
        space = self.space
        layers = tuple(count // base.chunks for count in layers_of_stages(self.model, base))
        recomputes = self._allowed("recomputes", tuple(Recompute))
        if self.cluster.profile is not None:
            recomputes = [choice for choice in recomputes if not self._not_profiled(replace(base, recompute=choice))]
        for buffers in self._allowed("gradient_buffers", (2, 1)) if base.schedule in DELAYED else (2,):
            for recompute in recomputes:
                if recompute == Recompute.FULL:
                    for method in self._allowed("recompute_methods", tuple(RecomputeMethod)):
                        block = method == RecomputeMethod.BLOCK
                        sizes = range(1, max(layers)) if block else distinct_group_sizes(layers)
                        if space.recompute_layers is not None:
                            sizes = self._allowed("recompute_layers", tuple(range(1, max(layers) + 1)))
                        if sizes:
                            yield Saving(base, buffers, recompute, method, sizes)
                elif recompute == Recompute.NONE or not base.fused_attention or space.recomputes is not None:
                    yield Saving(base, buffers, recompute, base.recompute_method, (1,))


def _overlaps(shape: Shape, schedule: str) -> bool:
    """Whether replicas sum gradients during the backward."""
    return shape.replicas > 1 and schedule not in WITHOUT_OVERLAP


def min_until[Thing](found: Iterable[tuple[float, Thing]], enough: float) -> tuple[float, Thing]:
    """The first pair whose number is at most ``enough``, else the one with the smallest.

    >>> min_until([(5, "a"), (3, "b"), (1, "c")], 3), min_until([(5, "a"), (4, "b")], 3)
    ((3, 'b'), (4, 'b'))
    """
    best = None
    for pair in found:
        if best is None or pair[0] < best[0]:
            best = pair
        if pair[0] <= enough:
            return pair
    return best


@cache
def distinct_group_sizes(stages: tuple[int, ...]) -> tuple[int, ...]:
    """Smallest sizes of groups that cut the layers of each stage into each possible number of groups.

    >>> distinct_group_sizes((8, 8)), distinct_group_sizes((7, 8))
    ((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8))
    """
    return tuple(sorted({-(-layers // groups) for layers in stages for groups in range(1, layers + 1)}))
