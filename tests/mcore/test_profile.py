"""``megatron-2bw profile`` measures this machine, and what ``plan`` makes of it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_2bw.cli import main
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.model_flags import read_model
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.measure import profiling
from megatron_2bw.planner.measure.profile import Block, Profile, Setting, Update
from megatron_2bw.planner.measure.profiling import Request
from megatron_2bw.planner.measure.torchrun import lines_of
from megatron_2bw.planner.specs.layout import Precision, Recompute

from .case import Case
from .harness import launch
from .worker import set_environment

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --hidden-dropout 0 "
    "--attention-dropout 0"
).split()
RANKS = 2
BLOCK = Block(
    tensor=1,
    microbatch=1,
    recompute=Recompute.NONE,
    layer_forward_s=1.0,
    layer_backward_s=2.0,
    layer_kept_bytes=1,
    embedding_forward_s=0.0,
    embedding_backward_s=0.0,
    loss_forward_s=0.0,
    loss_backward_s=0.0,
)
SETTING = Setting(ranks=1, precision=Precision.FP32, fused_attention=False, sequence_parallel=False)


def measure(path: Path, recompute: str) -> int:
    words = ["profile", "--gpus", str(RANKS), "--micro-batch-size", "1", "--output", str(path)]
    return main([*words, "--recompute-granularity", recompute, *FLAGS])


def _measured(case: Case, rank: int, port: int, folder: Path, *, words: list[str]) -> None:
    """As a rank of torchrun's."""
    set_environment(rank, case.ranks, port)
    from megatron_2bw.mcore import profile, timing

    timing.ENOUGH_S = 0.0
    sys.argv = words[1:]
    profile.main()


def test_measured_resumed_planned_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Measured by ranks that are forked, which is sooner; run as users do."""

    def forked(words: list[str], *, ranks: int, what: str) -> list[str]:
        ended = launch(partial(_measured, words=words), Case(schedule=None, stages=ranks), tmp_path)
        assert ended.exit_codes == [0] * ranks, ended.tails()
        return ended.outputs[0].splitlines()

    path = tmp_path / "profile.json"
    with monkeypatch.context() as patched:
        patched.setattr(profiling, "lines_of", forked)
        assert measure(path, "none") == 0
        first = Profile.load(path)
        capfd.readouterr()
        assert measure(path, "full") == 0
    printed = capfd.readouterr()
    (plain,) = first.blocks
    assert (plain.tensor, plain.microbatch, plain.recompute) == (1, 1, Recompute.NONE)
    assert min(plain.layer_forward_s, plain.layer_backward_s, first.update(1).time_s, *first.link()) > 0
    assert len(first.all_reduces) == 2
    assert "1/1" in printed.err, "one measurement is new"
    assert "t1 b1 full" in printed.out
    resumed = Profile.load(path)
    assert resumed.blocks[0] == plain, "what is there is not measured again"
    assert 0 < resumed.blocks[1].layer_kept_bytes < plain.layer_kept_bytes

    plan = ["plan", *FLAGS, "--profile", str(path), "--global-batch-size", "8", "--verify-top", "1", "--json"]
    assert main([*plan, "--pipeline-schedule", "2bw", "--pipeline-model-parallel-size", "2"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["choices"][0]["measured_s"] > 0
    assert "1 of these layouts ran on this machine" in " ".join(printed["advice"])


def test_a_profile_of_something_else_is_not_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    words = ["profile", "--gpus", "1", "--output", str(path)]
    path.write_text("{}")
    assert main([*words, *FLAGS]) == 2
    assert "model is missing" in capfd.readouterr().err
    assert path.read_text() == "{}"


def _request(setting: Setting = SETTING, *more: str) -> Request:
    """Of one microbatch size."""
    model = read_model(Options.parse([*FLAGS, *more]))
    return Request(model=model, setting=setting, tensors=(1,), microbatches=(1,), recomputes=(Recompute.NONE,))


def _as_asked(case: Case, rank: int, port: int, folder: Path, *, request: Request, path: Path) -> None:
    """Measure briefly."""
    set_environment(rank, case.ranks, port)
    from megatron_2bw.mcore import profile, timing

    timing.ENOUGH_S = 0.0
    request.begin().save(path)
    sys.argv = request.words(1, path)[1:]
    profile.main()


def test_layers_with_experts_by_a_pattern_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    request = _request(SETTING, *"--num-experts 4 --moe-layer-freq ([1]*4) --disable-bias-linear".split())
    ended = launch(partial(_as_asked, request=request, path=path), Case(schedule=None), tmp_path)
    assert ended.exit_codes == [0], ended.tails()
    assert Profile.load(path).block(1, 1, Recompute.NONE).layer_forward_s > 0


def test_attention_is_not_said_to_be_fused_where_it_is_not(tmp_path: Path) -> None:
    setting = replace(SETTING, precision=Precision.BF16, fused_attention=True)
    path, request = tmp_path / "profile.json", _request(setting)
    ended = launch(partial(_as_asked, request=request, path=path), Case(schedule=None), tmp_path)
    assert ended.exit_codes == [1], ended.tails()
    assert "Megatron has no fused attention here; use --attention-backend unfused" in ended.outputs[0]


def _without_memory(case: Case, rank: int, port: int, folder: Path, *, path: Path, built: int) -> None:
    """Measure on a machine on which only so many models can be built."""
    set_environment(rank, case.ranks, port)
    from megatron_2bw.mcore import profile

    build, left = profile._build, iter(range(built))

    def within_memory(ends: profile.Ends) -> torch.nn.Module:
        if next(left, None) is None:
            raise torch.OutOfMemoryError
        return build(ends)

    profile._build = within_memory
    _as_asked(case, rank, port, folder, request=_request(), path=path)


@pytest.mark.parametrize("built", [0, 1, 2, 4])
def test_what_does_not_fit_is_left_out(built: int, tmp_path: Path) -> None:
    """Megatron's optimizer, which every plan needs; a stage without ends; one with an embedding."""
    path = tmp_path / "profile.json"
    ended = launch(partial(_without_memory, path=path, built=built), Case(schedule=None), tmp_path)
    assert ended.exit_codes == [0], ended.tails()
    said = "tensor 1: 2 layers with gradients and optimizer are out of memory, left out"
    assert (said in ended.outputs[0]) == (built == 0)
    assert ("b = 1, none: out of memory, left out" in ended.outputs[0]) == (built in (1, 2))
    profile = Profile.load(path)
    assert (len(profile.updates), len(profile.blocks)) == (built > 0, built == 4)


@pytest.mark.parametrize("fits", [(), (2,)])
def test_a_profile_needs_something_that_fits(
    fits: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several tensor-parallel sizes, one is enough."""
    path = tmp_path / "profile.json"

    def measured(words: list[str], *, ranks: int, what: str) -> list[str]:
        profile = Profile.load(path)
        tensor = int(what.split()[-1])
        if tensor in fits:
            profile.updates.append(Update(tensor=tensor, weights=1, time_s=1.0))
            profile.blocks.append(replace(BLOCK, tensor=tensor))
            profile.save(path)
        return []

    monkeypatch.setattr(profiling, "lines_of", measured)
    words = ["profile", "--gpus", "2", "--tensor-model-parallel-size", "1,2", "--output", str(path), *FLAGS]
    assert main(words) == (0 if fits else 2)
    expected = "tensor 1, 2: 2 layers with their gradients and optimizer, and a microbatch of 1, do not fit into memory"
    assert (expected in capsys.readouterr().err) == (not fits)


def test_a_profile_of_other_versions_is_not_gone_on_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The rank's own words, not what torchrun says about it."""
    path = tmp_path / "profile.json"
    model = read_model(Options.parse(FLAGS))
    Profile(model=model, setting=SETTING, date="2026-11-22", device="another", memory_gb=1.0).save(path)
    assert main(["profile", "--gpus", "1", "--micro-batch-size", "1", "--output", str(path), *FLAGS]) == 2
    error = capfd.readouterr().err
    assert "was measured on another" in error
    assert "give another --output" in error
    assert "ChildFailedError" not in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_ends_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    words = ["profile", "--gpus", str(RANKS), "--micro-batch-size", "1,2,4,8,16,32", "--output", str(path), *FLAGS]
    command = subprocess.Popen(
        [sys.executable, "-m", "megatron_2bw.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        # A shell may start what runs in the background with this signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    next(line for line in command.stderr if " 1/" in line)
    command.send_signal(number)
    assert command.wait(60) == 128 + number
    assert "Traceback" not in command.stderr.read()
    assert not list(running(path))


def running(path: Path) -> Iterator[int]:
    """Ranks whose profile has this path."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.fsencode(path) in Path("/proc", pid, "cmdline").read_bytes():
                yield int(pid)


FAILING = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    sys.stdout.buffer.write(bytes([255, 10]))
    raise ValueError("the reason")

main()
"""


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    """Behind frames of torchrun's own package, and before what torchrun says itself; also where some is no text."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    with pytest.raises(PlanError, match=r"ValueError: the reason$") as failure:
        [*lines_of([str(script)], ranks=1, what="a job")]
    assert str(failure.value).startswith("a job failed on this machine; the end of its output:\n")
