"""PipeDream-2BW's planner: its formulas as printed and its search."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from paper_figures import GPT_1_3B, GPT_2_2B, GPT_3_8B, servers

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.papers import paper
from megatron_2bw.planner.papers.blocks import (
    Blocks,
    compute_s,
    depth_bytes_per_s,
    estimate,
    reduce_s,
    transfer_s,
    width_bytes_per_s,
)
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS

GIB = 2**30
WIDE = Model(num_layers=8, hidden_size=8192, num_attention_heads=64, seq_length=512, vocab_size=50257, name="wide")
TOY = Blocks(
    count=12,
    state_bytes=1200,
    gradient_bytes=2.4e9,
    activation_bytes=240,
    boundary_bytes=1.5e9,
    start_s=0.25,
    sample_s=0.5,
)
"""Sizes that make every term of a formula visible."""
PAIR = dataclasses.replace(CLUSTERS["p3.16xlarge"], nodes=2, intra_node_gb_s=100, inter_node_gb_s=8, gpus_per_node=8)
"""B_high 100 GB/s, B_low 1 GB/s for each GPU."""


# The formulas.


def test_memory_as_printed():
    """d = 4, b = 2, m = 16: |W|/d = 300, |A_total(b)|/d = 120, |A_input(b)| = 3e9."""
    shape = {"depth": 4, "microbatch": 2, "microbatches": 16}
    full = {name: paper.memory_bytes(TOY, schedule=name, **shape, recompute=False) for name in paper.VERSIONS}
    assert full["2bw"] == 2 * 300 + 4 * 120 + 4 * 3e9
    assert full["inter-layer"] == 300 + 120 + 3e9
    small = {name: paper.memory_bytes(TOY, schedule=name, **shape, recompute=True) for name in paper.VERSIONS}
    assert small["2bw"] == 2 * 300 + 120 + 4 * 3e9
    assert small["gpipe"] == 300 + 120 + 16 * 3e9
    assert small["1f1b-flush"] == 300 + 120 + 4 * 3e9
    few = paper.memory_bytes(TOY, schedule="1f1b-flush", depth=4, microbatch=2, microbatches=3, recompute=True)
    assert few == 300 + 120 + 3 * 3e9


def test_parts_of_the_time():
    """Three blocks per stage; 4 tensors of 3e9 bytes at 1 GB/s; a ring of 4 moves 3/2 of 0.6e9 bytes at 100 GB/s."""
    assert compute_s(TOY, depth=4, microbatch=2) == 3 * (0.25 + 2 * 0.5)
    assert compute_s(TOY, depth=4, microbatch=2, recompute=True) == pytest.approx(5)
    assert transfer_s(TOY, PAIR, width=4, depth=4, microbatch=2) == pytest.approx(12)
    assert transfer_s(TOY, PAIR, width=4, depth=1, microbatch=2) == 0
    assert reduce_s(TOY, PAIR, width=4, depth=4) == pytest.approx(0.009)
    assert reduce_s(TOY, PAIR, width=1, depth=4) == 0


def test_time_as_printed():
    shape = {"width": 2, "depth": 4, "microbatch": 2, "microbatches": 8}
    busy_s = 3.75 + 12e9 / 100e9  # Eight GPUs share a node: B_high.
    full = paper.samples_per_s(TOY, PAIR, schedule="2bw", **shape, recompute=False)
    assert full == pytest.approx(2 * 2 / busy_s)
    small = paper.samples_per_s(TOY, PAIR, schedule="2bw", **shape, recompute=True)
    assert small == pytest.approx(2 * 2 / (5 + 0.12))
    sequential = paper.samples_per_s(TOY, PAIR, schedule="inter-layer", **shape, recompute=False)
    assert sequential == pytest.approx(2 * 2 / (4 * busy_s))


def test_where_the_reduction_takes_longer():
    """8 replicas, B_low: 7/4 of 1.2e9 bytes at 1 GB/s per batch of m microbatches."""
    blocks = dataclasses.replace(TOY, start_s=0, sample_s=1e-3, boundary_bytes=0)
    shape = {"width": 8, "depth": 2, "microbatch": 1, "recompute": False}
    for microbatches in (2, 4):
        speed = paper.samples_per_s(blocks, PAIR, schedule="2bw", **shape, microbatches=microbatches)
        assert speed == pytest.approx(8 / (2.1 / microbatches))
        speed = paper.samples_per_s(blocks, PAIR, schedule="inter-layer", **shape, microbatches=microbatches)
        assert speed == pytest.approx(8 / (2 * 2.1 / microbatches))


@pytest.mark.parametrize(
    ("width", "depth", "within", "along"),
    [
        (7, 1, True, True),
        (8, 2, False, True),
        (1, 8, True, True),
        (1, 9, True, False),
        (2, 4, True, True),
        (2, 8, True, False),
        (4, 4, True, False),
        (8, 1, False, True),
    ],
)
def test_links(width: int, depth: int, within: bool, along: bool):
    """B_high between replicas if w < 8; between stages where the replicas leave room on the node."""
    speeds = {True: 100e9, False: 1e9}
    assert width_bytes_per_s(PAIR, width) == speeds[within]
    assert depth_bytes_per_s(PAIR, width, depth) == speeds[along]


def test_one_node_has_no_slow_link():
    one = dataclasses.replace(PAIR, nodes=1)
    assert width_bytes_per_s(one, 8) == depth_bytes_per_s(one, 1, 8) == 100e9


def test_estimates_are_those_of_the_literature():
    """Korthikanti et al.: activations ``s*h*(34 + 5*a*s/h)``, model FLOPs ``72*s*h^2*(1 + s/(6*h))`` per layer."""
    for model in (GPT_1_3B, GPT_2_2B, GPT_3_8B):
        s, h, a = model.seq_length, model.hidden_size, model.num_attention_heads
        blocks = estimate(model, CLUSTERS["p3.16xlarge"].gpu)
        assert blocks.activation_bytes == model.num_layers * s * (34 * h + 5 * a * s)
        assert blocks.sample_s * 45e12 == pytest.approx(72 * s * h**2 * (1 + s / (6 * h)), rel=1e-3)
        assert blocks.boundary_bytes == 2 * s * h


def test_only_chosen_experts_compute():
    dense = dataclasses.replace(MODELS["gpt-355m"], num_layers=4)
    mixture = dataclasses.replace(dense, num_experts=8, moe_router_topk=2)
    gpu = CLUSTERS["p3.16xlarge"].gpu
    extra_s = estimate(mixture, gpu).sample_s - estimate(dense, gpu).sample_s
    assert extra_s == pytest.approx(3 * 2 * 512 * dense.mlp_parameters / 45e12)
    gated = dataclasses.replace(dense, swiglu=True)
    extra_bytes = estimate(gated, gpu).activation_bytes - estimate(dense, gpu).activation_bytes
    assert extra_bytes == 4 * 512 * 2 * dense.ffn_hidden_size


# The search.


def every_configuration(model: Model, cluster: object, batch: int) -> list[tuple]:
    """All that fits, by brute force: (width, depth, schedule, recompute, microbatch, samples/s)."""
    blocks = estimate(model, cluster.gpu)
    found = []
    for schedule, recompute in paper.EXECUTIONS:
        for width in range(1, cluster.gpus + 1):
            for depth in range(1, cluster.gpus // width + 1):
                for microbatch in range(1, batch + 1):
                    microbatches, rest = divmod(batch, width * microbatch)
                    if rest or model.num_layers % depth or (schedule == "2bw" and microbatches % depth):
                        continue
                    shape = {"schedule": schedule, "depth": depth, "microbatch": microbatch, "recompute": recompute}
                    shape["microbatches"] = microbatches
                    if paper.memory_bytes(blocks, **shape) <= cluster.gpu.memory_gb * GIB:
                        speed = paper.samples_per_s(blocks, cluster, width=width, **shape)
                        found.append((width, depth, schedule, recompute, microbatch, speed))
    return found


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("batch", [24, 32])
def test_the_search_is_exhaustive(batch: int, recompute: bool | None):
    """Per (w, d) the fastest of the executions, each with its largest microbatch."""
    model, cluster = MODELS["gpt-355m"], dataclasses.replace(servers(2), gpus_per_node=6)
    largest: dict[tuple, tuple] = {}
    for configuration in every_configuration(model, cluster, batch):
        if recompute in (None, configuration[3]):
            key = configuration[:4]
            largest[key] = max(largest.get(key, configuration), configuration, key=lambda c: c[4])
    fastest: dict[tuple, float] = {}
    for width, depth, *_, speed in largest.values():
        fastest[width, depth] = max(fastest.get((width, depth), 0), speed)
    plans = paper.plan(model, cluster, batch, recompute=recompute)
    assert {(p.width, p.depth): p.samples_per_s for p in plans} == fastest
    assert all(a.samples_per_s >= b.samples_per_s for a, b in pairwise(plans))
    chosen = [(p.width, p.depth, p.schedule, p.recompute) for p in plans]
    assert [p.microbatch for p in plans] == [largest[key][4] for key in chosen]
    assert {p.schedule for p in plans} == ({"2bw"} if recompute else {"2bw", "inter-layer"})


def test_batches_are_whole():
    for batch in (64, 96, 512):
        for plan in paper.plan(GPT_1_3B, servers(8), batch):
            shape = plan.depth if plan.schedule == "2bw" else 1
            assert plan.microbatch * plan.width * shape * plan.accumulation == batch
            assert plan.microbatch * plan.width * plan.microbatches == batch


def test_a_profile_takes_the_place_of_the_estimate():
    blocks = estimate(GPT_1_3B, servers(1).gpu)
    slow = dataclasses.replace(blocks, start_s=2 * blocks.start_s, sample_s=2 * blocks.sample_s, boundary_bytes=0)
    fast = dataclasses.replace(blocks, boundary_bytes=0)
    speeds = [paper.plan(GPT_1_3B, servers(1), 64, blocks=b)[0].samples_per_s for b in (fast, slow)]
    assert speeds[0] == pytest.approx(2 * speeds[1])


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (GPT_2_2B, 0, "global_batch 0 is no count; give a whole number of at least 1"),
        (GPT_2_2B, 7, r"global_batch 7 is no multiple of a depth that fits \(8\): use 8"),
        (GPT_2_2B, 15, r"global_batch 15 is no multiple of a depth that fits \(8\): use 16"),
        (WIDE, 64, r"model wide does not fit on 8 x v100-16gb \(15.78 GiB each\): depth 8 with a"),
    ],
)
def test_what_cannot_be_planned(model: Model, batch: int, message: str):
    with pytest.raises(PlanError, match=message):
        paper.plan(model, servers(1), batch, recompute=True)


def test_schedules_without_a_formula():
    shape = {"depth": 2, "microbatch": 1, "microbatches": 2, "recompute": False}
    with pytest.raises(PlanError, match="schedule 'gpipe': the paper's cost model has no flushes"):
        paper.samples_per_s(TOY, PAIR, schedule="gpipe", width=1, **shape)
    with pytest.raises(PlanError, match="schedule 'gems' has no formula in the paper"):
        paper.memory_bytes(TOY, schedule="gems", **shape)
