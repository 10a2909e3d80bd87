"""2BW equals the oracle for the models and modes that Megatron's users switch on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_2bw.mcore.symbols import megatron_version

from .case import Case
from .compare import deviation
from .features import ALL_TO_ALL, DETACHED, EXACT, EXPERTS, EXPERTS_IN_TENSOR_PARALLEL, TWO_REPLICAS
from .harness import run
from .matrix import compared
from .oracle import oracle

CALIBRATED = [
    "the same, sequence parallel",
    "multi-latent attention",
    "loss per token, fp16",
    "gradients in bf16, tensor and sequence parallel",
    "gradients in bf16, distributed optimizer, loss per token",
    "gradients in bf16, summed in fp32 over four replicas",
    "experts with biases, bf16, distributed optimizer, full recompute",
    "experts, loss over the batch of all replicas, bf16, distributed optimizer",
    "whole experts, tensor parallel, distributed optimizer",
]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    is_split_apart = case.expert_tensor_parallel not in (0, case.tensor_parallel) and case.expert_parallel == 1
    is_0_18 = megatron_version().startswith("0.18.")
    return [
        pytest.mark.skipif(
            is_0_18 and is_split_apart, reason="Megatron 0.18 sums these experts' gradients over the wrong ranks"
        ),
        pytest.mark.skipif(is_0_18 and set(DETACHED) <= set(case.model), reason="Megatron 0.18 has no such heads"),
    ]


@pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=_marks(case)) for name, case in EXACT.items()])
def test_equal_to_the_oracle(case: Case) -> None:
    assert compared(case).problems() == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(EXACT[name])) for name in CALIBRATED])
def test_ordinary_oracle_is_megatron(name: str) -> None:
    assert compared(replace(EXACT[name], schedule=None), delay=0).problems() == []


SHARED = {
    "whole": replace(TWO_REPLICAS, model=EXPERTS, expert_parallel=2),
    "split": replace(TWO_REPLICAS, model=EXPERTS, expert_tensor_parallel=2),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=_marks(case)) for name, case in SHARED.items()])
def test_experts_of_two_replicas_no_further_off_than_megatron(case: Case) -> None:
    """Experts on two ranks add up tokens of both replicas in another order; the oracle has them on one."""
    stock = replace(case, schedule=None)
    assert deviation(run(case), oracle(case, delay=1)).within(
        deviation(run(stock), oracle(stock, delay=0)).at_least(2e-6)
    )


def test_experts_that_tensor_parallel_ranks_split_get_their_tokens_either_way() -> None:
    """One dispatcher gathers as many tokens from each rank as were routed there, which gloo cannot; the other all."""
    sizes = {"replicas": 2, "expert_parallel": 2, "expert_tensor_parallel": 2, "microbatches": 2, "batches": 6}
    case = replace(EXPERTS_IN_TENSOR_PARALLEL, schedule="megatron", stages=1, **sizes)
    found = deviation(run(replace(case, model=ALL_TO_ALL)), run(case))
    assert max(found) < 1e-5, found
