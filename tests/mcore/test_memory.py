"""What 2BW costs in memory: one more copy of the weights and of the gradients, and nothing else."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megatron_2bw.schedule.registry import build

from .case import Case
from .features import IN_BF16
from .harness import collect
from .memory import Memory, measure

WITHIN = 0.05
LARGE = ("--num-layers", "8", "--hidden-size", "256")
"""Weights, not activations, decide."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_has_one_more_copy_of_weights_and_gradients(precision: str) -> None:
    case = Case(schedule="2bw", stages=2, microbatches=2, batches=6, precision=precision, flags=LARGE)
    for stage, (ours, theirs) in enumerate(compared(case)):
        assert ours.peak - theirs.peak == pytest.approx(ours.weights + ours.gradients, rel=WITHIN)
        assert ours.in_flight == theirs.in_flight == case.stages - stage


def test_gradients_in_bf16_save_nothing_at_the_peak_without_shards() -> None:
    """Their copies in fp32 are as large as what two buffers of half the size save."""
    whole = Case(schedule="2bw", stages=2, microbatches=2, batches=6, precision="bf16", flags=LARGE)
    half = replace(whole, flags=(*LARGE, *IN_BF16))
    for in_fp32, in_bf16 in zip(of_each_stage(whole), of_each_stage(half), strict=True):
        assert in_bf16.gradients == in_fp32.gradients // 2
        assert in_bf16.lasting == pytest.approx(in_fp32.lasting - in_fp32.gradients, rel=WITHIN)
        assert in_bf16.peak == pytest.approx(in_fp32.peak, rel=WITHIN)


@pytest.mark.parametrize(
    ("distributed", "buffers", "flags"), [(True, 2, ()), (True, 2, IN_BF16), (True, 1, ()), (False, 1, ())]
)
def test_what_lasts_is_a_copy_of_the_weights_and_of_what_is_updated_here(
    distributed: bool, buffers: int, flags: tuple[str, ...]
) -> None:
    case = Case(
        schedule="2bw",
        stages=2,
        microbatches=4,
        batches=4,
        replicas=2 if distributed else 1,
        precision="bf16",
        recompute="full",
        distributed_optimizer=distributed,
        flags=(*LARGE, *flags),
    )
    two_bw = replace(case, flags=(*case.flags, "--pipeline-gradient-buffers", str(buffers)))
    flush = replace(case, schedule="1f1b-flush")
    for ours, theirs in zip(of_each_stage(two_bw), of_each_stage(flush), strict=True):
        expected = ours.weights + (ours.gradients if buffers == 2 else 0)
        assert ours.lasting - theirs.lasting == pytest.approx(expected, rel=WITHIN)


def test_pipedream_keeps_a_version_for_every_stage_behind() -> None:
    """And no second buffer of gradients: the update comes before the next backward."""
    case = Case(schedule="pipedream", stages=4, batches=16, tied=False, recompute="full", flags=LARGE)
    declared = build("pipedream", stages=4, microbatches=1)
    for stage, (ours, theirs) in enumerate(compared(case)):
        older = declared.weight_versions[stage] - 1
        assert ours.lasting - theirs.lasting == pytest.approx(
            older * ours.weights, rel=WITHIN, abs=WITHIN * ours.weights
        )
        assert ours.in_flight == declared.in_flight[stage] == case.stages - stage


def test_in_both_directions_a_rank_keeps_another_stage_without_its_optimizer() -> None:
    """Its weights and gradients, and a buffer for those of the rank's own stage from the other copy."""
    case = Case(schedule="chimera", stages=2, microbatches=4, batches=6, tied=False, flags=LARGE)
    declared = build("chimera", stages=2, microbatches=4)
    ranks = compared(case)
    for rank, (ours, theirs) in enumerate(ranks):
        lent = ranks[1 - rank][0]
        expected = lent.weights + lent.gradients + ours.gradients
        assert ours.lasting - theirs.lasting == pytest.approx(expected, rel=WITHIN)
        assert ours.in_flight == declared.in_flight[rank]


def compared(case: Case) -> list[tuple[Memory, Memory]]:
    """Every stage under 2bw and under 1f1b-flush."""
    return list(zip(of_each_stage(case), of_each_stage(replace(case, schedule="1f1b-flush")), strict=True))


@functools.cache
def of_each_stage(case: Case) -> list[Memory]:
    """Of two replicas the one with less: gloo keeps the buffer of its last collective for a while."""
    ranks = collect(measure, case)
    stages = [ranks[first : first + case.replicas] for first in range(0, case.ranks, case.replicas)]
    return [min(replicas, key=lambda memory: memory.lasting) for replicas in stages]
