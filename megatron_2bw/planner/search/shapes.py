"""Splits of a cluster's GPUs and a model's layers, and the rules that the others break."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product

from megatron_2bw.planner.cost.ends import balanced_ends, shorter_ends
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.cost.updates import send_s
from megatron_2bw.planner.errors import Problem
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.multiples import divisors, nearest_divisor, nearest_multiple
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.pipeline.stages import layers_of_stages
from megatron_2bw.planner.rules import context_problem, expert_problem, stage_problem, tensor_problem
from megatron_2bw.planner.search.decisions import Decisions
from megatron_2bw.planner.search.savings import group_sizes, min_until
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Dispatcher, Fp8, Layout, Precision, Recompute
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.specs.space import FIXED, LEAST_TOKENS
from megatron_2bw.planner.table import GIB
from megatron_2bw.schedule.registry import MEGATRON


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
    microbatches: tuple[int, ...] = ()
    """Sizes b that the ends are balanced for; empty: all."""

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


_SIZES = tuple(field.name for field in fields(Shape) if field.name != "microbatches")
"""What a Layout has, too."""


@dataclass(slots=True, kw_only=True)
class Shapes:
    """Splits of the GPUs that suit model and batch."""

    model: Model
    cluster: Cluster
    global_batch: int
    decisions: Decisions
    leanest_of: dict[str, tuple[float, Layout]] = field(default_factory=dict)
    """By schedule: (bytes, layout) that needs least memory, of those that need too much."""
    widths: set[int] = field(default_factory=set)
    """Numbers of replicas that no rule but the batch size forbids."""

    def __iter__(self) -> Iterator[Shape]:
        gpus, space = self.cluster.gpus, self.decisions.space
        for pipeline in self.decisions.allowed("pipelines", divisors(gpus)):
            first, last = shorter_ends(self.model.num_layers, pipeline)
            ends = [*product(space.first_stage_layers or (first,), space.last_stage_layers or (last,))]
            for sizes in self._replicas(gpus // pipeline):
                shapes = [
                    Shape(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last, **sizes)
                    for first, last in ends
                ]
                unshared = self._split_problem(shapes[0])
                for shape in shapes if unshared else chain(shapes, self._balanced(shapes[0])):
                    broken = unshared or self._stages_problem(shape)
                    if broken:
                        self.decisions.reject("shape", *broken, shape.name)
                    else:
                        yield shape

    def _balanced(self, shape: Shape) -> Iterator[Shape]:
        """With other layers on the ends, for a faster slowest stage or a smaller first, where nothing says how many."""
        space, machine = self.decisions.space, machine_of(self.cluster)
        if shape.pipeline == 1 or space.has_ends or self.global_batch % shape.data:
            return
        usual = shape.first_stage_layers, shape.last_stage_layers
        usual_fields = {"schedule": MEGATRON} | self._usual_sequence(shape)
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for microbatch in space.allows("microbatches", self.microbatches(shape)):
            layouts = [
                self.layout(shape, usual_fields | {"microbatch": microbatch, "recompute": recompute})
                for recompute in (Recompute.NONE, Recompute.FULL)
            ]
            ends = {
                balanced_ends(self.model, one, machine, waits_s)
                for one in layouts
                if not self.not_profiled(one)
                for waits_s in {0.0, send_s(self.model, one, machine)}
            } | {usual}
            # The first stage holds most activations: with as few layers as the last it may have to recompute none.
            ends |= {(last, first) for first, last in ends if last < first}
            for pair in ends - {(0, 0), usual}:
                found[pair] = (*found.get(pair, ()), microbatch)
        for (first, last), microbatches in found.items():
            yield replace(shape, first_stage_layers=first, last_stage_layers=last, microbatches=microbatches)

    def not_profiled(self, layout: Layout) -> Problem | None:
        """Why the cluster's profile, if it has one, cannot price ``layout``."""
        profile = self.cluster.profile
        return None if profile is None else profile.lacks(Split.of(layout))

    def microbatches(self, shape: Shape) -> tuple[int, ...]:
        """Sizes b to try with ``shape``."""
        return shape.microbatches or divisors(self.global_batch // shape.data)

    def _replicas(self, gpus: int) -> Iterator[dict[str, int]]:
        """What else a Shape has, of a stage with so many GPUs."""
        for tensor in self.decisions.allowed("tensors", divisors(gpus)):
            for context in self.decisions.allowed("contexts", self._contexts(gpus // tensor)):
                for data in self.decisions.allowed("widths", (gpus // (tensor * context),)):
                    sizes = {"tensor": tensor, "context": context, "data": data}
                    for split, expert in self._expert_shares(tensor, context * data):
                        yield sizes | {"expert_tensor": split, "expert": expert}

    def _expert_shares(self, tensor: int, replicas: int) -> Iterator[tuple[int, int]]:
        """(expert_tensor, expert)"""
        experts = self.model.num_experts or 1
        splits = (tensor, 1) if tensor > 1 and self.model.num_experts else (tensor,)
        if self.decisions.space.expert_tensors and self.model.num_experts:
            splits = divisors(tensor * replicas)
        for split in self.decisions.allowed("expert_tensors", splits) if self.model.num_experts else splits:
            ranks = tensor * replicas // split
            shares = divisors(ranks) if self.decisions.space.experts else divisors(math.gcd(experts, ranks))
            for expert in self.decisions.allowed("experts", shares):
                yield split, expert

    def _contexts(self, gpus: int) -> tuple[int, ...]:
        """Numbers of ranks that may share sequences."""
        counts = divisors(gpus)
        if self.decisions.space.contexts is not None:
            return counts
        if self.model.kind is not Kind.GPT or not self.decisions.space.fused_attention:
            return (1,)
        length = self.model.seq_length
        return tuple(n for n in counts if n == 1 or (length % (2 * n) == 0 and length // n >= LEAST_TOKENS))

    def _split_problem(self, shape: Shape) -> tuple[str, Problem | str] | None:
        """(rule, reason): ranks cannot share the model so, whatever layers are on which stage."""
        tensor, node = shape.tensor, self.cluster.gpus_per_node
        if self.decisions.space.tensors is None and node % tensor:
            problem = Problem(f"tensor {tensor}: a node has {node} GPUs", f"use {nearest_divisor(node, tensor)}")
            return "tensor-parallel groups stay in a node", problem
        sequence = (True, False) if tensor > 1 else (False,)
        problems = [
            tensor_problem(self.model, shape, sequence_parallel=choice)
            for choice in self.decisions.space.allows("sequence_parallel", sequence) or sequence
        ]
        if all(problems):
            return "tensor-parallel ranks share heads, groups and MLP evenly", problems[0]
        least = self.layout(shape, {"global_batch": shape.data, "schedule": MEGATRON})
        problem = context_problem(self.model, least) or expert_problem(self.model, least)
        return ("ranks share sequences and experts evenly", problem) if problem else None

    def _stages_problem(self, shape: Shape) -> tuple[str, Problem | str] | None:
        """(rule, reason): no stages with these layers, or none that fit."""
        is_given = self.decisions.space.pipeline_layout is not None  # Then other stages than these are tried.
        problem = stage_problem(self.model, self.layout(shape, {"global_batch": shape.data, "schedule": MEGATRON}))
        if problem and not is_given:
            return "stages have equally many layers, but for the ends", problem
        self.widths.add(shape.data)
        if self.global_batch % shape.data:
            nearest = nearest_multiple(self.global_batch, shape.data)
            problem = Problem(f"global_batch {self.global_batch} is no multiple of data {shape.data}", f"use {nearest}")
            return "replicas share the batch evenly", problem
        return None if is_given else self._never_fits(shape)

    def _never_fits(self, shape: Shape) -> tuple[str, str] | None:
        """Whether not even the layout that needs least memory fits."""
        lean = {"schedule": MEGATRON, "distributed_optimizer": shape.replicas > 1} | self._usual_sequence(shape)
        full = {"recompute": Recompute.FULL}
        plain = self.layout(shape, lean)
        fullest = memory.largest(self.model, plain)
        needed, layout = fullest.total_bytes, plain
        lasting_bytes = fullest.weights_bytes + fullest.gradients_bytes + fullest.optimizer_bytes
        # Another shape that does not fit needs less than these alone: how much less recomputing needs is of no use.
        if self.leanest is None or lasting_bytes <= max(self.leanest[0], self.cluster.memory_bytes):
            sizes = group_sizes(self.model, layers_of_stages(self.model, plain))
            layouts = (self.layout(shape, lean | full | {"recompute_layers": size}) for size in sizes)
            sized = ((layout, memory.largest(self.model, layout).total_bytes) for layout in layouts)
            layout, needed = min_until(chain([(plain, needed)], sized), self.cluster.memory_bytes)
        if needed <= self.cluster.memory_bytes:
            return None
        return "memory, with everything recomputed and b = 1", self.does_not_fit(layout, needed)

    def _usual_sequence(self, shape: Shape) -> dict[str, bool]:
        """Sequence parallelism where it works."""
        works = shape.tensor > 1 and self.model.seq_length // shape.context % shape.tensor == 0
        return {"sequence_parallel": works}

    @property
    def leanest(self) -> tuple[float, Layout] | None:
        """The same of all schedules; None if nothing was found to need too much."""
        return min(self.leanest_of.values(), key=lambda least: least[0], default=None)

    def does_not_fit(self, layout: Layout, needed: float) -> str:
        """The reason, in words; remembered if no other layout needs less."""
        least = self.leanest_of.get(layout.schedule)
        if least is None or needed < least[0]:
            self.leanest_of[layout.schedule] = needed, layout
        return f"{name(layout)} needs {needed / GIB:.1f} GiB of {self.cluster.gpu.memory_gb:g} on its fullest stage"

    def layout(self, shape: Shape, more: dict[str, object]) -> Layout:
        """With these fields, and what is usual for the others."""
        space = self.decisions.space
        defaults = {name: getattr(shape, name) for name in _SIZES}
        defaults |= {name: getattr(space, name) for name in FIXED}
        defaults["dispatcher"] = space.dispatcher if shape.expert > 1 else Dispatcher.ALLTOALL
        defaults["gradients_in_fp32"] = space.adam_state is not None and space.precision is Precision.FP16
        if more.get("schedule") != MEGATRON:
            defaults["receives"] = space.receives
        if space.settings:
            defaults |= self._settings(more)
        return Layout(**{"global_batch": self.global_batch, **defaults, **more})

    def _settings(self, more: dict[str, object]) -> dict[str, bool]:
        """What no search decides, of a layout with these fields."""
        space = self.decisions.space
        can_have = {
            "overlap_tensor": more.get("sequence_parallel", False),
            "overlap_transfers": more.get("chunks", 1) > 1,
            "fp8_parameters": space.fp8 is not Fp8.NONE and more.get("distributed_optimizer", False),
            "gradients_in_bf16": space.precision is Precision.BF16,
            "gradients_in_fp32": space.precision is Precision.FP16,
            "fused_swiglu": self.model.swiglu,
        }
        return {name: value for name, value in space.settings if can_have[name]}

    def size_problem(self, pipeline: int, tensor: int, context: int, data: int) -> Problem | None:
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
