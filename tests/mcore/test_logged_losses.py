"""Auxiliary losses in the log are those of stock Megatron, line by line."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_2bw.mcore.loop import wrappers

from .case import Case
from .features import EXPERTS, SEVERAL_TOKENS
from .harness import collect, run
from .worker import with_steps

OF_EXPERTS = ("load_balancing_loss", "z_loss")
OF_SEVERAL_TOKENS = ("mtp_1 loss", "mtp_2 loss")
NO_UPDATES = tuple("--lr 0 --min-lr 0 --lr-warmup-init 0".split())
"""Every batch sees the initial weights, so delayed training must log what ordinary training does."""
CASE = Case(
    schedule="2bw",
    stages=2,
    batches=8,
    tied=False,
    model=(*EXPERTS, "--moe-z-loss-coeff", "1e-2", *NO_UPDATES),
)
GROWING = Case(
    schedule="2bw", stages=2, tied=False, model=CASE.model, steps=((4, 1), (CASE.batches - 4, 2)), skipped=(1,)
)
RELATIVE = 1e-6
"""The log shows seven digits."""


@pytest.mark.parametrize(
    ("case", "interval"),
    [
        pytest.param(replace(CASE, microbatches=1), 1, id="m1, every batch"),
        pytest.param(replace(CASE, microbatches=1), 3, id="m1, every third"),
        pytest.param(replace(CASE, microbatches=4), 1, id="m4, every batch"),
        pytest.param(replace(CASE, microbatches=4), 3, id="m4, every third"),
        pytest.param(replace(CASE, microbatches=2, replicas=2, recompute="full"), 3, id="replicas, recomputed"),
        pytest.param(
            replace(CASE, microbatches=2, model=(*CASE.model, "--moe-layer-freq", "([1,0])")),
            3,
            id="no experts on the last stage",
        ),
        pytest.param(GROWING, 3, id="growing, one skipped"),
        pytest.param(replace(CASE, microbatches=2, synchronous=3), 1, id="begins without a delay"),
    ],
)
def test_every_line_is_megatrons(case: Case, interval: int) -> None:
    _compare(case, interval, OF_EXPERTS)


@pytest.mark.parametrize("interval", [1, 3])
def test_every_line_of_several_tokens_is_megatrons(interval: int) -> None:
    """The last stage, which has them, never runs ahead, however much is in flight."""
    ahead = ("--pipeline-extra-in-flight", "2")
    _compare(
        replace(CASE, microbatches=4, model=(*SEVERAL_TOKENS, *NO_UPDATES), flags=ahead), interval, OF_SEVERAL_TOKENS
    )


def _compare(case: Case, interval: int, losses: tuple[str, ...]) -> None:
    case = replace(case, flags=(*case.flags, "--log-interval", str(interval)))
    found, expected = (
        _logged(case, losses),
        _logged(replace(case, schedule=None, stages=1, flags=case.flags[-2:]), losses),
    )
    assert [iteration for iteration, *_ in expected] == [1, *range(max(interval, 2), CASE.batches + 1, interval)]
    for values in map(sorted, zip(*(line[1:] for line in expected), strict=True)):  # Another batch's would be noticed.
        assert all(b > a * (1 + 10 * RELATIVE) for a, b in itertools.pairwise(values))
    assert found == [pytest.approx(line, rel=RELATIVE, abs=0) for line in expected]


def _logged(case: Case, losses: tuple[str, ...]) -> list[tuple[float, ...]]:
    """Per line of the log: its iteration, and the mean of each loss over the batches since the line before."""
    shown = ".*".join([r"iteration +(\d+)/", *(rf"\| {loss}: (\S+)" for loss in losses)])
    return [tuple(map(float, values)) for values in re.findall(shown, run(case).outputs[-1])]


@pytest.mark.parametrize("more", [(), ("--log-params-norm",)], ids=["", "settled before its line"])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_a_loss_that_is_no_number_is_counted_and_left_out(interval: int, more: tuple[str, ...]) -> None:
    """In fp16, in the line of its batch, though its update is found to be skipped one batch later.

    The norm of the weights has it found out before that line, but after Megatron asked what became of the update.
    """
    case = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=8, precision="fp16", model=NO_UPDATES)
    case = replace(case, flags=("--log-interval", str(interval), *more))
    found, expected = (
        re.findall(LOSSES, collect(_with_an_infinite_loss, one)[-1].output)
        for one in (case, replace(case, schedule=None))
    )
    assert found == expected
    assert sum(int(nan) for *_, nan in found) == sum(int(skipped) for *_, skipped, _ in found) == 1


LOSSES = (
    r"iteration +(\d+)/.*global batch size: +\d+ \|(?: lm loss: (\S+) \|)?.*"
    r"skipped iterations: +(\d+) \| number of nan iterations: +(\d+)"
)


@pytest.mark.parametrize("interval", [1, 3])
def test_no_loss_is_shown_before_the_first_update(interval: int) -> None:
    """The first four batches are skipped, and the fifth's loss is left out: its line is the first to count none."""
    case = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=9, precision="fp16", model=NO_UPDATES)
    case = replace(case, model=(*case.model, "--initial-loss-scale", str(2**22)))
    case = replace(case, flags=("--log-interval", str(interval)))
    lines = re.findall(LOSSES, run(case).outputs[-1])
    shown = {int(iteration) for iteration, loss, *_ in lines if loss}
    assert shown == ({1, 6, 7, 8, 9} if interval == 1 else {1, 6, 9})
    assert all(float(loss) > 1 for _, loss, *_ in lines if loss)


def _with_an_infinite_loss(case: Case, rank: int, port: int, folder: Path) -> None:
    """That of the first microbatch of the fourth batch."""
    calls = itertools.count()

    def infinite(output: Any, loss: Any, model: Any) -> tuple[Any, Any]:
        from megatron.core import parallel_state

        is_it = parallel_state.is_pipeline_last_stage() and model.training
        return output * (float("inf") if is_it and next(calls) == 3 * case.microbatches else 1.0), loss

    with_steps(infinite, case, rank, port, folder)


def test_a_mean_over_nothing_beside_the_loss_skips_no_update() -> None:
    """Such as the loss of one of several data sets, in a batch without it."""
    case = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=6, precision="fp16", model=NO_UPDATES)
    case = replace(case, flags=("--log-interval", "1"))
    found, expected = (
        re.findall(LOSSES, collect(_with_a_mean_over_nothing, one)[-1].output)
        for one in (case, replace(case, schedule=None))
    )
    assert found == expected
    assert len(found) == case.batches
    assert all(skipped == nan == "0" for *_, skipped, nan in found)


def _with_a_mean_over_nothing(case: Case, rank: int, port: int, folder: Path) -> None:
    """In the second half of the run."""
    calls = itertools.count()

    def with_another(output: Any, loss: Any, model: Any) -> tuple[Any, Any]:
        tokens = 1.0 if next(calls) < 3 * case.microbatches else 0.0

        def losses(tensor: Any) -> Any:
            *rest, logged = loss(tensor)
            return (*rest, logged | {"loss of another": tensor.new_tensor([tokens, tokens])})

        return output, losses

    with_steps(with_another, case, rank, port, folder)


@pytest.mark.parametrize(
    ("tensorboard", "every", "logged"),
    [(None, 1, [1, 5, 10]), ("runs", 4, [1, 4, 5, 8, 10]), ("runs", 1, [*range(1, 11)])],
)
def test_which_batches_are_reported(
    tensorboard: str | None, every: int, logged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, each fifth for the log, and those for Tensorboard."""
    log = {"tensorboard_dir": tensorboard, "tensorboard_log_interval": every, "log_interval": 5}
    assert _batches("logs_this_batch", monkeypatch, **log) == logged


@pytest.mark.parametrize(("tensorboard", "reported"), [(None, [*range(1, 11)]), ("runs", [1, 5, 10])])
def test_experts_are_reported_to_wandb(
    tensorboard: str | None, reported: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every batch, as Megatron does where Tensorboard has no interval for it."""
    log = {"tensorboard_dir": tensorboard, "tensorboard_log_interval": 5, "log_interval": 5, "wandb_project": "name"}
    assert _batches("reports_experts", monkeypatch, **log) == reported


def _batches(asked: str, monkeypatch: pytest.MonkeyPatch, **log: object) -> list[int]:
    """Of ten batches, those of which a session says so under these arguments."""
    from megatron_2bw.mcore.loop import session

    args, running = SimpleNamespace(**log), SimpleNamespace(pipeline=SimpleNamespace())
    running.logs_this_batch = partial(session.Session.logs_this_batch, running)
    monkeypatch.setattr(session, "get_args", lambda: args)
    found = []
    for batch in range(1, 11):
        args.curr_iteration, running.pipeline.batches_run = batch - 1, batch
        found += [batch] * getattr(session.Session, asked)(running)
    return found


@pytest.mark.parametrize(("stat", "logged"), [(1e-3 / 3, 3.3333332976326346e-4), (18818, 18818.0), (None, None)])
def test_statistics_are_rounded_as_megatrons_are(
    stat: float | None, logged: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron takes the largest of all stages in an fp32 tensor; under a delay no stage is asked."""
    monkeypatch.setattr(wrappers.active, "session", SimpleNamespace(is_delayed=True))
    value = wrappers.answer_locally_in_fp32(None, stat)
    assert (value, type(value)) == (logged, type(logged))
