"""The loop of scripts/bench/time_to_loss.py on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

from delayed_training import Trial, train
from language_models import Size

SIZE = Size(layers=2, hidden=64, sequence=64, batch=16, steps=50)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_it_learns_as_on_a_cpu(momentum: float | None) -> None:
    """In bf16, with half of a batch delayed."""
    trial = Trial(
        size=SIZE, delay=1, lr=1e-3, momentum=momentum, correction="lead", lead=2.0, delayed=8, warmup=5, nesterov=False
    )
    found = train(replace(trial, size=replace(SIZE, device="cuda")))
    assert found.losses == pytest.approx(train(trial).losses, rel=2e-3)
