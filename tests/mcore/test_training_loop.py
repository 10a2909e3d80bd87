"""What Megatron's training loop does between batches: it works, and changes no number of the training."""

from __future__ import annotations

import itertools
import math
import operator
import re
import time
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .case import EVALUATION_ITERATIONS, Case, Fault
from .compare import differing
from .faults import INFINITE_GRADIENT, before, in_call
from .features import EXPERTS
from .harness import collect, launch, merge, run
from .oracle import oracle
from .worker import main, set_environment

DURATION_MINUTES = 1440
"""More than the tests take: Megatron's clock starts when it is imported, once for all of them."""
CASE = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=8)
REPLICATED = replace(CASE, replicas=2)


@pytest.mark.parametrize(
    "flags",
    [
        ("--empty-unused-memory-level", "2"),
        ("--log-params-norm", "--log-interval", "3"),
        ("--exit-signal-handler", "--exit-duration-in-mins", "1000"),
        ("--no-check-for-nan-in-loss-and-grad",),
        ("--timing-log-level", "2", "--log-interval", "3"),
        ("--num-virtual-stages-per-pipeline-rank", "1"),
        ("--num-layers-per-virtual-pipeline-stage", "1"),  # All of a stage.
    ],
    ids=lambda flags: flags[0],
)
def test_no_number_changes(flags: tuple[str, ...]) -> None:
    assert differing(run(replace(CASE, flags=flags)), run(CASE)) == []


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
def test_timers_inside_a_call_are_logged(schedule: str, tmp_path: Path) -> None:
    """``--timing-log-level 2``, after the third batch.

    Without a logging level, Megatron says nothing of its timers where emerging-optimizers is installed, which
    configures Python's logging before it.
    """
    sleep = Fault(kind="sleep before forward", rank=0, call=0, seconds=0.9)
    flags = "--timing-log-level 2 --timing-log-option all --log-interval 3 --logging-level 20"
    case = replace(CASE, schedule=schedule, flags=tuple(flags.split()), faults=(sleep,), batches=4)
    ended = launch(main, case, tmp_path)
    assert not any(ended.exit_codes), ended.tails()
    log = ended.outputs[-1].split("iteration        3/", 1)[1]
    timers = {
        name: re.search(rf"{name}:\n +rank +0: ([0-9.]+)\n +rank +1: ([0-9.]+)", log)
        for name in ("forward-backward", "forward-compute", "backward-compute", "optimizer")
    }
    assert all(timers.values()), log
    times_ms = {name: [float(value) for value in found.groups()] for name, found in timers.items()}
    assert times_ms["forward-compute"][0] >= 300.0 > times_ms["forward-compute"][1] > 0.0  # Mean of 3 batches.
    assert all(0.0 < value < 300.0 for value in times_ms["backward-compute"])
    assert min(times_ms["forward-backward"]) >= 290.0


@pytest.mark.parametrize("schedule", ["2bw", "chimera"])
def test_only_evaluation(schedule: str) -> None:
    """``--skip-train``: of the initial weights, by Megatron's own schedule."""
    flags = ("--skip-train", "--eval-iters", str(EVALUATION_ITERATIONS))
    case = replace(CASE, schedule=schedule, stages=4, microbatches=1, flags=flags)  # Too few microbatches to train.
    found, expected = run(case), run(replace(case, schedule=None))
    assert found.validation_losses.numel() > 0
    assert torch.equal(found.validation_losses, expected.validation_losses)
    assert all(torch.equal(found.final[name], found.initial[name]) for name in found.initial)


@pytest.mark.parametrize("interval", [1, 3])
def test_the_norm_of_the_weights_is_that_of_the_newest(interval: int, tmp_path: Path) -> None:
    case = replace(CASE, flags=("--log-params-norm", "--log-interval", str(interval)))
    ended = launch(main, case, tmp_path)
    assert not any(ended.exit_codes), ended.tails()
    logged = re.findall(r"iteration +(\d+)/.*?\| params norm: ([0-9.]+) \|", ended.outputs[-1])
    assert [int(iteration) for iteration, _ in logged] == [1, *range(max(interval, 2), CASE.batches + 1, interval)]
    for iteration, norm in logged:
        weights = oracle(replace(CASE, batches=int(iteration)), delay=1).final.values()
        assert norm == f"{torch.stack([weight.double().norm() for weight in weights]).norm().item():.3f}"


def test_replicas_compare_the_newest_weights(tmp_path: Path) -> None:
    """``--check-weight-hash-across-dp-replicas-interval``."""
    case = replace(REPLICATED, flags=("--check-weight-hash-across-dp-replicas-interval", "3"))
    collect(partial(_recording_compared_weights, folder_of_weights=tmp_path), case)
    for batches in (3, 6):
        expected = oracle(replace(REPLICATED, batches=batches), delay=1).final
        for rank in range(case.ranks):
            compared = torch.load(tmp_path / f"{rank}-{batches // 3}.pt")
            assert [name for name in compared if not torch.equal(compared[name], expected[name])] == []
    assert differing(run(case), run(REPLICATED)) == []


def _recording_compared_weights(case: Case, rank: int, port: int, folder: Path, *, folder_of_weights: Path) -> None:
    set_environment(rank, case.ranks, port)
    from megatron_2bw.mcore.cpu import backend as cpu_backend

    cpu_backend.install()
    from megatron.training import training

    from .model import global_parameters

    compare, calls = training.check_param_hashes_across_dp_replicas, itertools.count()

    def recording(model: Any, **keywords: Any) -> bool:
        weights = {name: parameter.detach().clone() for name, parameter in global_parameters(model[0].module)}
        torch.save(weights, folder_of_weights / f"{rank}-{next(calls)}.pt")
        return compare(model, **keywords)

    training.check_param_hashes_across_dp_replicas = recording
    main(case, rank, port, folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_time_is_up_on_one_rank(rank: int) -> None:
    """``--exit-duration-in-mins``: all leave after the same batch, one later than Megatron would."""
    call = 7
    case = replace(CASE, flags=("--exit-duration-in-mins", str(DURATION_MINUTES)))
    target = partial(_with_a_jump_of_the_clock, of=rank, call=call)
    found = merge(collect(target, case), case)
    finished = found.losses.shape[1]
    assert 0 < finished - call // CASE.microbatches <= 2
    assert finished < CASE.batches
    assert differing(found, oracle(replace(CASE, batches=finished), delay=1), norms=False) == []


@pytest.mark.parametrize("every", [1, 5, CASE.batches])
def test_the_time_is_up_in_an_evaluation(every: int) -> None:
    """Megatron leaves its model in evaluation mode then, and a timer running.

    The batch that still comes must be trained, and another evaluation begin: with 1 after it, with all batches at the
    end.
    """
    flags = f"--exit-duration-in-mins {DURATION_MINUTES} --eval-interval {every} --eval-iters 2".split()
    case = replace(CASE, flags=tuple(flags))
    found = merge(collect(_with_a_jump_in_an_evaluation, case), case)
    finished = min(every + 1, CASE.batches)
    assert found.losses.shape[1] == finished
    assert differing(found, oracle(replace(CASE, batches=finished), delay=1), norms=False) == []


def _with_a_jump_of_the_clock(case: Case, rank: int, port: int, folder: Path, *, of: int, call: int) -> None:
    set_environment(rank, case.ranks, port)
    import megatron_2bw

    megatron_2bw.install()
    from megatron_2bw.mcore.stages.stage import MegatronStage

    if rank == of:
        MegatronStage.backward = before(MegatronStage.backward, in_call(call, _jump))
    main(case, rank, port, folder)


def _with_a_jump_in_an_evaluation(case: Case, rank: int, port: int, folder: Path) -> None:
    set_environment(rank, case.ranks, port)
    import megatron_2bw

    megatron_2bw.install()
    from megatron_2bw.mcore.loop.session import Session

    run_batch = Session.forward_backward

    def forward_backward(self: Session, stock: Any, **keywords: Any) -> Any:
        if keywords.get("forward_only"):
            _jump()
        return run_batch(self, stock, **keywords)

    Session.forward_backward = forward_backward
    main(case, rank, port, folder)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_packed_sequences_are_counted(microbatches: int) -> None:
    """Those of its own batch by each; all ranks meet for that, also one that runs no forward in a drained call."""
    case = replace(CASE, microbatches=microbatches)
    ended = collect(_with_packed_sequences, case)
    assert differing(merge(ended, case), oracle(case, delay=1), norms=False) == []
    lengths = torch.arange(1.0, case.batches * microbatches + 1).reshape(case.batches, microbatches)
    expected = [*zip(lengths.sum(1).tolist(), lengths.square().sum(1).tolist(), strict=True)]
    for rank in ended:
        found = re.findall(r"tokens (\S+), squares (\S+)", rank.output)
        assert [tuple(map(float, one)) for one in found] == expected


def _with_packed_sequences(case: Case, rank: int, port: int, folder: Path) -> None:
    """Each microbatch is one token longer than the one before."""
    set_environment(rank, case.ranks, port)
    import megatron_2bw

    megatron_2bw.install()
    from megatron.training import training

    from megatron_2bw.mcore.stages.stage import MegatronStage

    lengths, consume = itertools.count(1), training.consume_seqlen_stats_in_iteration

    def count() -> None:
        training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, next(lengths)], dtype=torch.int32))

    @wraps(consume)  # It stays hooked.
    def consumed() -> tuple[float, float]:
        tokens, squares = consume()
        print(f"tokens {tokens}, squares {squares}", flush=True)
        return tokens, squares

    training.consume_seqlen_stats_in_iteration = consumed
    MegatronStage.forward = before(MegatronStage.forward, count)
    main(case, rank, port, folder)


def _jump() -> None:
    from megatron.training import training

    training._TRAIN_START_TIME = time.time() - 2 * 60 * DURATION_MINUTES


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, precision="fp16", flags=(*CASE.flags, "--loss-scale", "1024")),
        replace(CASE, schedule="pipedream", microbatches=1),
    ],
    ids=["fp32", "fp16 with a constant loss scale", "pipedream"],
)
def test_a_gradient_that_is_not_finite_ends_all_ranks_and_names_its_batch(case: Case, tmp_path: Path) -> None:
    """``--check-for-nan-in-loss-and-grad``, Megatron's default: the norm is known to all ranks, if there is one.

    The iteration goes to the file from which a restarted run may learn to skip it, counted as Megatron does there.
    """
    batch, rejected = 3, tmp_path / "rejected"
    fault = Fault(kind=INFINITE_GRADIENT, rank=1, call=batch * case.microbatches)
    flags = (*case.flags, "--result-rejected-tracker-filename", str(rejected))
    case = replace(case, faults=(fault,), flags=flags)
    ended = launch(main, case, tmp_path, timeout_s=60.0)
    assert ended.exit_codes == [1] * case.ranks, ended.tails()
    named = [f"batch {batch} (counted from the start of the run)" in output for output in ended.outputs]
    assert any(named), ended.tails()
    waited = ["look for that rank" in output for output in ended.outputs]
    assert all(map(operator.or_, named, waited)), ended.tails()
    noted = re.findall(r"rank=(\d+) iteration=(\d+) status=RerunValidationStatus.RERUN_DISABLED", rejected.read_text())
    assert {int(rank) for rank, _ in noted} <= {rank for rank, found in enumerate(named) if found}
    assert {int(iteration) for _, iteration in noted} == {batch + 2}


def test_skipped_iterations_do_not_move_what_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without norms the answer comes with the next batch, which is not the next iteration."""
    from megatron.core import rerun_state_machine

    from megatron_2bw.mcore.updates.gradient_check import GradientCheck

    noted = []
    machine = SimpleNamespace(
        mode=rerun_state_machine.RerunMode.DISABLED,
        current_iteration=3,
        validate_result=lambda *_, **__: noted.append(machine.current_iteration),
    )
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    check = GradientCheck()
    check.begin(2)
    check.require(2, norms=None, gradients=[torch.tensor([math.nan])])
    machine.current_iteration = 6
    with pytest.raises(RuntimeError, match="batch 2 "):
        check.begin(3)
    assert noted == [3]


@pytest.mark.parametrize(
    "case",
    [
        replace(REPLICATED, model=EXPERTS, expert_parallel=2, precision="fp16", distributed_optimizer=True),
        replace(CASE, frozen=("embedding.", "decoder.layers.0.")),
    ],
    ids=["parallel experts, fp16, distributed optimizer", "a stage without any"],
)
def test_large_gradients_are_noted_as_by_megatron(case: Case, tmp_path: Path) -> None:
    """``--check-for-large-grads``: by bucket and rank, before they are summed, in the order of the first batches."""
    expected = _noted_as_large(replace(case, schedule=None), tmp_path / "megatron")
    assert len(expected) == (case.ranks if not case.frozen else 1)
    assert {iteration for notes in expected.values() for iteration, _ in notes} == set(range(2, case.batches + 2))
    assert _noted_as_large(replace(case, synchronous=case.batches), tmp_path / "synchronous") == expected
    delayed = _noted_as_large(case, tmp_path / "delayed")
    for rank, notes in expected.items():
        assert [iteration for iteration, _ in delayed[rank]] == [iteration for iteration, _ in notes]
        assert delayed[rank][0] == notes[0]
    assert delayed != expected


def test_large_gradients_are_those_of_the_delayed_batch(tmp_path: Path) -> None:
    noted = itertools.chain.from_iterable(_noted_as_large(CASE, tmp_path / "noted").values())
    norms = torch.zeros(CASE.batches, dtype=torch.float64)
    for iteration, said in noted:
        norms[iteration - 2] += float(re.search(r"result=([0-9.e-]+)", said)[1]) ** 2
    torch.testing.assert_close(norms.sqrt(), run(CASE).norms, rtol=1e-6, atol=0.0)


def _noted_as_large(case: Case, file: Path) -> dict[int, list[tuple[int, str]]]:
    """By rank, in order: Megatron's iteration, which counts from 2 there, and what is said of the gradient."""
    flags = ("--check-for-large-grads", "--rerun-mode", "disabled", "--result-rejected-tracker-filename", str(file))
    collect(_with_all_gradients_large, replace(case, flags=(*case.flags, *flags)))
    noted: dict[int, list[tuple[int, str]]] = {}
    for rank, iteration, said in re.findall(r"rank=(\d+) iteration=(\d+) (.*)", file.read_text()):
        noted.setdefault(int(rank), []).append((int(iteration), said))
    return noted


def _with_all_gradients_large(case: Case, rank: int, port: int, folder: Path) -> None:
    """As after a hundred that were zero."""
    set_environment(rank, case.ranks, port)
    from megatron_2bw.mcore.cpu import backend as cpu_backend

    cpu_backend.install()
    from megatron.core.rerun_state_machine import RerunStateMachine

    decide = RerunStateMachine.is_unexpectedly_large

    @wraps(decide)
    def decided(self: RerunStateMachine, result: torch.Tensor, **keywords: Any) -> bool:
        self.large_value_counts["grads"], self.max_values["grads"] = 100, 0.0
        return decide(self, result, **keywords)

    RerunStateMachine.is_unexpectedly_large = decided
    main(case, rank, port, folder)
