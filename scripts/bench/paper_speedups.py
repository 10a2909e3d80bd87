"""How much faster PipeDream-2BW is than what its paper compares it with, by the default cost model.

The paper's own cost model has no flushes, logits, tensor parallelism or updates; the default one has, and none of its
constants comes from here. Settings are those of section 5: p3.16xlarge servers, fp16, sequences of 512 tokens, all
layers recomputed, 2.2B parameters on 8 GPUs (d = 8) and 3.8B on 64 (d = 16, w = 4); gradients of the update stay, as in
the authors' code (github.com/msr-fiddle/pipedream, branch pipedream_2bw, megatron/megatron/optimizer/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout, Precision, Receives, Recompute
from megatron_2bw.planner.specs.model import Model

INTER_LAYER, TENSOR = "inter-layer", "tensor"
_MICROBATCHES = tuple(2**power for power in range(7))


class Choice(NamedTuple):
    """A microbatch of a system at one global batch."""

    microbatch: int
    samples_per_s: float
    memory_bytes: float
    flushes: int
    """Per batch: more than one where memory does not hold all of its microbatches."""


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
        """Every microbatch that fits; 2BW has d of them per batch at least, GPipe as few at once as memory takes."""
        for microbatch in _MICROBATCHES:
            microbatches, rest = divmod(batch, microbatch * self.data)
            if rest or not microbatches or (self.name == "2bw" and microbatches < self.pipeline):
                continue
            for flushes in (2**power for power in range(microbatches.bit_length() if self.name == "gpipe" else 1)):
                layout = self._layout(microbatch, microbatches // flushes)
                needed_bytes = memory.largest(self.model, layout).total_bytes
                if needed_bytes <= self.cluster.memory_bytes and microbatches % flushes == 0:
                    samples_per_s = batch / self._batch_s(layout, flushes)
                    yield Choice(microbatch, samples_per_s, needed_bytes, flushes)
                    break

    def largest(self, batch: int) -> Choice | None:
        """With the largest microbatch that fits; None where none does."""
        return max(self.choices(batch), key=lambda choice: choice.microbatch, default=None)

    def with_microbatch(self, batch: int, microbatch: int) -> Choice | None:
        """With that microbatch, if it fits."""
        return next((choice for choice in self.choices(batch) if choice.microbatch == microbatch), None)

    def fastest(self, batch: int) -> Choice | None:
        """With the microbatch that is fastest; None where none fits."""
        return max(self.choices(batch), key=lambda choice: choice.samples_per_s, default=None)

    def _layout(self, microbatch: int, microbatches: int) -> Layout:
        return Layout(
            schedule="megatron" if self.name == TENSOR else self.name,
            pipeline=self.pipeline,
            data=self.data,
            tensor=self.tensor,
            microbatch=microbatch,
            global_batch=microbatch * microbatches * self.data,
            recompute=Recompute.FULL,
            precision=Precision.FP16,
            fused_attention=False,
            keeps_main_gradients=True,
            # PipeDream's runtime receives in threads of their own, ahead of use.
            receives=Receives.DEFAULT if self.name == TENSOR else Receives.EARLY,
        )

    def _batch_s(self, layout: Layout, flushes: int) -> float:
        batch_s = costs.iteration(self.model, layout, self.cluster).time_s
        if flushes == 1:
            return batch_s
        pipeline = costs.times_of(self.model, layout, self.cluster).pipeline
        update_s = pipeline.update_s + pipeline.gradients_s + pipeline.norm_s
        return flushes * (batch_s - update_s) + update_s
