"""Rules of layouts that no other test of the planner is about."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.rules import (
    context_problem,
    count_problem,
    delay_of,
    expert_problem,
    model_problem,
    needs_megatron_0_19,
    overlap_problem,
    problem,
    recompute_problem,
)
from megatron_2bw.planner.specs.layout import Layout, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.validation.feasible import works

MODEL = Model(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=50257)


def layout(**changes) -> Layout:
    return Layout(**({"schedule": "megatron", "pipeline": 1, "data": 1, "global_batch": 4} | changes))


def test_a_changed_layout_is_checked_as_a_new_one():
    one = layout()
    changes = {"schedule": "1f1b-flush", "recompute": Recompute.FULL, "recompute_layers": 2}
    assert one.but(**changes) == replace(one, **changes) != one
    assert hash(one.but()) == hash(one)
    for wrong, message in ({"pipeline": 0}, "pipeline 0"), ({"microbatch": 3 * one.global_batch}, "no multiple"):
        with pytest.raises(PlanError, match=message):
            one.but(**wrong)
    with pytest.raises(TypeError, match="a Layout has no depth"):
        one.but(depth=2)


def test_pipedream_delays_by_the_stages_behind():
    assert delay_of(layout(schedule="pipedream", pipeline=4)) == 3


def test_only_experts_that_are_split_alone_need_a_newer_megatron():
    one = layout(schedule="2bw", pipeline=2, data=4, tensor=2, expert_tensor=1, global_batch=32)
    assert needs_megatron_0_19(one)
    assert not needs_megatron_0_19(replace(one, expert=2))
    assert needs_megatron_0_19(replace(one, schedule="megatron")), "it is Megatron's fault"


def test_chunks_whose_transfers_do_not_overlap_need_three_ranks():
    """``validate_args``: two would send to each other both ways at once."""
    two = layout(pipeline=2, chunks=2)
    assert problem(MODEL, two) is None
    alone = replace(two, overlap_transfers=False)
    assert problem(MODEL, alone).reason == "chunks 2 need overlap_transfers True on 2 stages"
    assert problem(MODEL, replace(alone, pipeline=4)) is None


def test_the_number_of_ranks_that_is_named_can_share_the_sequence():
    odd, one = replace(MODEL, seq_length=1000), layout(context=8)
    named = int(context_problem(odd, one).remedy.split()[-1])
    assert context_problem(odd, replace(one, context=named)) is None


def test_ranks_that_share_sequences_share_experts():
    assert expert_problem(replace(MODEL, num_experts=4, bias=False), layout(context=4, expert=4)) is None


@pytest.mark.parametrize("one_of_two", ["distributed_optimizer", "overlap_gradients"])
def test_gathering_weights_during_forwards_needs_both(one_of_two: str):
    assert overlap_problem(layout(data=2, overlap_parameters=True, **{one_of_two: True})) is not None


def test_groups_of_layers_and_further_tokens_exclude_each_other():
    deep = replace(MODEL, mtp_num_layers=1, learned_positions=False)
    two = layout(pipeline=2, recompute=Recompute.FULL, recompute_layers=2)
    assert model_problem(deep, two) is not None
    assert model_problem(deep, replace(two, recompute_method=RecomputeMethod.BLOCK)) is None


def test_all_layers_of_a_stage_can_be_computed_again():
    six = layout(pipeline=4, recompute=Recompute.FULL, recompute_layers=6)
    assert recompute_problem(MODEL, six) is None
    assert recompute_problem(MODEL, replace(six, recompute_layers=7)) is not None


def test_the_nearest_batch_is_named():
    seven = problem(MODEL, layout(schedule="chimera", pipeline=4, global_batch=7))
    assert seven.remedy == "use global_batch 8"


@pytest.mark.parametrize(("stages", "extra"), product((2, 3, 4), (0, 1, 2)))
def test_as_many_delayed_microbatches_as_are_named_run(stages: int, extra: int):
    """Also beside the schedule itself, and where none but all of them do."""
    least = (1 + extra) * (stages - 1)
    for count, delayed in product(range(least, least + 4), range(1, least + 6)):
        one = layout(
            schedule="2bw", pipeline=stages, extra_in_flight=extra, global_batch=count, delayed_microbatches=delayed
        )
        runs = works("2bw", stages=stages, microbatches=count, extra_in_flight=extra, delayed_microbatches=delayed)
        refused = problem(MODEL, one)
        if refused is None:
            assert runs
            continue
        assert delayed > count or not runs
        assert problem(MODEL, replace(one, delayed_microbatches=0)) is None
        named = [int(number) for number in re.findall(r"use (\d+), or leave it out", refused.remedy)]
        assert named or refused.remedy == "leave it out"
        for number in named:
            assert number < count, "all of them: the search has that without the number"
            assert problem(MODEL, replace(one, delayed_microbatches=number)) is None


@pytest.mark.parametrize(
    ("field", "count", "nearest"),
    [("gradient_buffers", 0, 2), ("gradient_buffers", 3, 2), ("extra_in_flight", 9, 3), ("mixpipe_k", 1, 2)],
)
def test_counts_that_no_layout_has_are_answered_with_the_nearest(field: str, count: int, nearest: int) -> None:
    assert count_problem(field, count).remedy == f"use {nearest}"
    assert count_problem(field, nearest) is None
