"""Transfers and reductions over NCCL, as in a real job; ranks that share a GPU are connected by sockets."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import test_two_bw
from tests.gpu.test_job import assert_ends_the_others
from tests.mcore.case import Case
from tests.mcore.compare import differing
from tests.mcore.features import LLAMA
from tests.mcore.harness import run
from tests.mcore.matrix import compared
from tests.mcore.oracle import oracle

pytestmark = pytest.mark.gpu

OVER_NCCL = ("--distributed-backend", "nccl")
CASE = replace(test_two_bw.CASE, microbatches=4, model=OVER_NCCL)
TWO_REPLICAS = {"replicas": 2, "microbatches": 2}
SETTINGS = {
    "fp32": CASE,
    "fp16, four stages": replace(CASE, precision="fp16", stages=4),
    "bf16, two replicas": replace(CASE, precision="bf16", **TWO_REPLICAS),
    "bf16, distributed optimizer": replace(CASE, precision="bf16", **TWO_REPLICAS, distributed_optimizer=True),
    "bf16, tensor and sequence parallel": replace(CASE, precision="bf16", tensor_parallel=2, sequence_parallel=True),
    "bf16, context parallel": replace(CASE, precision="bf16", context_parallel=2),
    "bf16, one more in flight, early receives": replace(
        CASE, precision="bf16", flags=("--pipeline-extra-in-flight", "1", "--pipeline-receives", "early")
    ),
}
ENGINE = replace(CASE, precision="bf16", tied=False, model=(*OVER_NCCL, "--transformer-impl", "transformer_engine"))
OF_ENGINE = {
    "fp32": replace(ENGINE, precision="fp32"),
    "bf16": ENGINE,
    "fp16, distributed optimizer": replace(ENGINE, precision="fp16", **TWO_REPLICAS, distributed_optimizer=True),
    "bf16, full recompute": replace(ENGINE, recompute="full"),
    "bf16, tensor and sequence parallel": replace(
        ENGINE, tensor_parallel=2, sequence_parallel=True, model=(*ENGINE.model, *LLAMA)
    ),
    "bf16, context parallel": replace(ENGINE, context_parallel=2),
}
OTHERS = {
    "pipedream": replace(CASE, microbatches=1),
    **dict.fromkeys(("1f1b-flush", "gpipe", "inter-layer", "gems", "chimera", "mixpipe"), CASE),
}


@pytest.mark.parametrize("kind", ["hanging", "killed"])
def test_a_lost_rank_ends_the_others(kind: str, tmp_path: Path) -> None:
    """A kernel that waits for another rank's cannot be stopped; who waits for it says so and ends all the same."""
    assert_ends_the_others(kind, CASE, tmp_path)


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS)
def test_equal_to_the_oracle(case: Case) -> None:
    comparison = compared(case)
    assert comparison.problems() == []
    assert comparison.clipped > 0


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("case", OF_ENGINE.values(), ids=OF_ENGINE)
def test_layers_of_transformer_engine(case: Case) -> None:
    comparison = compared(case)
    assert comparison.problems() == []


@pytest.mark.parametrize("schedule", OTHERS)
def test_other_schedules(schedule: str) -> None:
    case = replace(OTHERS[schedule], schedule=schedule, stages=4, batches=6, tied=False, clip=0.0)
    assert differing(run(case), oracle(case), norms=False) == []
