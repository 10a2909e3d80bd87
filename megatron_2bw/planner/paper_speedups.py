"""How much faster PipeDream-2BW is than what its paper compares it with, by the default cost model.

The paper's own cost model has no flushes, logits, tensor parallelism or updates; the default one has, and none of its
constants comes from here. Settings are those of section 5: p3.16xlarge servers, fp16, sequences of 512 tokens, all
layers recomputed, 2.2B parameters on 8 GPUs (d = 8) and 3.8B on 64 (d = 16, w = 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_2bw.planner import costs, memory
from megatron_2bw.planner.cluster import Cluster
from megatron_2bw.planner.layout import Layout, Precision, Recompute
from megatron_2bw.planner.model import Model

INTER_LAYER, TENSOR = "inter-layer", "tensor"
_MICROBATCHES = tuple(2**power for power in range(7))


class Choice(NamedTuple):
    """A microbatch of a system at one global batch."""

    microbatch: int
    samples_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A way to spread ``model`` over ``cluster``."""

    name: str
    """A schedule, ``inter-layer`` (one microbatch at a time) or ``tensor``."""
    model: Model
    cluster: Cluster
    pipeline: int = 1
    tensor: int = 1

    @property
    def data(self) -> int:
        """Width w: all GPUs are used."""
        return self.cluster.gpus // (self.pipeline * self.tensor)

    def choices(self, batch: int) -> Iterator[Choice]:
        """Every microbatch that fits; 2BW has d of them per batch at least."""
        for microbatch in _MICROBATCHES:
            microbatches, rest = divmod(batch, microbatch * self.data)
            if rest or not microbatches or (self.name == "2bw" and microbatches < self.pipeline):
                continue
            layout = self._layout(microbatch, 1 if self.name == INTER_LAYER else microbatches)
            needed_bytes = memory.largest(self.model, layout).total_bytes
            if needed_bytes <= self.cluster.memory_bytes:
                yield Choice(microbatch, batch / self._batch_s(layout, microbatches), needed_bytes)

    def largest(self, batch: int) -> Choice | None:
        """With the largest microbatch that fits; None where none does."""
        return max(self.choices(batch), key=lambda choice: choice.microbatch, default=None)

    def fastest(self, batch: int) -> Choice | None:
        """With the microbatch that is fastest; None where none fits."""
        return max(self.choices(batch), key=lambda choice: choice.samples_per_s, default=None)

    def _layout(self, microbatch: int, microbatches: int) -> Layout:
        return Layout(
            schedule={INTER_LAYER: "1f1b-flush", TENSOR: "megatron"}.get(self.name, self.name),
            pipeline=self.pipeline,
            data=self.data,
            tensor=self.tensor,
            microbatch=microbatch,
            global_batch=microbatch * microbatches * self.data,
            recompute=Recompute.FULL,
            precision=Precision.FP16,
            fused_attention=False,
        )

    def _batch_s(self, layout: Layout, microbatches: int) -> float:
        if self.name != INTER_LAYER:
            return costs.iteration(self.model, layout, self.cluster).time_s
        pipeline = costs.times_of(self.model, layout, self.cluster).pipeline
        stages_s = sum(count * stage.pair_s for stage, count in zip(pipeline.kinds, pipeline.counts, strict=True))
        there_and_back_s = 2 * (self.pipeline - 1) * pipeline.send_s
        return microbatches * (stages_s + there_and_back_s) + pipeline.update_s + pipeline.gradients_s + pipeline.norm_s
