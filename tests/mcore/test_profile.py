"""``megatron-2bw profile`` measures this machine, and what ``plan`` makes of it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_2bw.cli import main
from megatron_2bw.planner.layout import Precision, Recompute
from megatron_2bw.planner.model_flags import read_model
from megatron_2bw.planner.options import Options
from megatron_2bw.planner.profile import Profile, Setting

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --hidden-dropout 0 "
    "--attention-dropout 0"
).split()
RANKS = 2


def measure(path: Path, recompute: str) -> int:
    words = ["profile", "--gpus", str(RANKS), "--micro-batch-size", "1", "--output", str(path)]
    return main([*words, "--recompute-granularity", recompute, *FLAGS])


def test_measured_resumed_planned_and_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    assert measure(path, "none") == 0
    first = Profile.load(path)
    (plain,) = first.blocks
    assert (plain.tensor, plain.microbatch, plain.recompute) == (1, 1, Recompute.NONE)
    assert min(plain.layer_forward_s, plain.layer_backward_s, first.update_s(1, 1), *first.link()) > 0
    assert len(first.all_reduces) == 2

    capfd.readouterr()
    assert measure(path, "full") == 0
    printed = capfd.readouterr()
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


def test_a_profile_of_other_versions_is_not_gone_on_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The rank's own words, not what torchrun says about it."""
    path = tmp_path / "profile.json"
    setting = Setting(ranks=1, precision=Precision.FP32, fused_attention=False, sequence_parallel=False)
    model = read_model(Options.parse(FLAGS))
    Profile(model=model, setting=setting, date="2026-11-22", device="another", memory_gb=1.0).save(path)
    assert main(["profile", "--gpus", "1", "--micro-batch-size", "1", "--output", str(path), *FLAGS]) == 2
    error = capfd.readouterr().err
    assert "was measured on another" in error
    assert "give another --output" in error
    assert "ChildFailedError" not in error
