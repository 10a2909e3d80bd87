"""MixPipe's performance model: published spans, what memory allows, and the choices that follow."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from itertools import pairwise

import pytest
from paper_figures import BERT_48, GPT_72, mixpipe_speedups, steps_of

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.papers import mixpipe
from megatron_2bw.planner.papers.blocks import Blocks, compute_s, estimate
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate
from megatron_2bw.schedule.systems.mixpipe import claimed_span

GIB = 2**30
SERVERS = dataclasses.replace(CLUSTERS["p3dn.24xlarge"], nodes=4)
"""32 V100 of 32 GB."""
BUDGET = mixpipe.budget_bytes(SERVERS)
TOY = Blocks(
    count=12, state_bytes=1200, gradient_bytes=4e9, activation_bytes=240, boundary_bytes=1e9, start_s=0.5, sample_s=1
)


@pytest.mark.parametrize(
    ("depth", "injected", "extra", "span"),
    [
        (4, 4, 0, 16),
        (4, 2, 0, 22),
        (4, 2, 1, 19),
        (6, 4, 0, 32),
        (6, 4, 1, 29),
        (6, 6, 0, 26),
        (8, 4, 0, 48),
        (8, 4, 1, 45),
        (8, 6, 1, 39),
        (8, 8, 0, 36),
    ],
)
def test_spans(depth: int, injected: int, extra: int, span: int):
    """Of schedules found by simulation with F = 1 and B = 2; (D, 0) is Chimera."""
    assert 3 * mixpipe.steps(depth, injected, extra) == span


@pytest.mark.parametrize(("depth", "published", "least"), [(8, 54, 54), (10, 70, Fraction(165, 2)), (12, 86, 117)])
def test_spans_that_memory_rules_out(depth: int, published: int, least: Fraction):
    """With 2 activations in flight; (F+B)*D*(D+1)/(2*(K+Gamma))."""
    assert claimed_span(depth, 2, 0) == published
    assert 3 * mixpipe.steps(depth, 2, 0) == least


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush"])
def test_steps_of_schedules_that_can_be_simulated(schedule: str):
    for depth in range(1, 7):
        for microbatches in range(1, 9):
            built = build(schedule, stages=depth, microbatches=microbatches)
            span_s = simulate(built, Durations(forward_s=1, backward_s=2), 1).makespan_s
            assert 3 * steps_of(schedule, depth, microbatches) == span_s


def test_steps_of_gems():
    """One microbatch after the other, in turn from both ends; every rank runs F_0 B_0 F_1 B_1 ..."""
    for depth in range(2, 9, 2):
        for microbatches in range(1, 9):
            free, end = [0] * depth, 0
            for microbatch in range(microbatches):
                ranks, end = list(range(depth)) if microbatch % 2 == 0 else list(range(depth))[::-1], 0
                for rank, duration in [(rank, 1) for rank in ranks] + [(rank, 2) for rank in reversed(ranks)]:
                    end = free[rank] = max(end, free[rank]) + duration
            assert 3 * steps_of("gems", depth, microbatches) == end


def test_bubble_ratios_of_the_others():
    """GEMS tends to (D-1)/(D+1/2); Chimera is (D-2)/(3D/2+D-2) for a backward of two forwards."""
    for depth in range(2, 13, 2):
        idle = 1 - Fraction(10**9) / steps_of("gems", depth, 10**9)
        assert float(idle) == pytest.approx((depth - 1) / (depth + 0.5))
        chimera = steps_of("chimera", depth, depth)
        assert 1 - depth / chimera == Fraction(depth - 2) / (Fraction(3, 2) * depth + depth - 2)


def test_choices():
    """K = 2k with k in [1, D/2], Gamma in [0, (D-K)/2]: never more than D in flight."""
    assert list(mixpipe.choices(2)) == [(2, 0)]
    assert list(mixpipe.choices(6)) == [(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (6, 0)]
    for depth in range(2, 17, 2):
        found = list(mixpipe.choices(depth))
        assert len(found) == len(set(found)) == sum((depth - k) // 2 + 1 for k in range(2, depth + 1, 2))
        assert all(k + gamma <= depth for k, gamma in found)


def test_memory_as_printed():
    assert mixpipe.memory_bytes(TOY, depth=4, microbatch=5, in_flight=3) == 2 * 300 + 3 * 5 * 60
    for budget_bytes in (599, 600, 779, 780, 5000):
        fits = mixpipe.largest_microbatch(TOY, budget_bytes, depth=4, in_flight=3)
        assert fits == max(0, (budget_bytes - 600) // 180)


def test_time_of_a_batch():
    """D = 4, W = 2 on 2 nodes of 4: B = 3; 19/3 steps of 10.5 s, 6 hops of 3 GB at 100 GB/s, a ring of 4 at 1 GB/s."""
    cluster = dataclasses.replace(SERVERS, nodes=2, gpus_per_node=4, intra_node_gb_s=100, inter_node_gb_s=4)
    plans = mixpipe.plan(BERT_48, cluster, 24, blocks=TOY)
    plan = next(p for p in plans if (p.depth, p.injected, p.extra) == (4, 2, 1))
    assert (plan.width, plan.microbatch) == (2, 3)
    assert plan.samples_per_s == pytest.approx(24 / (19 / 3 * 10.5 + 6 * 0.03 + 2 * 1.5))
    assert plan.memory_bytes == 600 + 3 * 3 * 60


@pytest.mark.parametrize("microbatch", [8, 16, 20, 30])
def test_the_search_is_exhaustive(microbatch: int):
    plans = mixpipe.plan(BERT_48, SERVERS, 32 * microbatch)
    blocks = estimate(BERT_48, SERVERS.gpu)
    fitting = {
        (depth, *choice)
        for depth in (2, 4, 8, 16)
        for choice in mixpipe.choices(depth)
        if mixpipe.memory_bytes(blocks, depth=depth, microbatch=microbatch, in_flight=sum(choice)) <= BUDGET
    }
    assert {(p.depth, p.injected, p.extra) for p in plans} == fitting
    assert len(plans) == len(fitting)
    assert all(a.samples_per_s >= b.samples_per_s for a, b in pairwise(plans))
    assert all(p.memory_bytes <= BUDGET for p in plans)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (BERT_48, 100, "global_batch 100 is no multiple of 32 GPUs: use 96"),
        (BERT_48, 0, "global_batch 0 is no count; give a whole number of at least 1"),
        (BERT_48, 32 * 999, "does not fit on 32 x v100-32gb with microbatches of 999: use global_batch"),
        (dataclasses.replace(BERT_48, num_layers=47), 32, "has 47 blocks: no even depth divides them and 32 GPUs"),
        (
            dataclasses.replace(GPT_72, hidden_size=16384, num_attention_heads=64, name="wide"),
            32,
            "model wide does not fit .* use more GPUs, or larger ones",
        ),
    ],
)
def test_what_cannot_be_planned(model: Model, batch: int, message: str):
    with pytest.raises(PlanError, match=message):
        mixpipe.plan(model, SERVERS, batch)


def test_a_refused_batch_names_one_that_fits():
    with pytest.raises(PlanError) as refused:
        mixpipe.plan(BERT_48, SERVERS, 32 * 999)
    batch = int(str(refused.value).split("global_batch ")[1].split()[0])
    assert mixpipe.plan(BERT_48, SERVERS, batch)
    with pytest.raises(PlanError):
        mixpipe.plan(BERT_48, SERVERS, batch + 32)


def test_what_has_no_meaning():
    with pytest.raises(PlanError, match="depth 3: bidirectional pipelines need an even one; use 4"):
        mixpipe.choices(3)
    with pytest.raises(PlanError, match="microbatches 8: chimera is defined for as many as its depth; use 4"):
        steps_of("chimera", 4, 8)
    with pytest.raises(PlanError, match="choose one of gpipe, 1f1b-flush, gems, chimera"):
        steps_of("2bw", 4, 4)


# What the paper decides and reports, and which of it the formulas give.


def test_sizes_of_the_models():
    """Table II."""
    assert BERT_48.parameters == pytest.approx(669_933_442, rel=0.005)
    assert GPT_72.parameters == pytest.approx(1_010_477_056, rel=0.005)


def test_what_is_left_for_tensors():
    """31.74 GiB less 1.5 for the CUDA context and its like, and 5% lost between tensors."""
    assert pytest.approx(30.24 / 1.05) == BUDGET / GIB


@pytest.mark.parametrize(("model", "batch", "microbatch"), [(BERT_48, 512, 16), (GPT_72, 256, 8)])
def test_half_of_the_depth_is_injected(model: Model, batch: int, microbatch: int):
    """32 V100-32GB, D = 4: MixPipe runs with K = D/2 and without recompute, Chimera cannot."""
    best = next(p for p in mixpipe.plan(model, SERVERS, batch) if p.depth == 4)
    assert (best.injected, best.extra, best.microbatch) == (2, 1, microbatch)
    assert mixpipe.largest_microbatch(estimate(model, SERVERS.gpu), BUDGET, depth=4, in_flight=4) < microbatch


def test_where_half_the_depth_is_not_chosen():
    """Eight stages of these models are small enough for more of the microbatches at once."""
    for model, batch, choice in ((BERT_48, 512, (6, 1)), (GPT_72, 256, (8, 0))):
        best = next(p for p in mixpipe.plan(model, SERVERS, batch) if p.depth == 8)
        assert (best.injected, best.extra) == choice


def test_speedups():
    """Weak scaling on 32 GPUs: within 15% of what is published. GPipe and Chimera have to recompute."""
    table = mixpipe_speedups()
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    errors = {(row["model"], row["over"]): row["predicted"] / row["published"] - 1 for row in rows}
    assert len(errors) == 8
    assert all(abs(error) < 0.15 for error in errors.values()), errors
    recomputing = {(row["model"], row["over"]) for row in rows if row["recompute"] == "yes"}
    assert recomputing == {("Bert-48", "gpipe"), ("Bert-48", "chimera"), ("GPT-72", "chimera")}


def test_a_speedup_by_hand():
    """Over Chimera with recompute at equal microbatches: 4/3 * 16/19."""
    blocks = estimate(BERT_48, SERVERS.gpu)
    chimera_s = float(steps_of("chimera", 4, 4)) * compute_s(blocks, depth=4, microbatch=16, recompute=True)
    own_s = float(mixpipe.steps(4, 2, 1)) * compute_s(blocks, depth=4, microbatch=16)
    assert chimera_s / own_s == pytest.approx(4 / 3 * 16 / 19)
    predicted = next(row for row in mixpipe_speedups().rows if row[:4] == ("Bert-48", 2, 1, "chimera"))[6]
    assert predicted == pytest.approx(chimera_s / own_s)
