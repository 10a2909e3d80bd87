"""2BW equals the oracle for the models and modes that Megatron's users switch on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case
from .compare import deviation
from .features import EXACT, EXPERTS, TWO_REPLICAS
from .harness import run
from .matrix import compared
from .oracle import oracle

CALIBRATED = [
    "the same, sequence parallel",
    "multi-latent attention",
    "loss per token, fp16",
    "experts with biases, bf16, distributed optimizer, full recompute",
    "experts, loss over the batch",
    "whole experts, tensor parallel, distributed optimizer",
]


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_equal_to_the_oracle(case: Case) -> None:
    assert compared(case).problems() == []


@pytest.mark.parametrize("name", CALIBRATED)
def test_ordinary_oracle_is_megatron(name: str) -> None:
    assert compared(replace(EXACT[name], schedule=None), delay=0).problems() == []


@pytest.mark.parametrize("shared", [{"expert_parallel": 2}, {"expert_tensor_parallel": 2}], ids=["whole", "split"])
def test_experts_of_two_replicas_no_further_off_than_megatron(shared: dict[str, int]) -> None:
    """Experts on two ranks add up tokens of both replicas in another order; the oracle has them on one."""
    case = replace(TWO_REPLICAS, model=EXPERTS, **shared)
    stock = replace(case, schedule=None)
    assert deviation(run(case), oracle(case, delay=1)).within(
        deviation(run(stock), oracle(stock, delay=0)).at_least(2e-6)
    )
