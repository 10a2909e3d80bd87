"""What becomes of a 2BW job on a GPU: checkpoints, evaluations, other schedules, lost ranks."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.mcore import saved
from tests.mcore.case import EVALUATION_ITERATIONS, Case
from tests.mcore.compare import FLOOR, deviation, differing
from tests.mcore.hangs import WOKE_UP, Loss, assert_places, main
from tests.mcore.harness import launch, run
from tests.mcore.oracle import oracle
from tests.mcore.saved import assert_continues, rest, save

pytestmark = pytest.mark.gpu

CASE = replace(saved.CASE, device="cuda")
DETERMINED = replace(saved.DETERMINED, device="cuda")
STARTED_WITHIN_S = 90.0
TIMEOUT_S = 20.0


@pytest.mark.parametrize(
    ("case", "format_"),
    [
        pytest.param(replace(CASE, precision="bf16"), "torch", id="bf16"),
        pytest.param(replace(CASE, precision="fp16"), "torch_dist", id="fp16"),  # The scale has just grown.
        pytest.param(
            replace(CASE, replicas=2, distributed_optimizer=True, precision="bf16"), "torch_dist", id="distributed"
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(case: Case, format_: str, tmp_path: Path) -> None:
    """The random numbers of dropout come from the GPU, and forwards have run ahead when it is saved."""
    whole = save(case, tmp_path, format_, interval=5)
    assert_continues(whole.resumed(10), whole.results, 10)


def test_other_schedules_and_layouts_go_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = save(DETERMINED, tmp_path, "torch_dist", interval=6)
    stock = whole.resumed(6, replace(DETERMINED, schedule="megatron"))
    newest = rest(oracle(DETERMINED, delay=1, delayed_batches=6), 6)
    assert differing(stock, newest, norms=False) == []
    four = whole.resumed(6, replace(DETERMINED, stages=4))
    assert max(deviation(four, rest(oracle(DETERMINED, delay=1), 6))) <= FLOOR


def test_evaluations_use_the_newest_weights_and_change_no_number() -> None:
    evaluating = ("--eval-interval", "5", "--eval-iters", str(EVALUATION_ITERATIONS))
    found = run(replace(DETERMINED, flags=evaluating))
    assert differing(found, run(DETERMINED)) == []
    assert torch.equal(found.validation_losses, oracle(DETERMINED, delay=1, evaluate_every=5).validation_losses)


@pytest.mark.parametrize("kind", ["killed", "hanging"])
def test_a_lost_rank_ends_the_others(kind: str, tmp_path: Path) -> None:
    """Those who wait for a killed one at once, for a hanging one within the timeout; each says where it waited."""
    assert_ends_the_others(kind, CASE, tmp_path)


def assert_ends_the_others(kind: str, case: Case, folder: Path) -> None:
    case = replace(case, stages=4, microbatches=4)
    timeout_s = TIMEOUT_S if kind == "hanging" else 10 * STARTED_WITHIN_S
    loss = Loss(rank=1, kind=kind, place="forward", call=13, timeout_s=timeout_s)
    within_s = STARTED_WITHIN_S + 2 * TIMEOUT_S
    ended = launch(partial(main, loss=loss), case, folder, timeout_s=within_s)
    lost = -signal.SIGKILL if kind == "killed" else WOKE_UP
    assert ended.exit_codes == [lost if rank == loss.rank else 1 for rank in range(case.ranks)], ended.tails()
    assert_places(ended, set(range(case.ranks)) - {loss.rank}, case.stages)
