"""Chunks and stages that differ: what Megatron's interleaved schedule keeps and takes at least, what others take."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.memory.activations import of_layer
from megatron_2bw.planner.pipeline import interleaving, periods
from megatron_2bw.planner.pipeline.batch import batch_s, simulated_s
from megatron_2bw.planner.pipeline.followed import uneven_one_f_one_b_s
from megatron_2bw.planner.pipeline.megatron import interleaved_s
from megatron_2bw.planner.pipeline.periods import Delay, Stage, gpipe_s, inter_layer_s, two_bw_s
from megatron_2bw.planner.pipeline.stages import chunks_in_flight
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate

from .pipelines import of_each

SIZES = [(2, 2, 2), (2, 6, 3), (3, 6, 2), (4, 8, 2), (4, 16, 3)]
"""Ranks, microbatches, chunks."""


def drawn(rng: random.Random, count: int) -> tuple[Stage, ...]:
    """Some of them empty."""
    return tuple(Stage(rng.randint(0, 4), rng.randint(0, 8)) for _ in range(count))


def layout(**changes) -> Layout:
    return Layout(**({"schedule": "megatron", "data": 1} | changes))


def test_chunks_alike_have_the_papers_formula():
    """Free transfers leave ``(m + (d-1)/v)*(F+B)``: Narayanan et al., arXiv 2104.04473, section 2.2.2."""
    for ranks, microbatches, chunks in SIZES:
        each = [Stage(1, 2)] * (ranks * chunks)
        p = of_each(each, (0,) * (len(each) - 1), microbatches, chunks)
        assert interleaved_s(p) == (microbatches + Fraction(ranks - 1, chunks)) * chunks * 3


@pytest.mark.parametrize("name", ["1f1b-flush", "gpipe", "inter-layer"])
def test_transfers_that_differ(name: str):
    """Of stages that all differ, against the simulator."""
    closed_form_s = {"1f1b-flush": uneven_one_f_one_b_s, "gpipe": gpipe_s, "inter-layer": inter_layer_s}[name]
    rng = random.Random(3)
    for stages, microbatches in itertools.product((2, 3, 4, 6), (1, 3, 8, 60)):
        each = drawn(rng, stages)
        sends_s = tuple(Fraction(rng.randint(0, 12), 4) for _ in range(stages - 1))
        p = of_each(each, sends_s, microbatches, update_s=2, norm_s=1)
        forwards_s, backwards_s = zip(*each, strict=True)
        durations = Durations(forward_s=forwards_s, backward_s=backwards_s, send_s=sends_s, update_s=2, norm_s=1)
        program = build(name, stages=stages, microbatches=microbatches)
        assert closed_form_s(p) == simulate(program, durations, 1).makespan_s, p


def test_as_many_transfers_as_boundaries():
    durations = Durations(forward_s=1, backward_s=2, send_s=(1, 2, 3))
    with pytest.raises(ValueError, match="send_s has 3 values for 3 stages; give one per boundary"):
        simulate(build("1f1b-flush", stages=3, microbatches=3), durations, 1)


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [*SIZES, (3, 30, 3), (4, 40, 2)])
def test_the_most_that_is_kept(ranks: int, microbatches: int, chunks: int):
    """With equal chunks it is what their number says; else what a look at the whole batch finds."""
    planned = layout(pipeline=ranks, global_batch=microbatches, chunks=chunks)
    rng = random.Random(5)
    for rank in range(ranks):
        sizes = {"ranks": ranks, "microbatches": microbatches}
        assert interleaving.most_kept(rank, [7] * chunks, **sizes) == 7 * chunks_in_flight(planned, rank)
        kept = [rng.randint(0, 9) for _ in range(chunks)]
        now, found = 0, [0]
        for forward, chunk, _ in interleaving.order(rank, **sizes, chunks=chunks):
            now += kept[chunk] if forward else -kept[chunk]
            found.append(now)
        assert now == 0
        assert interleaving.most_kept(rank, kept, **sizes) == max(found)


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_of_chunks_is_faster_than_its_least(seed: int):
    """The bound of a search; with equal chunks and free transfers it is the batch itself."""
    rng = random.Random(seed)
    stages, chunks, groups = rng.randint(2, 5), rng.randint(2, 4), rng.randint(1, 6)
    each = tuple(Stage(rng.uniform(1, 3), rng.uniform(2, 5)) for _ in range(stages * chunks))
    sends_s = tuple(rng.uniform(0, 1) for _ in each[1:])
    uneven = of_each(each, sends_s, groups * stages, chunks, update_s=2, norm_s=1)
    assert periods.least_interleaved_s(uneven) <= interleaved_s(uneven) + 1e-9
    even = of_each([Stage(1, 2)] * len(each), (0,) * len(sends_s), groups * stages, chunks)
    assert periods.least_interleaved_s(even) == interleaved_s(even)


def test_memory_of_chunks_that_differ():
    """A layer more on the first chunk of a rank and one less on the second costs what is longer in flight."""
    model = Model(num_layers=16, hidden_size=2048, num_attention_heads=16, seq_length=1024, vocab_size=50257)
    even, uneven = (
        layout(pipeline=4, global_batch=16, pipeline_layout=text)
        for text in ("E(tt|)*7ttL", "Ett|ttt|tt|tt|tt|t|tt|ttL")
    )
    before, after = (memory.stages(model, one) for one in (even, uneven))
    assert [one.weights_bytes for one in before] == [one.weights_bytes for one in after]
    kept = of_layer(model, even).kept
    # Rank 1 has 9 forwards in flight: once, 8 of them are of the first chunk.
    assert chunks_in_flight(even, 1) == 9
    assert before[1].activations_bytes == pytest.approx(9 * 2 * kept)
    assert after[1].activations_bytes == pytest.approx((8 * 3 + 1 * 1) * kept)
    assert [one.activations_bytes for one in (before[2], before[3])] == [
        one.activations_bytes for one in (after[2], after[3])
    ]
    cluster = CLUSTERS["dgx-h100"]
    assert costs.iteration(model, uneven, cluster).time_s > costs.iteration(model, even, cluster).time_s


def test_2bw_with_stages_that_differ_is_followed():
    """Its closed form knows turns over equal stages alone, and is a sixth too short here."""
    each = (Stage(5, 0), Stage(5, 8), Stage(5, 8), Stage(0, 0), Stage(5, 0))
    planned = layout(schedule="2bw", pipeline=5, global_batch=9)
    p = of_each(each, (3.0,) * 4, 9, update_s=2.0, norm_s=1.0)
    assert batch_s(planned, p) == simulated_s(planned, p)
    assert two_bw_s(p, Delay()) == 119 < simulated_s(planned, p) == 145
