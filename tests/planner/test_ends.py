"""Embedding and loss take time too, so the search gives the first and the last stage other numbers of layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.ends import balanced_ends, shorter_ends
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.rules import problem, recompute_problem
from megatron_2bw.planner.search.finder import price
from megatron_2bw.planner.search.search import search
from megatron_2bw.planner.specs.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.specs.layout import Layout, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.space import Space
from tests.planner.every import MODEL, cluster, every_layout, fastest_by_schedule


def possible(model: Model, layout: Layout) -> Iterator[Layout]:
    """``layout`` with every number of layers on the ends that leaves the other stages equally many."""
    layers = range(1, model.num_layers)
    for first, last in ((first, last) for first in layers for last in layers):
        other = dataclasses.replace(layout, first_stage_layers=first, last_stage_layers=last)
        if problem(model, other) is None:
            yield other


def slowest_s(model: Model, layout: Layout, machine: Cluster) -> float:
    """Of a microbatch, in seconds."""
    return max(stage.pair_s for stage in costs.times_of(model, layout, machine).pipeline.kinds)


def fastest(model: Model, layout: Layout, machine: Cluster) -> Layout:
    """Of those, the one whose slowest stage takes least.

    Of several, one with most layers on the ends, the slower of which takes least, and fewest on the first.
    """

    def order(one: Layout) -> tuple[float, ...]:
        pipeline, first = costs.times_of(model, one, machine).pipeline, one.first_stage_layers
        slower_s = max(pipeline.first.pair_s, pipeline.last.pair_s)
        return float(f"{slowest_s(model, one, machine):.9g}"), -first - one.last_stage_layers, slower_s, first

    return min(possible(model, layout), key=order)


def ends_to_try(model: Model, layout: Layout, machine: Cluster) -> set[tuple[int, int]]:
    """Equal ones, the least unequal ones, and those with the fastest slowest stage, as pricing all of them says.

    Of the latter two, with fewer layers on the first stage than on the last, too.
    """
    usual = shorter_ends(model.num_layers, layout.pipeline)
    if layout.pipeline == 1:
        return {usual}
    layout = dataclasses.replace(layout, sequence_parallel=layout.tensor > 1)
    recomputed = dataclasses.replace(layout, recompute=Recompute.FULL, recompute_layers=1)
    found = [fastest(model, one, machine) for one in (layout, recomputed) if any(possible(model, one))]
    ends = {usual, *((one.first_stage_layers, one.last_stage_layers) for one in found)}
    return ends | {(last, first) for first, last in ends if last < first}


@pytest.mark.parametrize(
    ("layers", "memory_gb"),
    [
        (7, 3.2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((11, 3.6), (8, 80), (11, 80), (8, 5), (7, 3.6))),
    ],
)
def test_nothing_beats_the_best_with_other_ends(layers: int, memory_gb: float):
    model, machine, batch = dataclasses.replace(MODEL, num_layers=layers), cluster(4, memory_gb), 8
    layouts = every_layout(model, machine, batch, ends=lambda layout: ends_to_try(model, layout, machine))
    best = fastest_by_schedule(
        (layout.schedule, costs.iteration(model, layout, machine).time_s)
        for layout in layouts
        if memory.largest(model, layout).total_bytes <= machine.memory_bytes
    )
    choices = search(model, machine, batch).choices
    ours = fastest_by_schedule((choice.layout.schedule, choice.loss_time_s) for choice in choices)
    assert ours == pytest.approx(best, rel=1e-12)


KINDS = {
    "gpt": MODEL,
    "a large vocabulary": dataclasses.replace(MODEL, vocab_size=256000, tied=False),
    "bert": MODELS["bert-3.8b"],
    "layers of several kinds": dataclasses.replace(
        MODEL,
        num_layers=12,
        num_experts=8,
        moe_router_topk=2,
        dense_layers=2,
        dense_ffn_hidden_size=512,
        mtp_num_layers=1,
        swiglu=True,
        bias=False,
        learned_positions=False,
    ),
}


@pytest.mark.parametrize(
    ("memory_gb", "fastest"),
    [(80, "v4,E|(t|)*14L"), pytest.param(3.6, "v2,f4,l2,uniform1", marks=pytest.mark.slow)],
)
def test_embedding_and_loss_count_as_layers_where_chunks_interleave(memory_gb: float, fastest: str):
    """Where that is faster than chunks with equally many layers, and fits."""
    model, machine, batch = dataclasses.replace(MODEL, num_layers=14), cluster(4, memory_gb), 16

    def ends(layout: Layout) -> set[tuple[int, int]]:
        return ends_to_try(model, layout, machine)

    layouts = [
        layout
        for layout in every_layout(model, machine, batch, ends=ends, pipelines=(4,), ordinary=())
        if layout.chunks > 1
        if memory.largest(model, layout).total_bytes <= machine.memory_bytes
    ]
    space = Space(pipelines=(4,), chunks=(2, 4), schedules=("megatron",))
    best = search(model, machine, batch, space).best
    assert best.iteration.time_s == min(costs.iteration(model, layout, machine).time_s for layout in layouts)
    assert name(best.layout).endswith(fastest)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("depth", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_balanced_ends_are_the_fastest(kind: str, depth: int, recompute: Recompute):
    """As pricing all of them says; equal stages are if they are as fast."""
    model, machine = KINDS[kind], CLUSTERS["dgx-a100"]
    layout = Layout(schedule="megatron", pipeline=depth, data=1, microbatch=2, global_batch=8, recompute=recompute)
    ends = balanced_ends(model, layout, machine_of(machine))
    best = fastest(model, layout, machine)
    if ends == (0, 0):
        assert slowest_s(model, layout, machine) == pytest.approx(slowest_s(model, best, machine), rel=1e-9)
    else:
        assert ends == (best.first_stage_layers, best.last_stage_layers)


@pytest.mark.parametrize(
    ("layers", "depth", "shorter"),
    [
        *((7, 2, (4, 3)), (15, 4, (4, 3)), (8, 7, (0, 0))),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((105, 16, (4, 3)), (126, 16, (7, 7)))),
    ],
)
def test_stages_that_cannot_be_equal(layers: int, depth: int, shorter: tuple[int, int]):
    """The first and the last are shorter, or as fast as can be; a search prices and names them as an estimate does."""
    model, machine = dataclasses.replace(MODEL, num_layers=layers), cluster(depth, 80)
    found = search(model, machine, 4 * depth, Space(pipelines=(depth,)))
    possible_ends: dict[int, set[tuple[int, int]]] = {}
    for choice in (choice for choice in found.choices if not choice.layout.pipeline_layout):
        layout = choice.layout
        ends = layout.first_stage_layers, layout.last_stage_layers
        if layout.microbatch not in possible_ends:
            plain = Layout(
                schedule="megatron", pipeline=depth, data=1, microbatch=layout.microbatch, global_batch=4 * depth
            )
            possible_ends[layout.microbatch] = ends_to_try(model, plain, machine)
        assert shorter in possible_ends[layout.microbatch]
        assert ends in possible_ends[layout.microbatch] - {(0, 0)}
        assert problem(model, layout) is None
        assert choice == price(model, layout, machine)
        assert f",f{ends[0]},l{ends[1]}" in name(layout)
    assert {choice.layout.schedule for choice in found.choices} >= {"2bw", "1f1b-flush", "gpipe"}


def test_large_models_with_a_number_of_layers_that_few_depths_divide():
    for model, machine, nodes in (("llama3-405b", "dgx-h100", 16), ("gpt-530b", "dgx-a100", 64)):
        whole = dataclasses.replace(CLUSTERS[machine], nodes=nodes)
        assert search(MODELS[model], whole, 2048).best.layout.first_stage_layers


def test_ends_that_are_given_stay_as_they_are():
    machine, given = cluster(4, 80), {"first_stage_layers": (2,), "last_stage_layers": (0, 2)}
    for which in (["first_stage_layers"], ["last_stage_layers"], [*given]):
        limits = {dimension: given[dimension] for dimension in which}
        choices = search(MODEL, machine, 8, Space(pipelines=(4,), **limits)).choices
        assert all(getattr(choice.layout, one) in limits[one] for choice in choices for one in limits)
    free = search(MODEL, machine, 8, Space(pipelines=(4,))).best.layout
    assert (free.first_stage_layers, free.last_stage_layers) != (0, 0)


@pytest.mark.parametrize(
    ("layers", "stages", "text"),
    [(17, 8, "Ett|tt|tt|tt|tt|tt|tt|tttL"), (14, 16, "E|(t|)*14L"), (10, 2, "Ett|(ttt|)*2ttL")],
)
def test_a_layout_that_is_given_needs_no_other_stages(layers: int, stages: int, text: str):
    """Those that other flags describe may not be possible, or not fit."""
    model = dataclasses.replace(MODEL, num_layers=layers)
    plan = search(model, cluster(stages, 80), 64, Space(pipeline_layout=(text,)))
    assert {choice.layout.pipeline_layout for choice in plan.choices} == {text}
    assert stages in {choice.layout.pipeline for choice in plan.choices}
    assert all(choice.layout.chunks > 1 for choice in plan.choices if choice.layout.schedule == "megatron")


def test_all_layers_of_the_largest_chunk_can_be_computed_again():
    model = dataclasses.replace(MODEL, num_layers=10)
    one = Layout(schedule="megatron", pipeline=2, data=1, global_batch=4, pipeline_layout="Ett|(ttt|)*2ttL")
    one = dataclasses.replace(one, recompute=Recompute.FULL, recompute_layers=3)
    assert recompute_problem(model, one) is None
    assert "a stage has 3 layers" in recompute_problem(model, dataclasses.replace(one, recompute_layers=4)).reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|(tt|)*14tL", "has 30 layers (t), not num_layers 8"),
        ("Et|ttttttt", "does not end with L"),
        ("Ettt|ttt|ttL", "has 3 stages, no multiple of pipeline 2; use a multiple of 3 GPUs"),
    ],
)
def test_a_layout_that_does_not_suit(text: str, message: str):
    with pytest.raises(PlanError, match=re.escape(message)):
        search(MODEL, cluster(2, 80), 8, Space(pipeline_layout=(text,), pipelines=(2,)))


def test_stages_that_receive_twice_have_fewer_layers():
    """Late, a stage between the ends waits for two transfers per microbatch, an end for one."""
    machine = machine_of(CLUSTERS["p3.16xlarge"])
    model = dataclasses.replace(MODELS["gpt-1.3b"], vocab_size=1000)
    layout = Layout(schedule="2bw", pipeline=4, data=1, microbatch=8, global_batch=32, fused_attention=False)
    layer_s = costs.times_of(model, layout, CLUSTERS["p3.16xlarge"]).pipeline.middle.pair_s / 6
    ends = [sum(balanced_ends(model, layout, machine, waits * layer_s)) for waits in (0, 1.9, 3.9)]
    assert ends == [0, 14, 16]
