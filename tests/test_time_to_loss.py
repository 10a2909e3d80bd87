"""scripts/bench/time_to_loss.py: its loop against the definition, and how it goes on."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import asdict, replace
from pathlib import Path

import delayed_training
import downstream
import language_models
import loss_report
import loss_trials
import microbatches
import pytest
import time_to_loss
import torch
from delayed_training import Result, Trial, rate, train
from language_models import BERT, Size, Transformer, batches, texts
from loss_trials import ARMS, CHOOSING, LONGER, MORE_SEEDS, SEEDS, Arm, Trials

TINY = Size(layers=1, hidden=32, sequence=16, batch=2, steps=10)
TRIAL = Trial(size=TINY, delay=1, lr=1e-2, warmup=4)
SIZE = replace(TINY, steps=1000, batch=16)
"""Of trials that are only said to have been."""
AROUND = [1, 10, 25, 50, 200, 400, 600]
"""Warm-ups, in its batches."""
WITHOUT, PLAIN = (
    next(arm for arm in ARMS if arm.name == name) for name in ("AdamW, no delay", "AdamW, delay, as it is")
)


@pytest.mark.parametrize(
    ("delay", "synchronous", "delayed"), [(0, 0, None), (1, 0, None), (1, 3, None), (1, 0, 1), (1, 3, 1)]
)
def test_gradients_are_of_the_version_said(
    delay: int, synchronous: int, delayed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a list of all versions, without an optimizer's state: W(t+1) = W(t) - lr(t) * clipped grad f(W(t - delay))."""
    monkeypatch.setattr(torch.optim, "AdamW", _plain)
    monkeypatch.setattr(delayed_training, "validation_loss", lambda model, size: _sum(next(iter(model.parameters()))))
    found = train(replace(TRIAL, delay=delay, synchronous=synchronous, delayed=delayed))
    torch.manual_seed(0)
    model, data = Transformer(TINY), batches(texts(TINY.corpus)[0], TINY, seed=1)
    versions = [[weight.detach().clone() for weight in model.parameters()]]
    for step in range(TINY.steps):
        model.zero_grad()
        for number, sequence in enumerate(zip(*next(data), strict=True)):
            behind = delay if delayed is None or number < delayed else 0
            version = versions[max(step - behind, min(step, synchronous))]
            for weight, value in zip(model.parameters(), version, strict=True):
                weight.data.copy_(value)
            (model(*(part[None] for part in sequence)) / TINY.batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), delayed_training.CLIP)
        lr = rate(TRIAL, step)
        versions.append([value - lr * w.grad for value, w in zip(versions[-1], model.parameters(), strict=True)])
    assert found.losses == pytest.approx([float(version[0].sum()) for version in versions[2::2]], rel=1e-6)


def _sum(weight: torch.Tensor) -> float:
    return float(weight.detach().sum())


def _plain(groups, lr, **_) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=lr)


def _only(monkeypatch: pytest.MonkeyPatch, *arms: Arm) -> None:
    for module in (loss_trials, loss_report):
        monkeypatch.setattr(module, "ARMS", tuple(replace(arm, sizes=(SIZE,)) for arm in arms))
        monkeypatch.setattr(module, "SIZES", {"tiny": SIZE})
    bubbles = tuple(1 + 7 / (8 * ratio) for ratio in microbatches.RATIOS)
    monkeypatch.setattr(loss_report, "measured", lambda: {"1f1b-flush": bubbles, "2bw": (1.0,) * 4})


def _ending(loss: float) -> Result:
    return Result(losses=[3.0, 2.0, 1.9, 1.8, loss])


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the grids, an arm after the other in turn; then warm-ups, seeds of the three best, others of the best."""
    arms = (WITHOUT, replace(PLAIN, rates=WITHOUT.rates))
    _only(monkeypatch, *arms)
    trials = Trials(tmp_path / "trials.jsonl")
    missing = list(trials.missing(["tiny"]))
    assert len(missing) == sum(len(arm.grid(SIZE)) for arm in arms)
    assert [trial.delay for trial in missing[:2]] == [0, 1]
    for trial in missing:
        diverges = trial.lr == arms[0].rates[-1]
        trials.add(trial, Result(losses=[2.0]) if diverges else _ending(1.7 + abs(math.log(trial.lr / 2e-3))))
    trials = Trials(tmp_path / "trials.jsonl")
    warmups = list(trials.missing(["tiny"]))
    assert [(trial.delay, trial.lr, trial.warmup) for trial in warmups] == [
        (arm.delay, 2e-3, warmup) for arm in arms for warmup in AROUND
    ]
    assert not trials.finalists(arms[0], SIZE)
    for trial in warmups:
        trials.add(trial, _ending(2.6 if trial.delay == 0 else 1.6))
    more = list(trials.missing(["tiny"]))
    assert [trial.seed for trial in more] == [seed for _ in arms for seed in CHOOSING[1:] for _ in range(3)]
    assert {(trial.lr, trial.warmup) for trial in more if trial.delay == 0} == {(2e-3, 100)}, "of equals"
    assert {(trial.lr, trial.warmup) for trial in more if trial.delay == 1} == {(2e-3, warmup) for warmup in AROUND[:3]}
    assert [trials.best(arm, SIZE) for arm in arms] == [None] * len(arms)
    lucky = trials.finalists(arms[0], SIZE)[0]
    for trial in more:
        trials.add(trial, _ending(2.6 if replace(trial, seed=0) == lucky else 1.8))
    assert trials.best(arms[0], SIZE) == trials.finalists(arms[0], SIZE)[1]
    last = list(trials.missing(["tiny"]))
    assert [(trial.delay, trial.seed) for trial in last] == [
        (delay, seed) for delay in (0, 1, 0, 0, 0) for seed in SEEDS
    ]
    assert [trial.size.steps for trial in last[12::6]] == [900, 800, 700]
    assert [trial.warmup for trial in last[12::6]] == [90, 80, 70]
    for trial in last:
        trials.add(trial, _ending(2.8 - 0.001 * trial.size.steps))
    assert not list(trials.missing(["tiny"]))
    text = "\n".join(loss_report.report(trials))
    assert "AdamW, no delay                      25/25       3/3 lr 0.002, decay 0.9 " in text
    assert "1.800 1.800 1.800 1.800 1.800 1.800" in text
    assert "AdamW, no delay, 90% of the batches" in text
    assert "lr 0.002, decay 0.7, 1 " in text
    assert "1F1B                                        1.88   1.44   1.22   1.11" in text
    assert "2bw, AdamW, delay, as it is                 1.00   1.00   1.00   1.00" in text


def test_what_a_loss_is_worth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In batches without delay, between those of the cuts, on a line; of the gap, also at the end of its interval."""
    without, delayed = (replace(arm, rates=(1e-3,), decays=(0.9,)) for arm in (WITHOUT, PLAIN))
    _only(monkeypatch, without, delayed)
    monkeypatch.setattr(loss_trials, "FINALISTS", 1)
    trials = Trials(tmp_path / "trials.jsonl")

    def end(trial: Trial) -> float:
        if trial.warmup in AROUND:
            return 1.7
        late = 0.1 + 0.02 * (trial.seed % 2) if trial.delay else 0.0
        return 2.0 - 0.001 * trial.size.steps + late

    while (trial := next(trials.missing(["tiny"]), None)) is not None:
        trials.add(trial, _ending(end(trial)))
    worth = [loss_report.worth_of(trials, delayed, SIZE, gap) for gap in (-0.1, 0.0, 0.05, 0.22, 0.4)]
    assert worth == pytest.approx([1.0, 1.0, 0.95, 0.78, -0.7])
    assert [loss_report._share(share) for share in worth] == [">=100%", ">=100%", "95%", "78%", "<70%"]
    assert loss_report.gaps_of(trials, delayed, SIZE) == pytest.approx([0.12, 0.1] * 3)
    line = loss_report._line(trials, delayed, SIZE)
    half = loss_report.T_95[6] * (0.0001 * 6 / 5) ** 0.5 / 6**0.5
    assert f"  1.110 {half:>6.3f}  0.110 {half:>6.3f} " in line
    assert f"    89% {round(89 - 1000 * half / 10):>7}%  1.120 1.100" in line


def test_more_seeds_and_more_batches_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without, delayed = (replace(arm, rates=(1e-3,), decays=(0.9,), loud=(SIZE,)) for arm in (WITHOUT, PLAIN))
    _only(monkeypatch, replace(without, shares=()), replace(delayed, shares=LONGER))
    trials = Trials(tmp_path / "trials.jsonl")
    while (trial := next(trials.missing(["tiny"]), None)) is not None:
        trials.add(trial, _ending(3.0 - 0.001 * trial.size.steps + 0.02 * trial.delay * (trial.seed % 2)))
    arm = loss_trials.ARMS[1]
    (longer,) = trials.resized(arm, SIZE)
    assert longer.size.steps == 1050
    assert len(trials.losses(longer)) == len(loss_report.gaps_of(trials, arm, SIZE)) == len(MORE_SEEDS) == 24
    half = loss_report.T_95[24] * (0.0001 * 24 / 23) ** 0.5 / 24**0.5
    line = loss_report._resized(trials, arm, longer, SIZE)
    assert line.startswith("AdamW, delay, as it is, 105% of the batches  ")
    assert f" -0.040 {half:>6.3f} " in line, "to all batches without a delay"
    assert line.endswith("1.970 1.950 1.970 1.950 1.970 1.950 and of 18 more")


def test_arms_with_fewer_seeds_than_their_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Are compared with it for the seeds of both, whatever its others are."""
    without, delayed = (replace(arm, rates=(1e-3,), decays=(0.9,)) for arm in (WITHOUT, PLAIN))
    _only(monkeypatch, replace(without, loud=(SIZE,)), delayed)
    trials = Trials(tmp_path / "trials.jsonl")
    while (trial := next(trials.missing(["tiny"]), None)) is not None:
        other = 0.5 if trial.seed in MORE_SEEDS[len(SEEDS) :] else 0.0
        trials.add(trial, _ending(2.0 - 0.001 * trial.size.steps + 0.05 * trial.delay + other))
    without, delayed = loss_trials.ARMS
    assert len(trials.losses(trials.best(without, SIZE))) == 24
    assert loss_report.gaps_of(trials, delayed, SIZE) == pytest.approx([0.05] * 6)
    assert "   95%      95%  1.050" in loss_report._line(trials, delayed, SIZE)
    assert [time.ratio for time in loss_report.times_to_loss(trials, SIZE)[f"2bw, {delayed.name}"]] == pytest.approx(
        [1 / 0.95] * 4
    )


def test_what_was_measured_is_read() -> None:
    found = microbatches.measured()
    assert {len(times) for times in found.values()} == {len(microbatches.RATIOS)}
    assert all(map(operator.lt, found["2bw"], found["1f1b-flush"]))


def test_the_committed_report_is_current() -> None:
    heading, *lines = time_to_loss.TRIALS.with_suffix(".txt").read_text().split("\n\n", 1)
    assert heading.count("\n") == 1
    assert lines == ["\n".join([*loss_report.report(Trials(time_to_loss.TRIALS))[1:], ""])]


def test_rates_grow_with_the_batch() -> None:
    of_four_times = replace(SIZE, batch=64, steps=250)
    assert WITHOUT.rates_on(of_four_times) == pytest.approx([2 * rate for rate in WITHOUT.rates_on(SIZE)])
    first = WITHOUT.grid(of_four_times)[0]
    assert first.lr == 2 * WITHOUT.rates[0]
    assert first.warmup == 25


def test_what_is_at_the_edge_of_the_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _only(monkeypatch, WITHOUT)
    trials = Trials(tmp_path / "trials.jsonl")
    first, *_, last = WITHOUT.grid(SIZE)
    inside = replace(first, lr=WITHOUT.rates[1], beta1=WITHOUT.decays[1])
    assert not trials.is_at_edge(WITHOUT, inside)
    assert not trials.is_at_edge(WITHOUT, replace(inside, warmup=1)), "there is nothing below none"
    outside = {"lr": (first.lr, last.lr), "beta1": (WITHOUT.decays[0], WITHOUT.decays[-1]), "warmup": (600,)}
    for name, values in outside.items():
        for value in values:
            assert trials.is_at_edge(WITHOUT, replace(inside, **{name: value})), (name, value)


def test_rates_around_the_best_of_bert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size = replace(SIZE, kind=BERT)
    arm = replace(WITHOUT, sizes=(size,))
    _only(monkeypatch, arm)
    for module in (loss_trials, loss_report):
        monkeypatch.setattr(module, "ARMS", (arm,))
        monkeypatch.setattr(module, "SIZES", {"tiny": size})
    trials = Trials(tmp_path / "trials.jsonl")
    while not trials.around(arm, size):
        trial = next(trials.missing(["tiny"]))
        trials.add(trial, _ending(1.7 + abs(math.log(trial.lr / 2e-3)) - 1e-4 * trial.warmup))
    assert [(trial.lr, trial.warmup) for trial in trials.around(arm, size)] == [(1e-3, 950), (4e-3, 950)]
    assert len(trials.tried(arm, size)) == trials.planned(arm, size) == 12 + 9 + 2
    best = replace(trials.around(arm, size)[0], lr=2e-3, beta1=0.92)
    assert not trials.is_at_edge(arm, best)
    assert all(trials.is_at_edge(arm, replace(best, lr=lr)) for lr in (1e-3, 4e-3))


def test_a_seed_that_diverges_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without, delayed = (replace(arm, rates=(1e-3,), decays=(0.9,)) for arm in (WITHOUT, PLAIN))
    _only(monkeypatch, without, delayed)
    trials = Trials(tmp_path / "trials.jsonl")
    while (trial := next(trials.missing(["tiny"]), None)) is not None:
        trials.add(
            trial,
            Result(losses=[2.0]) if trial.delay and trial.seed == SEEDS[1] else _ending(2.0 - 0.001 * trial.size.steps),
        )
    assert "inf" in loss_report._line(trials, delayed, SIZE)
    assert "<70%" in loss_report._line(trials, delayed, SIZE)


def test_what_bert_is_to_predict() -> None:
    found = torch.randint(1, 256, (400, 100))
    inputs, labels = language_models.masked(found, torch.Generator().manual_seed(0))
    chosen = labels != language_models.UNSEEN
    assert torch.equal(labels[chosen], found[chosen])
    assert torch.equal(inputs[~chosen], found[~chosen])
    shares = [float(part.float().mean()) for part in (chosen, inputs[chosen] == 0, inputs[chosen] == found[chosen])]
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=0.02)
    size = replace(TINY, kind=BERT)
    model, (inputs, labels) = Transformer(size), next(batches(texts(size.corpus)[0], size, seed=1))
    changed, causal = inputs.clone(), Transformer(TINY)
    changed[:, -1] = 65
    assert not torch.equal(model.hidden(inputs)[:, 0], model.hidden(changed)[:, 0]), "it reads what comes later"
    assert torch.equal(causal.hidden(inputs)[:, 0], causal.hidden(changed)[:, 0])
    loss, more = model(inputs, labels), labels.clone()
    more[labels == language_models.UNSEEN] = 65
    assert loss != model(inputs, more), "the others do not count"


def test_bert_is_fine_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a task that it can learn: each package has a byte of its own."""
    size = replace(TINY, kind=BERT, steps=5)
    own = [torch.full((100,), 40 + number, dtype=torch.uint8) for number in range(len(language_models.PACKAGES))]
    monkeypatch.setattr(downstream, "packages", lambda: (own, own))
    monkeypatch.setattr(downstream, "STEPS", 60)
    monkeypatch.setattr(downstream, "LR", 1e-2)
    monkeypatch.setattr(delayed_training, "VALIDATION_BATCHES", {BERT: 1})
    result = train(replace(TRIAL, size=size))
    assert result.accuracy == 1.0
    trials = Trials(tmp_path / "trials.jsonl")
    for seed in SEEDS:
        trials.add(replace(TRIAL, size=size, seed=seed), replace(result, accuracy=0.1 * seed))
    found = Trials(tmp_path / "trials.jsonl").accuracies(replace(TRIAL, size=size))
    assert found == pytest.approx([0.1 * seed for seed in SEEDS])


def test_rows_from_before_there_was_bert(tmp_path: Path) -> None:
    row = {"trial": asdict(TRIAL), "losses": [3.0, 2.0, 1.9, 1.8, 1.7]}
    del row["trial"]["size"]["kind"]
    (tmp_path / "trials.jsonl").write_text(json.dumps(row) + "\n")
    assert Trials(tmp_path / "trials.jsonl").loss(TRIAL) == 1.7


def test_packages_have_modules_of_both_halves() -> None:
    training, held_out = language_models.packages()
    for package, other in zip(training, held_out, strict=True):
        assert len(package) > len(other) > 10 * TINY.sequence
