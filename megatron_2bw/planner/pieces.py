"""What a stage consists of, and how long a batch is busy with what."""

from __future__ import annotations

from typing import NamedTuple

from megatron_2bw.planner.layer import Works
from megatron_2bw.planner.layout import Layout, Recompute, RecomputeMethod
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.periods import Pipeline, Stage
from megatron_2bw.planner.stages import layers_of_stages
from megatron_2bw.planner.work import Work
from megatron_2bw.schedule.registry import MIRRORED

_COLUMNS = {
    "layers, as profiled": "measured_s",
    "matrix products": "products_s",
    "elementwise kernels": "elementwise_s",
    "tensor parallel": "tensor_parallel_s",
    "context parallel": "context_parallel_s",
    "expert parallel": "expert_parallel_s",
    "launching kernels": "launch_s",
}
"""What layers are busy with, and where ``Parts`` has it."""


class Piece(NamedTuple):
    """Layers of one kind."""

    work: Work
    count: int
    again: int
    """So many of them are computed again in the backward."""


class Pieces(NamedTuple):
    """Of one stage."""

    layers: tuple[Piece, ...]
    embedding: Work | None
    loss: Work | None


def stage_pieces(model: Model, layout: Layout, works: Works, layers: int, *, is_first: bool, is_last: bool) -> Pieces:
    """Of a stage with so many layers; further tokens are predicted on the last one, where nothing knows ``block``."""
    dense = model.dense_layers if is_first else 0
    again, again_dense, again_mtp = layers, dense, model.mtp_num_layers
    if layout.recompute == Recompute.FULL and layout.recompute_method == RecomputeMethod.BLOCK:
        again = min(layers, layout.recompute_layers * layout.chunks)
        again_dense, again_mtp = min(dense, layout.recompute_layers), 0
    pieces = [Piece(works.dense, dense, again_dense)] * (dense > 0)
    pieces.append(Piece(works.layer, layers - dense, again - again_dense))
    if is_last and model.mtp_num_layers:
        pieces.append(Piece(works.mtp, model.mtp_num_layers, again_mtp))
    return Pieces(tuple(pieces), works.embedding if is_first else None, works.loss if is_last else None)


def time_of(pieces: Pieces) -> Stage:
    """Of one microbatch."""
    forward_s = backward_s = 0.0
    for work, count, again in pieces.layers:
        forward_s += count * work.forward_s
        backward_s += count * work.backward_s + again * work.again_s
    for work in (pieces.embedding, pieces.loss):
        forward_s += 0.0 if work is None else work.forward_s
        backward_s += 0.0 if work is None else work.backward_s
    return Stage(forward_s, backward_s)


def parts_of_batch(
    model: Model, layout: Layout, pipeline: Pipeline, works: Works, time_s: float, *, shared: bool
) -> dict[str, float]:
    """Seconds of a batch on the slower of first and last stage; they add up to ``time_s``."""
    layers, alone = layers_of_stages(model, layout), layout.pipeline == 1
    on_last = not alone and pipeline.last.pair_s >= pipeline.first.pair_s
    first = _parts(layout, stage_pieces(model, layout, works, layers.first, is_first=True, is_last=alone))
    last = _parts(layout, stage_pieces(model, layout, works, layers.last, is_first=alone, is_last=True))
    if layout.schedule in MIRRORED:  # The first rank has both, each for half of the microbatches.
        parts = {name: (first[name] + last[name]) / 2 for name in first}
    else:
        parts = last if on_last else first
    parts["update"] = pipeline.update_s
    if layout.schedule != "2bw":
        parts["sum of gradients"] = pipeline.gradients_s + pipeline.norm_s
    total_s = sum(parts.values())
    if shared and total_s > time_s:  # Work is done faster while others wait.
        return {name: part_s * time_s / total_s for name, part_s in parts.items()} | {"waiting": 0.0}
    return parts | {"waiting": time_s - total_s}


def _parts(layout: Layout, pieces: Pieces) -> dict[str, float]:
    """Seconds of a batch in the layers of a stage, and in what else is there."""
    m = layout.microbatches
    parts = {
        name: sum(
            m * count * (getattr(work.forward, column) + getattr(work.backward, column))
            for work, count, _ in pieces.layers
        )
        for name, column in _COLUMNS.items()
    }
    parts["recompute"] = sum(m * again * work.again_s for work, _, again in pieces.layers)
    for name, work in (("embedding", pieces.embedding), ("loss", pieces.loss)):
        parts[name] = 0.0 if work is None else m * (work.forward_s + work.backward_s)
    return parts
