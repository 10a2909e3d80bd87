"""The check of gradients that answers one batch later."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_2bw.runtime.finite import FiniteCheck


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_batch_is_named_when_the_next_one_asks(value: float) -> None:
    gradients = torch.full([3], 2e38), torch.ones(2)
    check = FiniteCheck()
    check.ask(0, gradients)
    gradients[1][0] = value
    check.ask(1, gradients)
    gradients[1][0] = 1.0
    with pytest.raises(RuntimeError, match="batch 1 "):
        check.ask(2, gradients)


def test_the_last_batch_is_answered_for_at_the_end() -> None:
    check = FiniteCheck()
    check.answer()
    check.ask(7, [torch.tensor([math.nan])])
    with pytest.raises(RuntimeError, match="batch 7 "):
        check.answer()
    check.answer()
