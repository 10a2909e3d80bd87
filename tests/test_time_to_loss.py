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
from time_to_loss import ARMS, FINALIST_SEEDS, SEEDS, WARMUPS, Trials

TINY = Size(layers=1, hidden=32, sequence=16, batch=2, steps=10)
TRIAL = Trial(size=TINY, delay=1, lr=1e-2, warmup=4)


@pytest.mark.parametrize(("delay", "synchronous"), [(0, 0), (1, 0), (1, 3)])
def test_gradients_are_of_the_version_said(delay: int, synchronous: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a list of all versions, without an optimizer's state: W(t+1) = W(t) - lr(t) * clipped grad f(W(t - delay))."""
    monkeypatch.setattr(torch.optim, "AdamW", _plain)
    monkeypatch.setattr(delayed_gpt, "validation_loss", lambda model, size: float(next(iter(model.parameters())).sum()))
    found = train(replace(TRIAL, delay=delay, synchronous=synchronous))
    torch.manual_seed(0)
    model, data = Gpt(TINY), batches(texts(TINY.corpus)[0], TINY, seed=1)
    versions = [[weight.detach().clone() for weight in model.parameters()]]
    for step in range(TINY.steps):
        for weight, value in zip(model.parameters(), versions[max(step - delay, min(step, synchronous))], strict=True):
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
    """First the grids, an arm after the other in turn; then warm-ups, seeds of the three best, seeds of the best."""
    arms = (ARMS[0], replace(ARMS[1], rates=ARMS[0].rates))
    monkeypatch.setattr(time_to_loss, "SIZES", {"tiny": TINY})
    monkeypatch.setattr(time_to_loss, "ARMS", arms)
    trials = Trials(tmp_path / "trials.jsonl")
    missing = list(trials.missing())
    assert len(missing) == sum(len(arm.grid(TINY)) for arm in arms)
    assert [trial.delay for trial in missing[:2]] == [0, 1]
    for trial in missing:
        diverges = trial.lr == arms[0].rates[-1]
        trials.add(trial, [2.0] * 2 if diverges else [3.0, 2.0, 1.9, 1.8, 1.7 + abs(math.log(trial.lr / 2e-3))])
    trials = Trials(tmp_path / "trials.jsonl")
    warmups = list(trials.missing())
    assert [(trial.delay, trial.lr, trial.warmup) for trial in warmups] == [
        (arm.delay, 2e-3, warmup) for arm in arms for warmup in WARMUPS
    ]
    assert not trials.finalists(arms[0], TINY)
    for trial in warmups:
        trials.add(trial, [3.0, 2.0, 1.9, 1.8, 2.6 if trial.delay == 0 else 1.6])
    more = list(trials.missing())
    finalist_seeds = SEEDS[1:FINALIST_SEEDS]
    assert [trial.seed for trial in more] == [seed for _ in arms for seed in finalist_seeds for _ in range(3)]
    assert {(trial.lr, trial.warmup) for trial in more if trial.delay == 0} == {(2e-3, 100), (1e-3, 100)}, "of equals"
    assert {(trial.lr, trial.warmup) for trial in more if trial.delay == 1} == {(2e-3, warmup) for warmup in WARMUPS}
    assert [trials.best(arm, TINY) for arm in arms] == [None] * len(arms)
    for trial in more:
        lucky_before = trial.lr == 2e-3 and trial.beta1 == trials.finalists(arms[0], TINY)[0].beta1
        trials.add(trial, [3.0, 2.0, 1.9, 1.8, 2.6 if lucky_before and trial.delay == 0 else 1.8])
    assert trials.best(arms[0], TINY) == trials.finalists(arms[0], TINY)[1]
    last = list(trials.missing())
    seeded = [(arm.delay, seed) for arm in arms for seed in SEEDS[FINALIST_SEEDS:]]
    cut = [(0, seed) for _ in (9, 8, 7) for seed in SEEDS]
    assert [(trial.delay, trial.seed) for trial in last] == seeded + cut
    assert [trial.size.steps for trial in last] == [10] * len(seeded) + [9] * 6 + [8] * 6 + [7] * 6
    for trial in last:
        trials.add(trial, [3.0, 2.0, 1.9, 1.8, 2.8 - 0.1 * trial.size.steps])
    assert not list(trials.missing())
    text = "\n".join(time_to_loss.report(trials))
    assert "AdamW, no delay              15/15       3/3 lr 0.002, decay 0.95" in text
    assert "1.700 1.800 1.800 1.800 1.800 1.800" in text
    assert "AdamW, 90% of the batches" in text
    assert "decay 0.95 (edge)" not in text
    assert "lr 0.002, decay 0.8, 50 (edge)" in text
    assert "1F1B                                1.88   1.44   1.22   1.11" in text
    assert "2bw, AdamW, delay, as it is         1.00   1.00   1.00   1.00" in text


def test_what_a_loss_is_worth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In batches without delay: between those of the cuts, on a line."""
    monkeypatch.setattr(time_to_loss, "FINALISTS", 1)
    size = replace(TINY, steps=10)
    without, delayed = (replace(arm, rates=(1e-3,), decays=(0.9,)) for arm in ARMS[:2])
    monkeypatch.setattr(time_to_loss, "ARMS", (without, delayed))
    trials = Trials(tmp_path / "trials.jsonl")
    for seed in SEEDS:
        (trial,) = without.grid(size)
        for warmup in WARMUPS:
            trials.add(replace(trial, warmup=warmup), [3.0, 2.0, 1.9, 1.8, 1.7])
        for steps in (10, 9, 8, 7):
            cut = replace(trial, size=replace(size, steps=steps), seed=seed)
            trials.add(cut, [3.0, 2.0, 1.9, 1.8, 2.0 - 0.1 * steps])
    worth = [time_to_loss._worth(trials, delayed, size, [loss] * 3) for loss in (0.9, 1.0, 1.05, 1.22, 1.4)]
    assert worth == pytest.approx([1.0, 1.0, 0.95, 0.78, 0.0])
    assert [time_to_loss._worth_text(share) for share in worth] == [">=100%", ">=100%", "95%", "78%", "<70%"]
