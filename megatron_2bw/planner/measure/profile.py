"""What was timed on a machine: one layer, the embedding, logits with loss, the update, and its links.

``megatron-2bw profile`` writes a profile, ``plan`` and ``estimate`` price with it in place of ``speeds`` and ``layer``.
Nothing in it depends on the number of layers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_2bw.planner.cost.layer import Works
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.work import NOTHING, Parts, Work
from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.specs.cluster import Cluster, Gpu
from megatron_2bw.planner.specs.inputs import build, checked, read_json
from megatron_2bw.planner.specs.layout import FP32_BYTES, Fp8, Layout, Optimizer, Precision, Recompute, RecomputeModule
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.space import Space

DONE = "profiled: "
"""How a line begins that the job prints after each measurement."""
LAYERS = 2
"""Of the stages that are timed."""
_ADAM_BYTES = 28
"""Per weight of an update: four fp32 numbers are read and three written."""


class Pass(NamedTuple):
    """Seconds of one microbatch through a part of the model; a backward includes what it computes again."""

    forward_s: float
    backward_s: float


class _Row:
    """A measurement; numbers above 0, but for those that may be lost in the difference of two others."""

    _MAY_BE_ZERO: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, least = getattr(self, f.name), 0 if f.name in self._MAY_BE_ZERO else None
            if (isinstance(value, int | float) and not (value > 0 or value == least)) or value == math.inf:
                raise PlanError(f"{f.name} {value!r}: give a number above 0")


@dataclass(frozen=True, kw_only=True)
class Block(_Row):
    """What one microbatch takes."""

    _MAY_BE_ZERO = ("embedding_forward_s", "embedding_backward_s", "loss_forward_s", "loss_backward_s")

    tensor: int
    microbatch: int
    recompute: Recompute
    layer_forward_s: float
    layer_backward_s: float
    layer_kept_bytes: int
    """What a forward of one layer leaves for its backward."""
    embedding_forward_s: float
    embedding_backward_s: float
    loss_forward_s: float
    loss_backward_s: float

    @property
    def layer(self) -> Pass:
        return Pass(self.layer_forward_s, self.layer_backward_s)


@dataclass(frozen=True, kw_only=True)
class Update(_Row):
    """Megatron's optimizer step, clipping and zeroing of gradients included."""

    tensor: int
    weights: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class AllReduce(_Row):
    """Of fp32 numbers, over ranks that all sum at once."""

    ranks: int
    size_bytes: int
    time_s: float


_LISTS: dict[str, type] = {"blocks": Block, "updates": Update, "all_reduces": AllReduce}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all measurements of a profile have in common, beside the model."""

    ranks: int
    precision: Precision
    fused_attention: bool
    sequence_parallel: bool
    """With several tensor-parallel ranks."""
    flags: str = ""
    """Megatron's in the runs, beside those that say the model's sizes: switches of kernels, ``--run-args``."""


@dataclass(slots=True, kw_only=True, eq=False)
class Profile:
    """Measurements on all ranks of one node, busy at once, as they are in training."""

    model: Model
    """Its number of layers does not matter."""
    setting: Setting
    date: str
    device: str = ""
    """Empty before the first measurement."""
    memory_gb: float = 0.0
    """GiB per rank."""
    versions: str = ""
    processors: int = 0
    """Of the node, where ranks are processes on a CPU; 0 where each has a GPU of its own."""
    has_bf16: bool = True
    """Whether the device has, whatever it was measured in."""
    blocks: list[Block] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    all_reduces: list[AllReduce] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            PlanError: it cannot be read, or is no profile.
        """
        values, where = read_json(str(path)), str(path)
        parts: dict[str, Any] = {}
        for name, kind, place in (("model", Model, f"{where}: model"), ("setting", Setting, where)):
            if not isinstance(values.get(name), dict):
                raise PlanError(f"{where}: {name} is missing; give a file that megatron-2bw profile wrote")
            parts[name] = build(kind, values.pop(name), place)
        for name, kind in _LISTS.items():
            rows = checked(values.pop(name, []), list, f"{where}: {name}")
            parts[name] = [build(kind, checked(row, dict, f"{where}: {name}"), f"{where}: {name}") for row in rows]
        heading = build(_Heading, values, where)
        return cls(**parts, **dataclasses.asdict(heading))

    def save(self, path: Path) -> None:
        """Write all at once: a run that is stopped leaves the file of the moment before."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)

    def continues(self, begun: Profile) -> bool:
        """Whether ``begun`` is of the same layer in the same setting."""
        return self.setting == begun.setting and _layer_of(self.model) == _layer_of(begun.model)

    @property
    def processor_share(self) -> float:
        """Of a processor, for each rank while all are busy; 1 where none has to share."""
        return min(1.0, self.processors / self.setting.ranks) if self.processors else 1.0

    def block(self, tensor: int, microbatch: int, recompute: Recompute) -> Block | None:
        """The measurement, if there is one."""
        wanted = (tensor, microbatch, recompute)
        return next((b for b in self.blocks if (b.tensor, b.microbatch, b.recompute) == wanted), None)

    def update(self, tensor: int) -> Update | None:
        """The measurement, if there is one."""
        return next((update for update in self.updates if update.tensor == tensor), None)

    @property
    def has_links(self) -> bool:
        """Whether links were measured; one rank has none."""
        return self.setting.ranks == 1 or len(self.all_reduces) > 1

    def lacks(self, split: Split) -> Problem | None:
        """Why there is no time for ``split``."""
        setting = self.setting
        sequence = setting.sequence_parallel and split.tensor > 1
        mine = {
            "precision": setting.precision,
            "fused_attention": setting.fused_attention,
            "sequence_parallel": sequence,
        }
        for name, value in mine.items():
            if getattr(split, name) != value:
                return Problem(f"{name} {getattr(split, name)}: the profile was measured with {value}", "profile again")
        for name in ("context", "expert"):
            if getattr(split, name) > 1:
                return Problem(f"{name} {getattr(split, name)}: a profile is measured with 1", "use 1")
        if self.model.num_experts and split.expert_tensor != split.tensor:
            return Problem(
                f"expert_tensor {split.expert_tensor}: a profile is measured with that of tensor", f"use {split.tensor}"
            )
        if split.precision is Precision.BF16 and split.gradient_width < FP32_BYTES:
            return Problem("gradients in bf16: a profile is measured with gradients in fp32", "leave them in fp32")
        if split.fp8 is not Fp8.NONE:
            return Problem(f"fp8 {split.fp8}: a profile is measured without", f"use fp8 {Fp8.NONE}")
        for name in ("fused_loss", "overlap_tensor"):
            if getattr(split, name):
                return Problem(f"{name}: a profile is measured without", "leave out what switches it on")
        if not split.fused_swiglu:
            return Problem("fused_swiglu False: a profile is measured with it fused", "leave out what switches it off")
        if split.modules_again not in ((), (RecomputeModule.CORE_ATTN,)):
            others = " ".join(split.modules_again)
            return Problem(
                f"recompute_modules {others}: a profile measures {RecomputeModule.CORE_ATTN}", "leave them out"
            )
        for recompute in (Recompute.NONE, split.recompute):
            if self.block(split.tensor, split.microbatch, recompute) is None:
                return Problem(
                    f"tensor {split.tensor}, microbatch {split.microbatch}, recompute {recompute}: the profile has "
                    f"{self._measured()}",
                    "profile that too",
                )
        return None

    def works(self, model: Model, split: Split) -> Works:
        """The parts of ``model``, as measured.

        Raises:
            PlanError: another model, or a split that was not measured.
        """
        self._check_model(model)
        problem = self.lacks(split)
        if problem:
            raise PlanError(problem)
        plain = self.block(split.tensor, split.microbatch, Recompute.NONE)
        block = self.block(split.tensor, split.microbatch, split.recompute)
        again_s = max(0.0, block.layer_backward_s - plain.layer_backward_s)
        return Works(
            _work(*plain.layer, again_s),
            _work(plain.embedding_forward_s, plain.embedding_backward_s),
            _work(plain.loss_forward_s, plain.loss_backward_s),
        )

    def update_s(self, layout: Layout, weights: float) -> float:
        """Time of the update of so many weights.

        Raises:
            PlanError: by another optimizer.
        """
        self._check_optimizer(layout)
        return weights * self._weight_s(layout.tensor)

    def _weight_s(self, tensor: int) -> float:
        update = self.update(tensor)
        return update.time_s / update.weights

    def link(self) -> tuple[float, float] | None:
        """(bytes/s, seconds to start) of a node's links: a ring moves ``2*(n-1)/n`` of a tensor; None for one rank.

        Raises:
            PlanError: more bytes took no longer.
        """
        if self.setting.ranks == 1:
            return None
        small, *_, large = sorted(self.all_reduces, key=lambda one: one.size_bytes)
        if large.time_s <= small.time_s or large.size_bytes == small.size_bytes or large.ranks < 2:
            raise PlanError("all_reduces: the larger sum took no longer than the smaller one; profile again")
        passed = 2 * (large.ranks - 1) / large.ranks * (large.size_bytes - small.size_bytes)
        return passed / (large.time_s - small.time_s), small.time_s

    def limited(self, space: Space) -> Space:
        """``space`` in the profile's setting; what else was not measured, the search itself leaves out.

        Raises:
            PlanError: it asks for another setting.
        """
        for name in ("precision", "fused_attention"):
            asked, mine = getattr(space, name), getattr(self.setting, name)
            if asked not in (None, mine):
                raise PlanError(f"{name} {asked}: the profile was measured with {mine}; profile again")
        self._check_optimizer(space)
        measured = tuple(choice for choice in Recompute if any(block.recompute is choice for block in self.blocks))
        return dataclasses.replace(
            space,
            recomputes=measured if space.recomputes is None else space.recomputes,
            sequence_parallel=space.sequence_parallel if self.setting.sequence_parallel else (False,),
            precision=self.setting.precision,
            fused_attention=self.setting.fused_attention,
        )

    def cluster(self) -> Cluster:
        """One node, the one that was measured; its data sheet is what a layer, the update and the links reached.

        Raises:
            PlanError: it is not finished.
        """
        self._check_finished()
        largest = max(self.blocks, key=lambda block: block.microbatch)
        weights = self.model.layer_parameters / largest.tensor
        flops = 6 * self.model.seq_length * largest.microbatch * weights
        update_bytes_per_s = _ADAM_BYTES / self._weight_s(largest.tensor)
        link = self.link()
        gpu = Gpu(
            name=self.device,
            memory_gb=self.memory_gb,
            peak_tflops=flops / sum(largest.layer) / 1e12,
            hbm_gb_s=update_bytes_per_s / 1e9,
            nvlink_gb_s=(update_bytes_per_s if link is None else link[0]) / 1e9,
            has_bf16=self.has_bf16,
        )
        return Cluster(
            name="profiled node",
            gpu=gpu,
            gpus_per_node=self.setting.ranks,
            nodes=1,
            intra_node_gb_s=gpu.nvlink_gb_s,
            inter_node_gb_s=gpu.nvlink_gb_s,
            profile=self,
        )

    def on(self, cluster: Cluster) -> Cluster:
        """``cluster``, priced with this profile; its links between nodes stay as they are.

        Raises:
            PlanError: it is not finished.
        """
        self._check_finished()
        return dataclasses.replace(cluster, profile=self)

    def _check_finished(self) -> None:
        lacks_update = any(self.update(block.tensor) is None for block in self.blocks)
        if not self.blocks or not self.has_links or lacks_update:
            raise PlanError("the profile is not finished; run megatron-2bw profile again, it goes on where it stopped")

    def _check_optimizer(self, asked: Space | Layout) -> None:
        if asked.optimizer is not Optimizer.ADAM or asked.adam_state is not None:
            other = f"optimizer {asked.optimizer}" if asked.adam_state is None else "a precision-aware optimizer"
            raise PlanError(f"{other}: a profile times Adam in fp32; leave out one of the two")

    def _check_model(self, model: Model) -> None:
        for f in dataclasses.fields(Model):
            mine, theirs = getattr(self.model, f.name), getattr(model, f.name)
            if f.compare and f.name not in ("num_layers", "name") and mine != theirs:
                raise PlanError(f"{f.name} {theirs}: the profile is of a model with {mine}; profile this one")

    def _measured(self) -> str:
        rows = sorted({(block.tensor, block.microbatch, block.recompute) for block in self.blocks})
        return ", ".join(f"t{tensor} b{microbatch} {recompute}" for tensor, microbatch, recompute in rows) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heading:
    """The fields of a profile that are single values."""

    date: str
    device: str
    memory_gb: float
    versions: str
    processors: int = 0
    has_bf16: bool = True

    def __post_init__(self) -> None:
        if self.processors < 0:
            raise PlanError(f"processors {self.processors}: give a whole number of at least 0")


def _layer_of(model: Model) -> Model:
    return dataclasses.replace(model, num_layers=1, name="")


def _work(forward_s: float, backward_s: float, again_s: float = 0.0) -> Work:
    again = Parts(measured_s=again_s) if again_s else NOTHING
    return Work.of(Parts(measured_s=forward_s), Parts(measured_s=backward_s), again)
