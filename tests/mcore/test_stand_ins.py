"""What stands in for NCCL and for kernels that a CPU does not have computes the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from . import stand_ins
from .case import Case
from .compare import FLOOR, deviation, differing
from .features import LLAMA, PER_TOKEN
from .harness import collect, merge, run
from .worker import install, set_environment, train

CASE = Case(
    schedule="megatron", stages=2, microbatches=2, replicas=2, batches=4, precision="bf16", distributed_optimizer=True
)
DIVIDED = Case(stages=2, microbatches=2, batches=2, model=(*LLAMA, *PER_TOKEN), clip=1.0, record_gradients=True)


def _sharing(case: Case, rank: int, port: int, folder: Path) -> None:
    set_environment(rank, case.ranks, port)
    install(case)
    stand_ins.let_ranks_share_a_gpu()
    train(case, rank, folder)


def test_ranks_that_share_a_device_transfer_through_the_host() -> None:
    found = merge(collect(_sharing, CASE), CASE)
    assert differing(found, run(CASE)) == []


def test_attention_to_divided_sequences_is_that_to_whole_ones() -> None:
    """But for the order of sums, of which a processor's vector instructions have a say; Adam makes more of it by batch.

    The loss is that per token: otherwise each rank's part of a sequence counts equally, however much of it is masked.
    Each rank logs its own part of the losses.
    """
    whole = run(DIVIDED)
    found = deviation(replace(run(replace(DIVIDED, context_parallel=2)), losses=whole.losses), whole)
    assert max(found) <= FLOOR
