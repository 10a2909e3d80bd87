"""scripts/bench/time_to_loss.py: its loop against the definition, and how it goes on."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import delayed_gpt
import time_to_loss
from delayed_gpt import Gpt, Size, Trial, batches, rate, texts, train
from time_to_loss import ARMS, RATES, SEEDS, Trials

TINY = Size(layers=1, hidden=32, sequence=16, batch=2, steps=10)
TRIAL = Trial(size=TINY, delay=1, lr=1e-2, warmup=4)


@pytest.mark.parametrize("delay", [0, 1])
def test_gradients_are_of_the_version_said(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a list of all versions, without an optimizer's state: W(t+1) = W(t) - lr(t) * clipped grad f(W(t - delay))."""
    monkeypatch.setattr(torch.optim, "AdamW", _plain)
    monkeypatch.setattr(delayed_gpt, "validation_loss", lambda model, size: float(next(iter(model.parameters())).sum()))
    found = train(replace(TRIAL, delay=delay))
    torch.manual_seed(0)
    model, data = Gpt(TINY), batches(texts()[0], TINY, seed=1)
    versions = [[weight.detach().clone() for weight in model.parameters()]]
    for step in range(TINY.steps):
        for weight, value in zip(model.parameters(), versions[max(step - delay, 0)], strict=True):
            weight.data.copy_(value)
        model.zero_grad()
        model(next(data)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), delayed_gpt.CLIP)
        lr = rate(TRIAL, step)
        versions.append([value - lr * w.grad for value, w in zip(versions[-1], model.parameters(), strict=True)])
    assert found == pytest.approx([float(version[0].sum()) for version in versions[2::2]], rel=1e-6)


def _plain(groups, lr, **_) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=lr)


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the grids, an arm after the other in turn; then more seeds of the three that were best."""
    monkeypatch.setattr(time_to_loss, "SIZES", {"tiny": TINY})
    trials = Trials(tmp_path / "trials.jsonl")
    missing = list(trials.missing())
    assert len(missing) == sum(len(arm.grid(TINY)) for arm in ARMS)
    assert [trial.delay for trial in missing[:2]] == [0, 1]
    for trial in missing:
        diverges = trial.lr == RATES[-1]
        trials.add(trial, [2.0] * 2 if diverges else [3.0, 2.0, 1.9, 1.8, 1.7 + abs(math.log(trial.lr / 2e-3))])
    trials = Trials(tmp_path / "trials.jsonl")
    more = list(trials.missing())
    assert [trial.seed for trial in more] == [seed for seed in SEEDS[1:] for _ in range(3)] * len(ARMS)
    assert {trial.lr for trial in more} == {2e-3, 1e-3}, "the first of equals, after two decays at the best rate"
    assert [trials.best(arm, TINY) for arm in ARMS] == [None] * len(ARMS)
    for trial in more:
        lucky_before = trial.lr == 2e-3 and trial.beta1 == trials.finalists(ARMS[0], TINY)[0].beta1
        trials.add(trial, [3.0, 2.0, 1.9, 1.8, 2.6 if lucky_before else 1.8])
    assert not list(trials.missing())
    assert trials.best(ARMS[0], TINY) == trials.finalists(ARMS[0], TINY)[1]
    text = "\n".join(time_to_loss.report(trials))
    assert "no delay                  12/12       3/3 lr 0.002, beta1 0.95" in text
    assert "1.700 1.800 1.800" in text
    assert "(edge)" not in text
