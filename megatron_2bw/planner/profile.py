"""What was timed on a machine: one layer, the embedding, logits with loss, the update, and its links.

``megatron-2bw profile`` writes a profile, ``plan`` and ``estimate`` price with it in place of ``speeds`` and ``layer``.
Nothing in it depends on the number of layers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_2bw.planner.cluster import Cluster, Gpu
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.inputs import build, checked, model_of, read_json
from megatron_2bw.planner.layer import NOTHING, Parts, Split, Work, Works
from megatron_2bw.planner.layout import Precision, Recompute
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.space import Space

LAYERS = 2
"""Of the stages that are timed."""
_ADAM_BYTES = 28
"""Per weight of an update: four fp32 numbers are read and three written."""


class Pass(NamedTuple):
    """Seconds of one microbatch through a part of the model; a backward includes what it computes again."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one microbatch takes with one split of the work."""

    tensor: int
    microbatch: int
    sequence_parallel: bool
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Megatron's optimizer step, clipping included."""

    tensor: int
    weights: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Of fp32 numbers, over ranks that all sum at once."""

    ranks: int
    size_bytes: int
    time_s: float


_LISTS: dict[str, type] = {"blocks": Block, "updates": Update, "all_reduces": AllReduce}


@dataclass(slots=True, kw_only=True, eq=False)
class Profile:
    """Measurements on ``ranks`` ranks of one node, all busy at once, as they are in training."""

    model: Model
    """Its number of layers does not matter."""
    ranks: int
    precision: Precision
    fused_attention: bool
    date: str
    device: str = ""
    """Empty before the first measurement."""
    memory_gb: float = 0.0
    """GiB per rank."""
    versions: str = ""
    blocks: list[Block] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    all_reduces: list[AllReduce] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            PlanError: it cannot be read, or is no profile.
        """
        values = read_json(str(path))
        if not isinstance(values.get("model"), dict):
            raise PlanError(f"{path}: model is missing; give a file that megatron-2bw profile wrote")
        model = model_of(values.pop("model"), f"{path}: model")
        lists = {
            name: [
                build(kind, row, f"{path}: {name}") for row in checked(values.pop(name, []), list, f"{path}: {name}")
            ]
            for name, kind in _LISTS.items()
        }
        heading = build(_Heading, values, str(path))
        return cls(model=model, **dataclasses.asdict(heading), **lists)

    def save(self, path: Path) -> None:
        """Write all at once: a run that is stopped leaves the file of the moment before."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)

    def continues(self, begun: Profile) -> bool:
        """Whether ``begun`` is of the same layer, precision and number of ranks."""
        same = all(getattr(self, name) == getattr(begun, name) for name in ("ranks", "precision", "fused_attention"))
        return same and _layer_of(self.model) == _layer_of(begun.model)

    def block(self, tensor: int, microbatch: int, recompute: Recompute) -> Block | None:
        """The measurement, if there is one."""
        wanted = (tensor, microbatch, recompute)
        return next((b for b in self.blocks if (b.tensor, b.microbatch, b.recompute) == wanted), None)

    def works(self, model: Model, split: Split) -> Works:
        """The parts of ``model``, as measured.

        Raises:
            PlanError: another model, or a split that was not measured.
        """
        self._check_model(model)
        plain = self.block(split.tensor, split.microbatch, Recompute.NONE)
        block = self.block(split.tensor, split.microbatch, split.recompute)
        wanted = (split.precision, split.fused_attention)
        sequence = block is None or block.sequence_parallel == split.sequence_parallel
        if plain is None or block is None or not sequence or wanted != (self.precision, self.fused_attention):
            raise PlanError(
                f"the profile has no layer with tensor {split.tensor}, microbatch {split.microbatch}, recompute "
                f"{split.recompute}, sequence_parallel {split.sequence_parallel}, {split.precision}, fused_attention "
                f"{split.fused_attention}; {self._measured()}"
            )
        again_s = max(0.0, block.layer_backward_s - plain.layer_backward_s)
        return Works(
            _work(*plain.layer, again_s),
            _work(plain.embedding_forward_s, plain.embedding_backward_s),
            _work(plain.loss_forward_s, plain.loss_backward_s),
        )

    def update_s(self, tensor: int, weights: float) -> float:
        """Time of the update of so many weights."""
        rates = [update.time_s / update.weights for update in self.updates if update.tensor == tensor]
        return weights * (rates or [update.time_s / update.weights for update in self.updates])[0]

    def link(self) -> tuple[float, float] | None:
        """(bytes/s, seconds to start) of a node's links: a ring moves ``2*(n-1)/n`` of a tensor; None for one rank."""
        if len(self.all_reduces) < 2:
            return None
        small, large = sorted(self.all_reduces, key=lambda one: one.size_bytes)[:: len(self.all_reduces) - 1]
        passed = 2 * (large.ranks - 1) / large.ranks * (large.size_bytes - small.size_bytes)
        return passed / max(large.time_s - small.time_s, 1e-9), small.time_s

    def limited(self, space: Space) -> Space:
        """``space`` without what was not measured.

        Raises:
            PlanError: nothing is left of a dimension.
        """
        plain = [block for block in self.blocks if block.recompute is Recompute.NONE]
        limits = {
            "tensors": tuple(sorted({block.tensor for block in plain})),
            "microbatches": tuple(sorted({block.microbatch for block in plain})),
            "recomputes": tuple(choice for choice in Recompute if any(b.recompute is choice for b in self.blocks)),
        }
        for dimension, values in limits.items():
            allowed = space.allows(dimension, values)
            if not allowed:
                raise PlanError(f"{dimension} {getattr(space, dimension)}: {self._measured()}")
            limits[dimension] = allowed
        for name, wanted in (("precision", self.precision), ("fused_attention", self.fused_attention)):
            if getattr(space, name) not in (None, wanted):
                raise PlanError(f"{name} {getattr(space, name)}: the profile was measured with {wanted}; profile again")
        return dataclasses.replace(space, **limits, precision=self.precision, fused_attention=self.fused_attention)

    def cluster(self) -> Cluster:
        """One node, the one that was measured; its data sheet is what a layer, the update and the links reached."""
        largest = max(self.blocks, key=lambda block: block.microbatch, default=None)
        if largest is None or not self.updates:
            raise PlanError("the profile has no measurements yet; let megatron-2bw profile finish it")
        weights = self.model.layer_parameters / largest.tensor
        flops = 6 * self.model.seq_length * largest.microbatch * weights
        nvlink, _ = self.link() or (1e9, 0.0)
        gpu = Gpu(
            name=self.device,
            memory_gb=self.memory_gb,
            peak_tflops=flops / sum(largest.layer) / 1e12,
            hbm_gb_s=_ADAM_BYTES / self.update_s(largest.tensor, 1) / 1e9,
            nvlink_gb_s=nvlink / 1e9,
            has_bf16=self.precision is not Precision.FP16,
        )
        return Cluster(
            name="profiled node",
            gpu=gpu,
            gpus_per_node=self.ranks,
            nodes=1,
            intra_node_gb_s=gpu.nvlink_gb_s,
            inter_node_gb_s=gpu.nvlink_gb_s,
            profile=self,
        )

    def on(self, cluster: Cluster) -> Cluster:
        """``cluster``, priced with this profile."""
        return dataclasses.replace(cluster, profile=self)

    def _check_model(self, model: Model) -> None:
        for f in dataclasses.fields(Model):
            mine, theirs = getattr(self.model, f.name), getattr(model, f.name)
            if f.name not in ("num_layers", "name") and mine != theirs:
                raise PlanError(f"{f.name} {theirs}: the profile is of a model with {mine}; profile this one")

    def _measured(self) -> str:
        rows = sorted({(block.tensor, block.microbatch, block.recompute) for block in self.blocks})
        listed = ", ".join(f"t{tensor} b{microbatch} {recompute}" for tensor, microbatch, recompute in rows)
        return f"the profile has {listed or 'nothing'} ({self.precision}); profile the rest, or leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heading:
    """The fields of a profile that are neither its model nor measurements."""

    ranks: int
    precision: Precision
    fused_attention: bool
    date: str
    device: str
    memory_gb: float
    versions: str


def _layer_of(model: Model) -> Model:
    return dataclasses.replace(model, num_layers=1, name="")


def _work(forward_s: float, backward_s: float, again_s: float = 0.0) -> Work:
    again = Parts(measured_s=again_s) if again_s else NOTHING
    return Work.of(Parts(measured_s=forward_s), Parts(measured_s=backward_s), again)
