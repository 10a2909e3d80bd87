"""What a layout puts on each pipeline stage: layers, weights and forwards in flight."""

from __future__ import annotations

from functools import cache, lru_cache
from math import gcd
from typing import NamedTuple

from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.multiples import nearest_divisor
from megatron_2bw.planner.pipeline.programs import programs_of, shortened
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.pipeline_layout import LAYER, MTP, layout_problem, stages_of
from megatron_2bw.schedule.registry import BIDIRECTIONAL


class Contents(NamedTuple):
    """What a stage holds, or one of its chunks."""

    layers: int
    """Of the decoder, in all."""
    dense: int = 0
    """Of them, without experts in a model that has some."""
    mtp: int = 0
    """Layers that predict further tokens."""
    embedding: bool = False
    final_norm: bool = False
    """Behind the last layer, or where no further tokens are predicted, before the loss."""
    loss: bool = False
    chunks: int = 1
    """So many have as many layers each."""


class Layers(NamedTuple):
    """Layers of a stage: the stages between the first and the last have the same number, or at most ``middle``."""

    first: int
    middle: int
    last: int


def layers_of_stages(model: Model, layout: Layout) -> Layers:
    """How Megatron spreads the layers: evenly, but for stages with a number of their own.

    >>> model = Model(num_layers=46, hidden_size=5120, num_attention_heads=40, seq_length=1024, vocab_size=50257)
    >>> layout = Layout(schedule="2bw", pipeline=16, data=1, global_batch=64, first_stage_layers=2, last_stage_layers=2)
    >>> layers_of_stages(model, layout)
    Layers(first=2, middle=3, last=2)

    Raises:
        PlanError: the layers cannot be spread like that.
    """
    layers = spread(model, layout)
    if isinstance(layers, Problem):
        raise PlanError(layers)
    return layers


def spread(model: Model, layout: Layout) -> Layers | Problem:
    """The layers of the stages, or why there are none."""
    if layout.pipeline_layout:
        return _described(model, layout)[0]
    ends = layout.first_stage_layers, layout.last_stage_layers
    found = _spread(model.num_layers, layout.pipeline, layout.chunks, *ends)
    return found or _uneven(model.num_layers, layout.pipeline, layout.chunks, layout.data)


@cache
def _uneven(num_layers: int, stages: int, chunks: int, data: int) -> Problem:
    """Equal stages do not divide the layers; the nearest number that does, if possible on as many GPUs."""
    wanted = nearest_divisor(gcd(num_layers, stages * data), stages)
    nearest = wanted if wanted > 1 else nearest_divisor(num_layers, stages)
    return Problem(
        f"pipeline {stages}{f' x chunks {chunks}' if chunks > 1 else ''} does not divide num_layers {num_layers}",
        f"use {nearest} stages, or give first_stage_layers or last_stage_layers",
    )


@cache
def _spread(num_layers: int, stages: int, chunks: int, first: int, last: int) -> Layers | Problem | None:
    """None where only the number of stages is in the way."""
    if stages == 1 and chunks == 1:
        if sorted((first, last)) not in ([0, 0], [0, num_layers]):
            given = f"first_stage_layers {first}" if first else f"last_stage_layers {last}"
            return Problem(f"{given}: one stage has all {num_layers} layers", "leave it out")
        return Layers(num_layers, 0, num_layers)
    rest, even = num_layers - first - last, stages - bool(first) - bool(last)
    if even == 0:
        if rest:
            return Problem(
                f"first_stage_layers {first} and last_stage_layers {last} do not sum to num_layers {num_layers} on 2 "
                "stages",
                "set one of them to 0",
            )
        if gcd(first, last) % chunks:
            return Problem(
                f"chunks {chunks} does not divide first_stage_layers {first} and last_stage_layers {last}",
                f"use {nearest_divisor(gcd(first, last), chunks)}",
            )
        return Layers(first, last, last)
    each = rest // even
    if rest > 0 and rest % even == first % chunks == last % chunks == each % chunks == 0:
        return Layers(first or each, (last or each) if stages == 2 else each, last or each)
    if first or last:
        ends = [f"first_stage_layers {first}"] * (first > 0) + [f"last_stage_layers {last}"] * (last > 0)
        uneven = f" of {chunks} chunks" if chunks > 1 else ""
        return Problem(
            f"num_layers {num_layers} leaves {max(rest, 0) or 'no'} layers for {even} equal stages{uneven} beside "
            f"{' and '.join(ends)}",
            _other_end(num_layers, even, chunks, first, last),
        )
    per_stage = num_layers // stages
    if chunks > 1 and num_layers % stages == 0:
        return Problem(
            f"chunks {chunks} does not divide the {per_stage} layers of a stage",
            f"use {nearest_divisor(per_stage, chunks)}",
        )
    return None


def _other_end(num_layers: int, even: int, chunks: int, first: int, last: int) -> str:
    """What to use in place of one of these, so that ``even`` stages of so many chunks share the other layers."""
    name, given, other = ("first", first, last) if first else ("last", last, 0)
    counts = range(chunks, num_layers - other, chunks)
    fitting = [count for count in counts if (num_layers - other - count) % (even * chunks) == 0]
    if other % chunks or not fitting:
        return f"leave a multiple of {even * chunks}"
    return f"use {name}_stage_layers {min(fitting, key=lambda count: abs(count - given))}"


def contents_of(model: Model, layout: Layout, stage: int) -> tuple[Contents, ...]:
    """What ``stage`` holds: of each chunk, or together where its chunks have as many layers each.

    >>> model = Model(num_layers=6, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=99)
    >>> layout = Layout(schedule="megatron", pipeline=2, data=1, global_batch=2, pipeline_layout="Et|ttt|t|tL")
    >>> [[chunk.layers for chunk in contents_of(model, layout, stage)] for stage in (0, 1)]
    [[1, 1], [3, 1]]

    Raises:
        PlanError: the layers cannot be spread like that.
    """
    if free := free_stages(model, layout):
        return free[stage]
    layers, is_first, is_last = layers_of_stages(model, layout), stage == 0, stage == layout.pipeline - 1
    dense, mtp = model.dense_layers * is_first, model.mtp_num_layers * is_last
    layers = layers.first if is_first else layers.last if is_last else layers.middle
    return (Contents(layers, dense, mtp, is_first, is_last, is_last, layout.chunks),)


def chunks_in_order(model: Model, layout: Layout) -> tuple[Contents, ...]:
    """What each chunk of the model holds, where stages have several or only ``free_stages`` can say; else empty.

    >>> model = Model(num_layers=8, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=99)
    >>> layout = Layout(schedule="megatron", pipeline=2, data=1, global_batch=2, chunks=2)
    >>> [(chunk.layers, chunk.embedding, chunk.loss) for chunk in chunks_in_order(model, layout)]
    [(2, True, False), (2, False, False), (2, False, False), (2, False, True)]

    Raises:
        PlanError: the layers cannot be spread like that.
    """
    stages = free_stages(model, layout)
    if stages or layout.chunks == 1:
        return tuple(stage[chunk] for chunk in range(layout.chunks) for stage in stages)
    layers = layers_of_stages(model, layout)
    counts = [layers.first, *[layers.middle] * (layout.pipeline - 2), layers.last]
    chunks = [Contents(count // layout.chunks) for count in counts] * layout.chunks
    first, end = chunks[0], chunks[-1]
    chunks[0] = first._replace(dense=model.dense_layers, embedding=True)
    chunks[-1] = end._replace(mtp=model.mtp_num_layers, final_norm=True, loss=True)
    return tuple(chunks)


def free_stages(model: Model, layout: Layout) -> tuple[tuple[Contents, ...], ...]:
    """The chunks of every stage where they are spread as other flags cannot say; else empty.

    Raises:
        PlanError: the layers cannot be spread like that.
    """
    if not layout.pipeline_layout:
        return ()
    layers, stages = _described(model, layout)
    if isinstance(layers, Problem):
        raise PlanError(layers)
    return stages


def _described(model: Model, layout: Layout) -> tuple[Layers | Problem, tuple[tuple[Contents, ...], ...]]:
    of_model = model.num_layers, model.dense_layers, model.mtp_num_layers
    return _read(layout.pipeline_layout, layout.pipeline, *of_model)


@lru_cache(maxsize=256)
def _read(
    text: str, pipeline: int, num_layers: int, dense: int, mtp: int
) -> tuple[Layers | Problem, tuple[tuple[Contents, ...], ...]]:
    """Layers of the stages, and their chunks unless fewer words would say the same.

    Wherever E and L are, Megatron builds the embedding on the first and the loss on the last stage: ``pre_process`` and
    ``post_process`` in ``get_model``. The final norm: ``has_final_layernorm_in_this_stage`` of ``TransformerBlock``.
    """
    problem = layout_problem(text, pipeline=pipeline, num_layers=num_layers, mtp_num_layers=mtp)
    if problem:
        return problem, ()
    symbols, chunks, before = stages_of(text), [], 0
    for index, stage in enumerate(symbols):
        layers = stage.count(LAYER)
        without_experts = min(max(dense - before, 0), layers)
        before += layers
        is_first, is_last = index == 0, index == len(symbols) - 1
        has_norm = layers > 0 and before == num_layers if mtp else is_last
        chunks.append(Contents(layers, without_experts, stage.count(MTP), is_first, has_norm, is_last))
    stages = tuple(tuple(chunks[rank::pipeline]) for rank in range(pipeline))
    first, *between, last = [sum(chunk.layers for chunk in stage) for stage in stages] * (1 if pipeline > 1 else 2)
    most = 0 if pipeline == 1 else max(between, default=last)
    is_usual = (
        len(set(between)) < 2
        and all(chunk.layers == stage[0].layers > 0 for stage in stages for chunk in stage)
        and chunks[0].dense == dense
        and chunks[-1].mtp == mtp
    )
    return Layers(first, most, last), () if is_usual else stages


def layers_of_chunks(model: Model, layout: Layout) -> tuple[int, ...]:
    """The different numbers of layers that stages, or chunks of them, have.

    >>> model = Model(num_layers=10, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=99)
    >>> layout = Layout(schedule="megatron", pipeline=2, data=1, global_batch=2, pipeline_layout="Ett|(ttt|)*2ttL")
    >>> layers_of_chunks(model, layout)
    (2, 3)

    Raises:
        PlanError: the layers cannot be spread like that.
    """
    counts = [chunk.layers for chunks in free_stages(model, layout) for chunk in chunks]
    counts = counts or [count // layout.chunks for count in layers_of_stages(model, layout)]
    return tuple(sorted({count for count in counts if count}))


def chunks_in_flight(layout: Layout, stage: int) -> int:
    """Most forwards of ``stage`` at once whose backward has not run; each of one chunk, ``1/chunks`` of the stage.

    - 2bw, x more per boundary: ``(1+x)*(d-1-s) + 1``; 1F1B with a flush: ``min(d-s, m)``; GPipe: ``m``;
      without pipelining: 1; PipeDream: ``d-s``. In both directions: of both stages of rank ``stage`` together, as
      their Programs declare it.
    - Megatron's interleaved 1F1B, v chunks: ``min(2*(d-1-s) + (v-1)*d + 1, v*m)``
      (``get_pp_rank_microbatches`` in ``megatron/core/pipeline_parallel/schedules.py``); on the first stage
      ``1 + (d-1)/(d*v)`` times what 1F1B keeps (Korthikanti et al., arXiv 2205.05198, section 4.2.3).

    >>> layout = Layout(schedule="megatron", pipeline=4, data=1, global_batch=16, chunks=2)
    >>> [chunks_in_flight(layout, stage) for stage in range(4)]
    [11, 9, 7, 5]
    """
    after, microbatches = layout.pipeline - 1 - stage, layout.microbatches
    if layout.chunks > 1:
        return min(2 * after + (layout.chunks - 1) * layout.pipeline + 1, layout.chunks * microbatches)
    if layout.schedule == "2bw":
        return (1 + layout.extra_in_flight) * after + 1
    if layout.schedule == "inter-layer":
        return 1
    if layout.schedule in BIDIRECTIONAL:
        return programs_of(shortened(layout)).in_flight[stage]
    if layout.schedule == "pipedream":
        return after + 1
    return microbatches if layout.schedule == "gpipe" else min(after + 1, microbatches)
