"""What a stage consists of, and how long a batch is busy with what."""

from __future__ import annotations

from typing import NamedTuple

from megatron_2bw.planner.cost.layer import Works
from megatron_2bw.planner.cost.work import Work
from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.planner.pipeline.stages import Contents, contents_of
from megatron_2bw.planner.specs.layout import Layout, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED

LAUNCHING = "launching kernels"
_COLUMNS = {
    "layers, as profiled": "measured_s",
    "matrix products": "products_s",
    "elementwise kernels": "elementwise_s",
    "tensor parallel": "tensor_parallel_s",
    "context parallel": "context_parallel_s",
    "expert parallel": "expert_parallel_s",
    LAUNCHING: "launch_s",
}
"""What layers are busy with, and where ``Parts`` has it."""


class Piece(NamedTuple):
    """Layers of one kind."""

    work: Work
    count: int
    again: int
    """So many of them are computed again in the backward."""


class Pieces(NamedTuple):
    """Of one stage, or of one of its chunks."""

    layers: tuple[Piece, ...]
    embedding: Work | None
    loss: Work | None
    losses: int
    """One per token that is predicted."""


def stage_pieces(model: Model, layout: Layout, works: Works, held: Contents) -> Pieces:
    """Of what a stage holds; layers that predict further tokens know no ``block``."""
    again, again_dense, again_mtp = held.layers, held.dense, held.mtp
    if layout.recompute == Recompute.FULL and layout.recompute_method == RecomputeMethod.BLOCK:
        again = min(held.layers, layout.recompute_layers * held.chunks)
        again_dense, again_mtp = min(held.dense, layout.recompute_layers), 0
    pieces = [Piece(works.dense, held.dense, again_dense)] * (held.dense > 0)
    pieces.append(Piece(works.layer, held.layers - held.dense, again - again_dense))
    if held.mtp:
        pieces.append(Piece(works.mtp, held.mtp, again_mtp))
    embedding, loss = works.embedding if held.embedding else None, works.loss if held.loss else None
    return Pieces(tuple(pieces), embedding, loss, 1 + model.mtp_num_layers)


def time_of(pieces: Pieces) -> Stage:
    """Of one microbatch."""
    forward_s = backward_s = 0.0
    for work, count, again in pieces.layers:
        forward_s += count * work.forward_s
        backward_s += count * work.backward_s + again * work.again_s
    for work, count in ((pieces.embedding, 1), (pieces.loss, pieces.losses)):
        forward_s += 0.0 if work is None else count * work.forward_s
        backward_s += 0.0 if work is None else count * work.backward_s
    return Stage(forward_s, backward_s)


def parts_of_batch(
    model: Model, layout: Layout, pipeline: Pipeline, works: Works, time_s: float, *, shared: bool
) -> dict[str, float]:
    """Seconds of a batch on the slowest stage; they add up to ``time_s``."""
    last = layout.pipeline - 1
    stages = range(layout.pipeline) if pipeline.each else sorted({0, min(1, last), last})
    slowest, _ = max(zip(stages, pipeline.kinds, strict=True), key=lambda pair: (pair[1].pair_s, pair[0]))
    if layout.schedule in BIDIRECTIONAL:  # The first rank has both ends, each for half of the microbatches.
        first, other = (_parts_of_stage(model, layout, works, stage) for stage in (0, last))
        parts = {name: (first[name] + other[name]) / 2 for name in first}
    else:
        parts = _parts_of_stage(model, layout, works, slowest)
    parts["update"] = pipeline.update_s
    if layout.schedule not in DELAYED:
        parts["sum of gradients"] = pipeline.gradients_s + pipeline.norm_s
    total_s = sum(parts.values())
    if shared and total_s > time_s:  # Work is done faster while others wait.
        return {name: part_s * time_s / total_s for name, part_s in parts.items()} | {"waiting": 0.0}
    return parts | {"waiting": max(time_s - total_s, 0.0)}  # Less is rounding.


def _parts_of_stage(model: Model, layout: Layout, works: Works, stage: int) -> dict[str, float]:
    """Of all its chunks."""
    chunks = [_parts(layout, stage_pieces(model, layout, works, held)) for held in contents_of(model, layout, stage)]
    return {name: sum(parts[name] for parts in chunks) for name in chunks[0]}


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
    for name, work, count in (("embedding", pieces.embedding, 1), ("loss", pieces.loss, pieces.losses)):
        parts[name] = 0.0 if work is None else m * count * (work.forward_s + work.backward_s)
    return parts
