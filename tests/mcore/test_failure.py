"""A rank that fails, dies or hangs ends the job, and every rank says what it failed at; nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch._C._distributed_c10d import ErrorType

from .case import Case, Fault
from .faults import before, in_call
from .hangs import WOKE_UP, Loss, assert_places, main
from .harness import ENVIRONMENT, import_path, launch
from .worker import install, set_environment, through_launcher, train, with_steps, write_case

MESSAGE = "the coolant of this test has leaked"
WITHIN_S = 20.0
TIMEOUT_S = 10.0
STARTED_WITHIN_S = 60.0
"""Of a loaded machine."""


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_every_rank_ends_by_itself(schedule: str, rank: int, tmp_path: Path) -> None:
    """No launcher kills the others here."""
    fault = Fault(kind="raise in forward", rank=rank, call=13, text=MESSAGE)
    case = Case(schedule=schedule, stages=4, microbatches=4, clip=1.0, faults=(fault,))
    ended = launch(through_launcher, case, tmp_path, timeout_s=WITHIN_S)
    assert ended.exit_codes == [1] * case.ranks, ended.tails()
    assert MESSAGE in ended.outputs[rank]
    assert f"rank {rank} failed" in ended.outputs[rank]
    others = [output for other, output in enumerate(ended.outputs) if other != rank]
    assert all("look for that rank's own error" in output for output in others), ended.tails()


def test_a_failure_in_an_evaluation_is_named(tmp_path: Path) -> None:
    flags = ("--eval-interval", "2", "--eval-iters", "1")
    ended = launch(
        _failing_evaluation, Case(schedule="2bw", stages=2, microbatches=2, flags=flags), tmp_path, timeout_s=60
    )
    assert ended.exit_codes == [1, 1], ended.tails()
    for stage, output in enumerate(ended.outputs):
        assert f"stage {stage}: between the calls of batches 1 and 2, in evaluate\n" in output, ended.tails()


def _failing_evaluation(case: Case, rank: int, port: int, folder: Path) -> None:
    def fail(output: Any, loss: Any, model: Any) -> tuple[Any, Any]:
        if rank == 1 and not model.training:
            raise RuntimeError(MESSAGE)
        return output, loss

    with_steps(fail, case, rank, port, folder)


def test_torchrun_ends_with_the_message(tmp_path: Path) -> None:
    fault = Fault(kind="raise in forward", rank=1, call=5, text=MESSAGE)
    case = Case(schedule="2bw", stages=2, microbatches=2, faults=(fault,))
    script = Path(__file__).with_name("script.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "megatron_2bw", script, __package__, write_case(case, tmp_path), tmp_path]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": import_path()}
    ended = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=120.0
    )
    assert ended.returncode != 0
    assert MESSAGE in ended.stderr
    assert "rank 1 failed" in ended.stderr


@pytest.mark.parametrize(
    ("case", "rank", "call"),
    [
        (Case(schedule="2bw", stages=4, microbatches=4, clip=1.0), 0, 10),
        (Case(schedule="2bw", stages=4, microbatches=4, clip=1.0), 2, 13),
        (Case(schedule="2bw", stages=2, microbatches=2, replicas=2), 3, 5),
        (Case(schedule="1f1b-flush", stages=4, microbatches=4, clip=1.0), 1, 13),
    ],
    ids=["2bw-first", "2bw-middle", "2bw-replicas", "1f1b-flush"],
)
def test_a_rank_that_is_killed_ends_the_others(case: Case, rank: int, call: int, tmp_path: Path) -> None:
    """Nothing is left to wait for: they end at once, not at the timeout."""
    loss = Loss(rank=rank, kind="killed", place="forward", call=call)
    ended = launch(partial(main, loss=loss), case, tmp_path, timeout_s=STARTED_WITHIN_S + WITHIN_S)
    assert ended.exit_codes == [-signal.SIGKILL if other == rank else 1 for other in range(case.ranks)], ended.tails()
    assert_places(ended, set(range(case.ranks)) - {rank}, case.stages)


@pytest.mark.parametrize(
    ("case", "rank", "call"),
    [
        (Case(schedule="2bw", stages=4, microbatches=4, clip=1.0), 1, 13),
        (Case(schedule="1f1b-flush", stages=2, microbatches=4, clip=1.0), 1, 6),
    ],
    ids=["2bw", "1f1b-flush"],
)
def test_a_rank_that_hangs_ends_the_others_within_the_timeout(case: Case, rank: int, call: int, tmp_path: Path) -> None:
    """That of ``--distributed-timeout-seconds-after-init``: ``--distributed-timeout-minutes`` has no smaller unit."""
    loss = Loss(rank=rank, kind="hanging", place="forward", call=call, timeout_s=TIMEOUT_S)
    ended = launch(partial(main, loss=loss), case, tmp_path, timeout_s=STARTED_WITHIN_S + 2 * TIMEOUT_S)
    assert ended.exit_codes == [WOKE_UP if other == rank else 1 for other in range(case.ranks)], ended.tails()
    assert_places(ended, set(range(case.ranks)) - {rank}, case.stages)
    beside = {rank - 1: "RECV_B", rank + 1: "RECV_F"}
    for other in beside.keys() & set(range(case.ranks)):
        waited = rf"PeerLostError: stage {other}: {other}{beside[other]}\d@\d .*, with rank {rank}, failed"
        assert re.search(waited, ended.outputs[other]), ended.tails()
        assert "Timed out waiting" in ended.outputs[other], ended.tails()


def test_a_reduction_that_hangs_is_named(tmp_path: Path) -> None:
    """In the background of one rank, while its main thread goes on as far as it can."""
    case = Case(schedule="2bw", stages=2, microbatches=2, clip=1.0)
    loss = Loss(rank=1, kind="hanging", place="reduction", call=7, timeout_s=TIMEOUT_S)
    ended = launch(partial(main, loss=loss), case, tmp_path, timeout_s=STARTED_WITHIN_S + 2 * TIMEOUT_S)
    assert ended.exit_codes == [1, 1], ended.tails()
    places = assert_places(ended, {0, 1}, case.stages)
    assert any("REDUCE_WAIT" in place or "UPDATE" in place for place in places.values()), places
    assert re.search(r"PeerLostError: stage 0: 0(REDUCE_WAIT:\w+|UPDATE)@\d .*: the .* failed", ended.outputs[0])
    assert re.search(r"PeerLostError: stage 1: 1(REDUCE_WAIT:\w+|UPDATE)@\d .*: not complete", ended.outputs[1])


def _with_what_nccl_says(case: Case, rank: int, port: int, folder: Path) -> None:
    """Rank 1 hangs, and on the other one NCCL's watchdog notes that a receive is too late."""
    from megatron_2bw.mcore import failure

    hung = folder / "hung"
    failure.has_nccl = lambda: True
    failure.nccl_failure = lambda: (None, "NCCL, group: TIMEOUT") if rank == 0 and hung.exists() else None
    set_environment(rank, case.ranks, port)
    install(case)
    from megatron_2bw.mcore.stages.stage import MegatronStage

    def hang() -> None:
        hung.touch()
        time.sleep(TIMEOUT_S)
        os._exit(WOKE_UP)

    if rank == 1:
        MegatronStage.forward = before(MegatronStage.forward, in_call(5, hang))
    train(case, rank, folder)


def test_what_nccl_says_ends_a_rank_whose_device_waits(tmp_path: Path) -> None:
    """No exception is raised there; this rank waits for gloo, which would take two minutes to say so."""
    case = Case(schedule="2bw", stages=2, microbatches=2, clip=1.0)
    ended = launch(_with_what_nccl_says, case, tmp_path, timeout_s=STARTED_WITHIN_S + TIMEOUT_S)
    assert ended.exit_codes == [1, WOKE_UP], ended.tails()
    assert_places(ended, {0}, case.stages)
    said = "failed: a rank is gone or too late, so look for that rank's own error. (NCCL, group: TIMEOUT)"
    assert said in ended.outputs[0]


def test_hooks_may_be_chained(tmp_path: Path) -> None:
    """As where one pipeline is left open when the next begins."""
    ended = launch(_with_two_hooks, Case(schedule="2bw"), tmp_path, ranks=1)
    assert ended.exit_codes == [1], ended.tails()
    assert "failed with the error above, at the first" in ended.outputs[0]


def _with_two_hooks(*_: object) -> None:
    from megatron_2bw.mcore.failure import end_at_once_on_errors

    end_at_once_on_errors(lambda: "at the first")
    end_at_once_on_errors(lambda: "at the second")
    raise SystemError


def test_a_failure_is_that_of_the_first_group_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_2bw.mcore import failure

    def group(name: str, config: str, error: str) -> MagicMock:
        made = MagicMock(group_desc=name, config=config)
        made._get_backend.return_value.get_error.return_value = getattr(ErrorType, error)
        return made

    groups = [group("on the host", "cpu:gloo,cuda:gloo", "TIMEOUT"), group("sound", "cuda:nccl", "SUCCESS")]
    groups[1]._get_backend.side_effect = [RuntimeError("is being destroyed"), *[groups[1]._get_backend()] * 2]
    monkeypatch.setattr(failure.dist, "get_backend_config", lambda group: group.config)
    monkeypatch.setattr(failure.dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    assert failure.nccl_failure() is None
    assert failure.nccl_failure() is None
    groups += [group("late", "cpu:gloo,cuda:nccl", "TIMEOUT"), group("lost", "cuda:nccl", "COMM_ERROR")]
    monkeypatch.setattr(failure.dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    assert failure.nccl_failure() == (groups[2], "NCCL, late: TIMEOUT")


def _exits_itself(code: int) -> None:
    sys.exit(code)


def _is_made_to_exit(code: int) -> None:
    """By its evaluation, or by a signal's handler."""
    _exits_itself(code)


@pytest.mark.parametrize(
    ("loop", "code", "closes"), [(_exits_itself, 0, True), (_exits_itself, 1, False), (_is_made_to_exit, 0, False)]
)
def test_an_exit_waits_for_the_others_only_where_the_loop_itself_exits(
    loop: Callable[[int], None], code: int, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--exit-signal-handler-for-training exits wherever the signal comes, without process groups."""
    from megatron_2bw.mcore.loop import checks, wrappers

    session = MagicMock()
    monkeypatch.setattr(wrappers.active, "session", session)
    monkeypatch.setattr(checks, "checked_before_training", lambda args: None)
    monkeypatch.setattr("megatron.training.get_args", lambda: None)
    with pytest.raises(SystemExit):
        wrappers.train(loop, code)
    assert session.close.called is closes
    wrappers.active.forget()


def test_an_error_after_training_ends_the_process(tmp_path: Path) -> None:
    ended = launch(_failing_after_training, Case(schedule="2bw"), tmp_path, ranks=1, timeout_s=60)
    assert ended.exit_codes == [1], ended.tails()
    assert "failed with the error above, after training" in ended.outputs[0]


def _failing_after_training(*_: object) -> None:
    from megatron_2bw.mcore.loop.active import active

    active.session = MagicMock()
    active.end()
    threading.Thread(target=time.sleep, args=(90,)).start()  # As a loader's workers, for which Python waits.
    raise SystemError


def test_a_hook_below_another_one_stays_silent_once_undone(tmp_path: Path) -> None:
    ended = launch(_with_an_undone_hook, Case(schedule="2bw"), tmp_path, ranks=1)
    assert "SystemError" in ended.outputs[0]
    assert "failed with the error above" not in ended.outputs[0]


def _with_an_undone_hook(*_: object) -> None:
    from megatron_2bw.mcore.failure import end_at_once_on_errors

    undo = end_at_once_on_errors(lambda: "in training")
    below = sys.excepthook
    sys.excepthook = lambda *error: below(*error)
    undo()
    raise SystemError


END = "from megatron_2bw.mcore.failure import end_at_once_on_errors as end\nend(lambda: 'in training')\n"


def _ended(program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", END + program], env=environment, capture_output=True, text=True, timeout=40
    )


def test_an_interrupt_from_the_keyboard_is_no_failure() -> None:
    """But it ends what would not end by itself, too."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(90)"
    ended = _ended(
        "import multiprocessing, signal, time\n"
        f"def wait(): {deaf}\n"
        "multiprocessing.get_context('fork').Process(target=wait).start()\nraise KeyboardInterrupt"
    )
    assert ended.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in ended.stderr
    assert "failed with the error above" not in ended.stderr


def test_what_was_printed_before_a_failure_is_seen() -> None:
    assert _ended("print('iteration 1')\nraise SystemError").stdout == "iteration 1\n"


def test_a_failure_ends_the_processes_that_were_started_to_save() -> None:
    """One that is left would hold the output open, for which `run` waits."""
    started = "import multiprocessing, time\nmultiprocessing.get_context('fork').Process(target=time.sleep, args=(90,))"
    assert _ended(started + ".start()\nraise SystemError").returncode == 1


def test_the_watch_over_nccl_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pipeline that a loop has let go of, with its model, nor itself."""
    from megatron_2bw.mcore import failure

    class Waiting:
        def says(self, group: object) -> str:
            return ""

    monkeypatch.setattr(failure, "has_nccl", lambda: True)
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    waiting = Waiting()
    gone = weakref.ref(waiting)
    failure.end_at_once_where_nccl_fails(weakref.WeakMethod(waiting.says))
    (watch,) = (thread for thread in threading.enumerate() if thread.name == "2bw failures")
    del waiting
    assert gone() is None
    watch.join(timeout=10)
    assert not watch.is_alive()
