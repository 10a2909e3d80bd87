"""How many layers the first and the last stage get beside the embedding and the loss."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.pieces import stage_pieces, time_of
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import Machine
from megatron_2bw.planner.multiples import divisors
from megatron_2bw.planner.pipeline.stages import Contents
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.pipeline_layout import layout_text


def shorter_ends(layers: int, stages: int) -> tuple[int, int]:
    """Layers of the first and of the last stage, which have embedding and loss too, where stages cannot be equal.

    The others have as many as the largest of stages that differ by at most one. (0, 0): the stages can be equal, or
    nothing would be left for the ends.

    >>> shorter_ends(126, 16), shorter_ends(105, 8), shorter_ends(24, 4), shorter_ends(8, 7)
    ((7, 7), (11, 10), (0, 0), (0, 0))
    """
    left = layers - -(-layers // stages) * (stages - 2)
    return (left - left // 2, left // 2) if layers % stages and left >= 2 else (0, 0)


def counted_ends(layers: int, mtp: int, stages: int) -> Iterator[tuple[int, str]]:
    """(chunks, ``pipeline_layout``) with as much in every chunk, embedding, loss and further tokens counted as layers.

    Megatron's ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split`` count so.

    Args:
        layers: of the decoder.
        mtp: layers that predict further tokens.
        stages: ranks of the pipeline, at least 2.

    >>> [*counted_ends(126, 0, 16)]
    [(2, 'Ettt|(tttt|)*30tttL'), (4, 'Et|(tt|)*62tL'), (8, 'E|(t|)*126L')]
    >>> [*counted_ends(61, 1, 16)]
    [(2, 'Et|(tt|)*30mL')]
    """
    whole, left = divmod(layers + mtp + 2, stages)
    for chunks in divisors(whole)[1:] if not left else ():
        each = whole // chunks
        if each > mtp:  # All further tokens are predicted on one stage.
            yield chunks, layout_text(each - 1, each, each - 1 - mtp, mtp=mtp, stages=stages * chunks)


def balanced_ends(model: Model, layout: Layout, machine: Machine, waits_s: float = 0.0) -> tuple[int, int]:
    """Layers of the first and of the last stage with which the slowest stage is fastest.

    Among several, those that leave the others fewest, then those whose slower end is fastest. (0, 0): equal stages are
    as fast, or there are too few layers.

    Args:
        model: whose layers are spread.
        layout: of at least 2 stages; how many layers these have does not count.
        machine: what it runs on.
        waits_s: for what a stage between the ends receives from its second neighbour.

    >>> from megatron_2bw.planner.specs.cluster import CLUSTERS
    >>> from megatron_2bw.planner.specs.layout import Recompute
    >>> from megatron_2bw.planner.cost.speeds import machine_of
    >>> model = Model(num_layers=24, hidden_size=1920, num_attention_heads=20, seq_length=512, vocab_size=50257)
    >>> machine = machine_of(CLUSTERS["p3.16xlarge"])
    >>> for recompute in (Recompute.NONE, Recompute.FULL):
    ...     more = {"data": 1, "microbatch": 8, "global_batch": 8, "recompute": recompute, "fused_attention": False}
    ...     layouts = [Layout(schedule="2bw", pipeline=stages, **more) for stages in (2, 3, 4, 24)]
    ...     print([balanced_ends(model, layout, machine) for layout in layouts])
    [(13, 11), (9, 6), (6, 4), (0, 0)]
    [(13, 11), (8, 7), (6, 4), (0, 0)]
    """
    works = works_of(model, Split.of(layout), machine)

    def time_s(held: Contents) -> float:
        return time_of(stage_pieces(model, layout, works, held)).pair_s

    # In layers, what an end has beside as many layers as any other stage.
    dense, layer_s = model.dense_layers, time_s(Contents(1))
    more_first = time_s(Contents(dense, dense=dense, embedding=True)) / layer_s - dense
    more_last = time_s(Contents(0, mtp=model.mtp_num_layers, loss=True)) / layer_s
    stages = layout.pipeline
    waits = waits_s / layer_s if stages > 2 else 0.0
    equal, left = divmod(model.num_layers, stages)
    best = (inf if left else equal + max(waits, more_first, more_last), 0, 0.0, 0, 0)
    least = max(dense, 1)  # Of the first stage.
    for each in range(1, model.num_layers) if stages > 2 else (0,):
        left = model.num_layers - each * (stages - 2)
        if left <= least or each + waits >= best[0]:
            break
        balance = int((left + more_last - more_first) // 2)
        for first in {min(max(balance + more, least), left - 1) for more in (0, 1)}:
            slower = max(first + more_first, left - first + more_last)
            best = min(best, (max(each + waits, slower), each, slower, first, left - first))
    return best[3:]
