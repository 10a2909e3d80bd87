"""What Megatron's own schedules are priced as is what its code takes on virtual clocks."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from megatron_2bw.planner.pipeline import batch, interleaving, megatron
from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.planner.specs.layout import Layout

from .pipelines import of_each

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")

SIZES = [(2, 2, 2), (2, 6, 3), (3, 6, 2), (4, 8, 2), (4, 16, 3)]
"""Ranks, microbatches, chunks."""


def megatrons_s(pipeline: Pipeline, **ways: bool) -> float:
    from tests.planner import virtual_time

    return virtual_time.batch_s(pipeline, **ways)


def drawn(rng: random.Random, stages: int, microbatches: int, chunks: int) -> Pipeline:
    """Chunks that are alike, alike but for the ends or all different, some of them empty; all sorts of transfers."""
    count = stages * chunks
    each = [Stage(10, 20)] * count
    kind = rng.randrange(3)
    if kind:
        each[0], each[-1] = Stage(rng.randint(0, 15), 25), Stage(rng.randint(5, 25), rng.randint(15, 40))
    if kind == 2:
        each = [Stage(rng.randint(0, 14), rng.randint(0, 28)) for _ in range(count)]
    send_s = Fraction(rng.choice((0, 1, 2, 5, 9, 25)), rng.choice((1, 4)))
    sends_s = tuple(send_s * rng.choice((1, 1, 1, 3)) for _ in each[1:])
    return of_each(each, sends_s, microbatches, chunks)


def layout(p: Pipeline, **more: bool) -> Layout:
    chunks = len(p.each) // p.stages or 1
    return Layout(schedule="megatron", pipeline=p.stages, data=1, global_batch=p.microbatches, chunks=chunks, **more)


@pytest.mark.parametrize(("overlaps", "waits"), [(True, True), (True, False), (False, True)])
def test_interleaved(overlaps: bool, waits: bool):
    """As Megatron runs it since 0.18, as it did before, and without overlap; in some cases every rule shows."""
    for seed in (*range(10), 22, 23, 41, 47, 119):
        rng = random.Random(seed)
        stages, chunks = rng.randint(2 if overlaps else 3, 5), rng.randint(2, 4)
        p = drawn(rng, stages, stages * rng.choice((1, 1, 2, 3, 12)), chunks)
        priced = layout(p, overlap_transfers=overlaps, waits_for_sends=waits)
        found_s = batch.batch_s(priced, p)
        assert found_s == megatrons_s(p, overlaps=overlaps, waits=waits), (p, overlaps, waits)
        assert batch.least_s(priced, p) <= found_s


def test_repeats_are_those_of_whole_batches():
    """With so many microbatches that most are not followed."""
    rng = random.Random(2)
    for stages, microbatches, chunks in ((2, 60, 3), (4, 120, 2), (4, 101, 1)):
        p = drawn(rng, stages, microbatches, chunks)
        assert batch.batch_s(layout(p), p) == megatrons_s(p)


def test_one_f_one_b():
    rng = random.Random(3)
    for _ in range(30):
        p = drawn(rng, rng.randint(2, 6), rng.randint(1, 14), 1)
        found_s = batch.batch_s(layout(p), p)
        assert found_s == megatrons_s(p), p
        assert batch.least_s(layout(p), p) <= found_s


def test_one_f_one_b_in_closed_form(monkeypatch: pytest.MonkeyPatch):
    """Of stages alike but for the ends, as a search prices most."""
    rng, followed = random.Random(6), []
    follow = megatron.one_f_one_b_s
    monkeypatch.setattr(megatron, "one_f_one_b_s", lambda p: followed.append(p) or follow(p))
    for _ in range(40):
        middle, send_s = Stage(rng.randint(2, 10), rng.randint(5, 20)), rng.choice((0, Fraction(1, 4), 3, 25))
        first, last = (Stage(rng.randint(1, 25), rng.randint(1, 40)) for _ in range(2))
        sizes = {"stages": rng.choice((2, 2, 3, 4, 6)), "microbatches": rng.randint(1, 14)}
        p = Pipeline(first=first, middle=middle, last=last, send_s=send_s, **sizes)
        assert batch.batch_s(layout(p), p) == megatrons_s(p), p
    assert 0 < len(followed) < 40


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), SIZES)
def test_the_order(ranks: int, microbatches: int, chunks: int, monkeypatch: pytest.MonkeyPatch):
    table = schedules.get_schedule_table(microbatches, chunks, ranks)
    for name in ("get_pipeline_model_parallel_world_size", "get_virtual_pipeline_model_parallel_world_size"):
        monkeypatch.setattr(schedules.parallel_state, name, lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(schedules.parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        _, _, warmup, _ = schedules.get_pp_rank_microbatches(microbatches, chunks, ranks)
        steps = list(interleaving.order(rank, ranks=ranks, microbatches=microbatches, chunks=chunks))
        assert [(index, chunk) for forward, chunk, index in steps if forward] == table
        assert [(index, chunks - 1 - chunk) for forward, chunk, index in steps if not forward] == table
        ways = "".join("BF"[forward] for forward, *_ in steps)
        assert ways == "F" * warmup + "FB" * (len(table) - warmup) + "B" * warmup
