"""scripts/bench/time_to_loss_ranks.py: its jobs, what it reads of them, and when an arm has reached a loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import time_to_loss_ranks as ranks
import torch
from time_to_loss_ranks import ARMS, RATES, SEEDS, TUNED_AS, Job, Jobs, Trained

LOG = """
 [2026-01-01 00:00:00] iteration        1/      40 | consumed samples: 32 | elapsed time per iteration (ms): 900.0 |
 [2026-01-01 00:00:00] iteration       10/      40 | consumed samples: 320 | elapsed time per iteration (ms): 200.0 |
 [2026-01-01 00:00:00] iteration       20/      40 | consumed samples: 640 | elapsed time per iteration (ms): 100.5 |
 validation loss at iteration 20 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 |
 [2026-01-01 00:00:00] iteration       30/      40 | consumed samples: 960 | elapsed time per iteration (ms): 100.0 |
 [2026-01-01 00:00:00] iteration       40/      40 | consumed samples: 1280 | elapsed time per iteration (ms): 100.0 |
 validation loss at iteration 40 | lm loss value: 2.250000E+00 | lm loss PPL: 9.487736E+00 |
 validation loss at iteration 40 on test set | lm loss value: 9.000000E+00 | lm loss PPL: 8.103084E+03 |
"""


def ended(job: Job, end: float) -> Trained:
    """With a loss that falls on a line, a tenth of a second per batch."""
    batches = [share * job.batches // 4 for share in (1, 2, 3, 4)]
    return Trained(
        seconds={batch: batch / 10 for batch in batches},
        losses={batch: end + 1 - batch / job.batches for batch in batches},
    )


def test_what_megatron_logs_is_read():
    found = ranks.read(LOG)
    assert found.losses == {20: 2.5, 40: 2.25}
    assert found.seconds == pytest.approx({20: 3.005, 40: 5.005})


def test_it_goes_on_where_it_was(tmp_path: Path):
    """Every learning rate with one seed, then the best of each arm with all, the arms in turn."""
    path = tmp_path / "jobs.jsonl"
    jobs = Jobs(path)
    tuned = [name for name in ARMS if name not in TUNED_AS]
    missing = list(jobs.missing())
    assert [(job.arm, job.lr, job.seed) for job in missing] == [
        (arm, rate, SEEDS[0]) for arm in tuned for rate in RATES
    ]
    for job in missing:
        diverges = job.lr == RATES[0]
        jobs.add(job, ended(job, math.nan if diverges else 2.0 + abs(math.log(job.lr / RATES[1]))))
    jobs = Jobs(path)
    more = list(jobs.missing())
    assert {(job.arm, job.lr) for job in more} == {(name, RATES[1]) for name in ARMS}
    assert len(ranks.report(jobs)) == 1 + len(tuned) + 2 + len(tuned), "1F1B has not run"
    assert [(job.arm, job.seed) for job in more] == [
        (arm, seed) for seed in SEEDS for arm in ARMS if seed != SEEDS[0] or arm in TUNED_AS
    ]
    for job in more:
        jobs.add(job, ended(job, 2.0))
    assert not list(Jobs(path).missing())


def test_a_loss_is_reached_where_the_mean_is_and_stays_as_good(tmp_path: Path):
    jobs = Jobs(tmp_path / "jobs.jsonl")
    ends = {"1F1B": 2.1, "interleaved, 2 chunks": 1.9}
    while job := next(jobs.missing(), None):
        jobs.add(job, ended(job, ends.get(job.arm, 1.7)))
    head, *rows = ranks.report(jobs)[: len(ARMS) + 1]
    assert "batches to 2.000" in head
    for row in rows[:2]:
        assert f" {ranks.BATCHES}    {ranks.BATCHES / 10:.1f} " in row, "what sets it has it at its end"
    batches = ARMS[list(ARMS)[-1]].batches * 3 // 4
    assert f" {batches} " in rows[-1]
    assert f" {batches / 10:.1f} " in rows[-1]
    touched = Trained(seconds={1: 1.0, 2: 2.0, 3: 3.0}, losses={1: 1.9, 2: 2.1, 3: 2.0})
    assert ranks._reached([touched], 2.0) == (3, 3.0)
    assert ranks._reached([touched], 1.95) is None


def test_the_committed_report_is_current():
    committed = ranks.TRIALS.with_suffix(".txt").read_text()
    assert committed.endswith("\n\n" + "\n".join([ranks.setting(), *ranks.report(Jobs(ranks.TRIALS)), ""]))


def test_the_data_are_those_of_the_small_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    training = torch.arange(256, dtype=torch.uint8)
    monkeypatch.setattr(ranks, "texts", lambda corpus: (training, training[:7]))
    ranks.write_data(tmp_path)
    for name, text in (("training", training), ("validation", training[:7])):
        dataset = IndexedDataset(str(tmp_path / name))
        assert dataset[0].tolist() == text.tolist()
