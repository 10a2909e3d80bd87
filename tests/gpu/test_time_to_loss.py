"""The loop of scripts/bench/time_to_loss.py on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("emerging_optimizers", reason="needs emerging_optimizers, whose Muon the loop can train with")

from delayed_training import Trial, train
from language_models import Size

pytestmark = pytest.mark.gpu
SIZE = Size(layers=2, hidden=64, sequence=64, batch=16, steps=50)
WITHIN = 2e-3
"""Of a loss in bf16."""


@pytest.mark.parametrize(("momentum", "lr"), [(None, 2e-3), (0.9, 3e-3)])
def test_it_learns_as_on_a_cpu(momentum: float | None, lr: float) -> None:
    """In bf16, with half of a batch delayed; without a delay it would learn otherwise."""
    torch.set_num_threads(1)  # Threads would wait for each other beside other tests' ranks: minutes, not seconds.
    trial = Trial(
        size=SIZE, delay=1, lr=lr, momentum=momentum, correction="lead", lead=2.0, delayed=8, warmup=5, nesterov=False
    )
    expected, without = train(trial).losses, train(replace(trial, delay=0)).losses
    assert max(abs(loss - other) / other for loss, other in zip(without, expected, strict=True)) > 3 * WITHIN
    found = train(replace(trial, size=replace(SIZE, device="cuda")))
    assert found.losses == pytest.approx(expected, rel=WITHIN)
