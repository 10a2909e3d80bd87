"""A training loop that is not Megatron's, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from . import custom_loop
from .case import Case
from .compare import differing
from .features import BIASED, GLOBALLY_BALANCED, IN_BF16
from .harness import collect, merge, run
from .oracle import oracle

CASES = (Case(stages=2, microbatches=2, tied=False, batches=12), Case(stages=2, microbatches=2, replicas=2, batches=12))


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        replace(CASES[0], precision="fp16", delayed=1),
        replace(CASES[1], precision="bf16", model=IN_BF16),
    ],
    ids=["untied", "tied-w2", "fp16, half delayed", "gradients in bf16, tied-w2"],
)
def test_equals_the_oracle(case: Case) -> None:
    found = looped(replace(case, schedule="2bw"))
    expected = oracle(replace(case, schedule="2bw"), delay=1)
    assert differing(found, expected, norms=False) == []
    assert found.rates == expected.rates


def test_synchronous_schedules_equal_megatrons_training_loop() -> None:
    found, expected = looped(replace(CASES[0], schedule="gpipe")), run(CASES[0])
    assert differing(found, expected) == []


def test_a_mirrored_stage_of_its_own() -> None:
    case = replace(CASES[0], schedule="chimera")
    assert differing(looped(case), run(case)) == []


@pytest.mark.parametrize(
    ("case", "then"),
    [
        (CASES[0], "1f1b-flush"),
        (replace(CASES[0], precision="fp16"), "megatron"),
        (CASES[1], "1f1b-flush"),
        (replace(CASES[0], model=BIASED), "1f1b-flush"),
        (replace(CASES[0], model=GLOBALLY_BALANCED), "1f1b-flush"),
    ],
    ids=["untied", "fp16, Megatron's own", "tied-w2", "biases of experts", "experts, loss over the batch"],
)
def test_a_synchronous_schedule_can_go_on(case: Case, then: str) -> None:
    """With Megatron's optimizer, as it was before, and no token of an expert counted yet."""
    case = replace(case, schedule="2bw")
    found = looped(case, then=then)
    differences = differing(found, oracle(case, delay=1, delayed_batches=case.batches // 2), norms=False)
    assert differences == ["skipped updates"], "which are kept of delayed updates only"


def test_a_second_pipeline_scales_losses_by_its_versions() -> None:
    """Where the loop has set the function of the first one's optimizer; see `custom_loop.main`."""
    case = replace(CASES[0], schedule="2bw", precision="fp16")
    # With the version of the second one's first batches, or with that before, the scale is the same.
    assert torch.equal(looped(case, then="2bw").seeds, oracle(case, delay=1).seeds)


def test_a_delay_can_begin_later() -> None:
    """What the last batch before it has left in Megatron's gradient buffers is not part of the next one."""
    case = replace(CASES[0], schedule="1f1b-flush")
    found = looped(case, then="2bw")
    expected = oracle(replace(case, schedule="2bw", synchronous=case.batches // 2), delay=1)
    assert differing(found, expected, norms=False) == []


def test_what_does_not_work_is_refused() -> None:
    answers = collect(custom_loop.refused, CASES[0])[0]
    expected = {
        "overlap": "--overlap-grad-reduce sets must be off with 2bw",
        "clipped attention": "attention records no logits to clip or log: use that of Transformer Engine >= 2.9",
        "delayed weight gradients": "--delay-wgrad-compute sets does not work with gpipe",
        "three": "--delay-wgrad-compute sets does not work with 2bw",
        "name": "unknown schedule 'unheard'; choose one of 2bw",
        "long lead": "a lead of 20 needs a decay of the first moment above 0.952381, got 0.9",
        "lead without a delay": "gpipe has no delay of one batch to correct",
        "one buffer": "gpipe keeps no finished gradients: leave gradient_buffers out, or use 2bw",
        "lead of updates": "needs main weights beside the model's: use bf16 or fp16 for all weights",
        "lead by name": "correction 'lead': give MomentLead(steps), or UpdateLead, of megatron_2bw.runtime.corrections",
        "evaluation": "forward_only is set: evaluate with Megatron-Core's get_forward_backward_func(), after settle()",
        "scheduler": "moves the learning-rate schedule by 1, and a batch has 0 samples",
        "synchronous": "gpipe has no delay of one batch to leave out",
        "sums in fp32": "--ddp-reduce-scatter-with-fp32-accumulation with --ddp-average-in-collective sets does not "
        "work with 2bw",
        "left": "left -1: the batch before this one was announced as the last; give 0 or more, or None",
        "keyword": "forward_backward() got an unexpected keyword argument 'lefts'",
        "reduced by all": "the training loop passes force_all_reduce to its schedule, and 2bw reduces a captured copy",
        "closed": "the pipeline is closed: make another one",
        "step": "a pipeline updates with this optimizer by itself: call step() of pipeline.optimizer",
        "two": "the optimizer belongs to a pipeline that is in use: close() that one first",
        "mirror": "chimera needs a mirrored stage: pass mirrored=megatron_2bw.build_mirrored(...)",
        "no mirror": "2bw has no mirrored stage: leave mirrored out",
        "three buffers": "gradient_buffers 3: use 1 or 2",
        "timers": "the timers of a config wait for the device inside a call, and 2bw must not: use log level 0",
        "bare": "2bw needs a model in Megatron-Core's DistributedDataParallel, got GPTModel",
        "reduced otherwise": "config.finalize_model_grads_func is not Megatron's own, and 2bw does not call it",
        "scaled otherwise": "config.mtp_grad_scale_func is set: it knows the loss scale of the newest weights",
        "nothing": "",
    }
    assert answers.keys() == expected.keys()
    assert {name: answers[name] for name, part in expected.items() if part not in answers[name]} == {}
    assert answers["nothing"] == ""
    assert "bf16 is set in the config of the model and not in that of the optimizer" in answers["sums in fp32"]
    assert sorted(line.split(" sets ")[0] for line in answers["three"].split("\n")) == [
        "what --defer-embedding-wgrad-compute",
        "what --overlap-grad-reduce",
        "what --overlap-moe-expert-parallel-comm / --delay-wgrad-compute",
    ]


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
def test_no_batch_follows_one_that_failed(schedule: str) -> None:
    """What is left of it would be taken for part of the next one."""
    answers = collect(custom_loop.failed, replace(CASES[0], schedule=schedule, microbatches=4))
    for of_rank in answers:
        assert "an unreadable sample" in of_rank[0] or "look for that rank's own error" in of_rank[0]
        assert ["the call before failed at stage" in answer for answer in of_rank] == [False, True, True, True], of_rank


def test_a_failed_pipeline_leaves_the_newest_weights() -> None:
    """On all stages, for a save in an emergency."""
    case = replace(CASES[0], schedule="2bw", microbatches=4)
    for answers, is_newest in collect(custom_loop.forgotten, case):
        assert "" in answers
        assert "the call before failed at stage" in answers[-1]
        assert is_newest


def looped(case: Case, then: str | None = None) -> object:
    """What ``case`` computes; the second half of its batches by the schedule ``then``."""
    return merge(collect(partial(custom_loop.main, then=then), case), case)
