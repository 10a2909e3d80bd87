"""Batches that grow or are skipped: the pipeline drains, and goes on with the delay of one batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator

from megatron_2bw.mcore.loop.batches import BatchSizes

from .case import Case
from .compare import differing
from .harness import launch, run
from .matrix import compared
from .oracle import oracle
from .worker import through_launcher

GROWING = [
    Case(schedule="2bw", stages=2, tied=False, steps=((4, 1), (3, 2), (1, 4), (4, 5))),
    Case(schedule="2bw", stages=4, tied=False, steps=((3, 3), (3, 4), (4, 8))),
    Case(schedule="2bw", stages=2, replicas=2, tied=False, steps=((3, 2), (4, 3))),
]
SKIPPING = Case(schedule="2bw", stages=2, tied=False, steps=((4, 2), (6, 3)), skipped=(1, 4, 6, 7))
ONE_SIZE = Case(schedule="2bw", stages=2, tied=False, steps=((6, 2),))
"""Trained for a number of samples, all the same."""
PARTLY_DELAYED = Case(schedule="2bw", stages=2, tied=False, delayed=2, steps=((4, 1), (4, 3), (4, 4)))
"""The first ones wholly, which have no more microbatches than that."""
ids = ["d2", "d4", "d2-w2"]


@pytest.mark.parametrize(
    "case", [*GROWING, SKIPPING, ONE_SIZE, PARTLY_DELAYED], ids=[*ids, "skipping", "one-size", "partly"]
)
def test_equal_to_the_loop_to_the_last_bit_untied_without_clipping(case: Case) -> None:
    assert compared(case).problems() == []


@pytest.mark.parametrize(
    "case",
    [
        replace(SKIPPING, synchronous=5),
        Case(schedule="2bw", stages=4, tied=False, steps=((3, 1), (4, 4)), synchronous=3),
    ],
    ids=["skipping", "too few microbatches for a delay"],
)
def test_the_first_ones_without_a_delay(case: Case) -> None:
    assert compared(case).problems() == []


@pytest.mark.parametrize("case", GROWING, ids=ids)
def test_tied_and_clipped_by_an_exact_norm(case: Case) -> None:
    comparison = compared(replace(case, tied=True, clip=1.0))
    assert comparison.problems() == []
    assert 0 < comparison.clipped < 1


@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe"])
def test_synchronous_schedules_equal_megatrons_own(schedule: str) -> None:
    case = replace(GROWING[0], schedule=schedule, tied=True, clip=1.0)
    found, expected = run(case), run(replace(case, schedule=None))
    assert differing(found, expected) == []
    assert found.rates == expected.rates


def test_the_learning_rate_counts_the_samples_of_each_batch() -> None:
    assert run(GROWING[0]).rates == run(replace(GROWING[0], schedule=None)).rates


def test_the_loop_sees_the_delay() -> None:
    """A drain keeps both versions: the batch after it is computed with the older one."""
    case = GROWING[0]
    delayed, ordinary = oracle(case, delay=1), oracle(case, delay=0)
    first_grown = case.steps[0][0] * case.steps[0][1]
    assert not torch.equal(delayed.losses[0, first_grown], ordinary.losses[0, first_grown])


def test_a_checkpoint_is_saved_where_the_size_changes(tmp_path: Path) -> None:
    """Megatron does so; saving in the middle of a run changes no number."""
    case = GROWING[0]
    saving = ("--save", str(tmp_path), "--save-interval", "1000", "--ckpt-format", "torch")
    assert differing(run(replace(case, flags=saving)), run(case)) == []
    saved = {int(folder.name.removeprefix("iter_")) for folder in tmp_path.glob("iter_*")}
    assert saved == {4, 7, 8, 12}


def test_too_few_microbatches_in_one_phase_are_refused_before_training(tmp_path: Path) -> None:
    case = Case(schedule="2bw", stages=4, steps=((2, 1), (2, 3)))
    message = _refusal(case, tmp_path)
    start = [
        "--step-batch-size-schedule",
        "1 microbatches",
        "parallel-size 4",
        "3 microbatches work",
        "from sample 0 on",
    ]
    assert [fragment for fragment in [*start, "1f1b-flush"] if fragment not in message] == [], message
    case = replace(case, steps=((2, 3), (2, 4)), schedule="1f1b-flush", flags=("--micro-batch-size", "4"))
    message = _refusal(case, tmp_path)
    assert "--step-batch-size-schedule, after 0 samples" in message


def test_a_first_phase_too_small_runs_under_another_schedule(tmp_path: Path) -> None:
    """What the refusal proposes: the rest of the run is checked from where the checkpoint is."""
    case = Case(schedule="1f1b-flush", stages=4, tied=False, steps=((3, 1), (4, 3)))
    saving = ("--save", str(tmp_path), "--save-interval", "1000", "--exit-interval", "3", "--ckpt-format", "torch")
    run(replace(case, flags=saving))
    loading = ("--load", str(tmp_path), "--ckpt-format", "torch")
    found = run(replace(case, schedule="2bw", flags=loading))
    expected = oracle(case, delay=1, ordinary_batches=3)
    assert torch.equal(found.losses, expected.losses[:, 3:])
    assert [name for name, tensor in expected.final.items() if not torch.equal(found.final[name], tensor)] == []


def test_too_few_microbatches_are_refused_where_there_was_nothing_to_load(tmp_path: Path) -> None:
    loading = ("--load", str(tmp_path / "empty"), "--ckpt-format", "torch")
    case = Case(schedule="2bw", stages=4, steps=((2, 1), (2, 3)), flags=loading)
    ended = launch(through_launcher, case, tmp_path, timeout_s=60.0)
    assert ended.exit_codes == [2] * case.ranks, ended.tails()
    assert "from sample 0 on" in ended.outputs[0]
    assert "iteration        1/" not in ended.outputs[-1]


def _refusal(case: Case, folder: Path) -> str:
    ended = launch(through_launcher, case, folder, timeout_s=60.0)
    assert ended.exit_codes == [2] * case.ranks, ended.tails()
    return ended.outputs[0].strip().splitlines()[-1]


def test_a_schedule_in_tokens_counts_by_the_length_that_megatron_validated() -> None:
    """A vision model sets another one when it is built."""
    args = SimpleNamespace(data_parallel_size=1, micro_batch_size=2, seq_length=40, train_iters=0, train_samples=64)
    calculator.init_num_microbatches_calculator(
        rank=-1,
        global_batch_size=None,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=False,
        step_batch_size_schedule="0:8 640:16",
        seq_length=args.seq_length,
    )
    args.seq_length = 5
    try:
        sizes = BatchSizes.of_training(args)
        assert [phase.first_sample for phase in sizes.phases(0, 0)] == [0, 16]
        assert (sizes.microbatches(16), sizes.microbatches(0), sizes.microbatches(63)) == (8, 4, 8)
        assert calculator.get_num_microbatches() == 4, "Megatron's own stays where it is"
    finally:
        calculator.unset_num_microbatches_calculator()


def growing(steps: str, **more: int) -> SimpleNamespace:
    """Megatron's arguments of one replica whose batches have these sizes."""
    return SimpleNamespace(
        data_parallel_size=1,
        micro_batch_size=2,
        global_batch_size=None,
        decrease_batch_size_if_needed=False,
        step_batch_size_schedule=steps,
        **more,
    )


def test_a_size_that_is_back_at_the_end_is_not_missed() -> None:
    args = growing("0:4 40:8 80:4", seq_length=1, train_iters=100)
    phases = BatchSizes.of_arguments(args).phases(0, 0)
    assert [next(phases).first_sample, next(phases).first_sample] == [0, 40]
    with pytest.raises(ValueError, match="makes batches smaller after 80 samples"):
        next(phases)


def test_the_last_batch_may_have_fewer_samples_left_than_it_takes() -> None:
    args = growing("0:8 640:16", seq_length=40, train_iters=0, train_samples=17)
    assert [phase.first_sample for phase in BatchSizes.of_arguments(args).phases(0, 0)] == [0, 16]
