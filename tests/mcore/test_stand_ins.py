"""What the tests on a GPU put in the place of NCCL computes the same."""

from __future__ import annotations

from pathlib import Path

from . import stand_ins
from .case import Case
from .compare import differing
from .harness import collect, merge, run
from .worker import install, set_environment, train

CASE = Case(
    schedule="megatron", stages=2, microbatches=2, replicas=2, batches=4, precision="bf16", distributed_optimizer=True
)


def _sharing(case: Case, rank: int, port: int, folder: Path) -> None:
    set_environment(rank, case.ranks, port)
    install(case)
    stand_ins.let_ranks_share_a_gpu()
    train(case, rank, folder)


def test_ranks_that_share_a_device_transfer_through_the_host() -> None:
    found = merge(collect(_sharing, CASE, CASE.ranks), CASE.stages, CASE.microbatches)
    assert differing(found, run(CASE)) == []
