"""The command ``megatron-2bw``."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_2bw.schedule.commands.validate import feasible_region
from megatron_2bw.schedule.registry import ALIASES, SCHEDULES
from tests.cli import run


def test_show(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "show 2bw --stages 2 --microbatches 2 --batches 3")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "2bw: 2 stages, 2 microbatches, 3 batches",
        "rank 0  a0 a1 .  .  A0--- b0 A1--- b1 B0---|c0 B1--- c1 C0---|.  C1---|",
        "rank 1  .  a0 A0--- a1 A1--- b0 B0--- b1 B1---|c0 C0--- c1 C1---|.  . |",
        "a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle",
        "",
        "bubble 14.3%, 0.0% in an endless run",
        "rank                  0 1",
        "peak activations      2 1",
        "peak weight versions  2 1",
        "",
    ]


def test_show_several_and_write_files(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    size = "--stages 3 --microbatches 4 --forward-time 1 --backward-time 2.3"
    code, out, _ = run(capsys, f"show 2bw dapple gpipe 1f1b-flush {size} --svg {picture} --trace {trace} --programs")
    assert code == 0
    heads = [line for line in out.splitlines() if line.endswith("batches")]
    assert heads == [f"{name}: 3 stages, 4 microbatches, 3 batches" for name in ("2bw", "1f1b-flush", "gpipe")]
    assert "(drawn with a backward of 2 and a forward of 1 slots; the numbers are exact)" in out
    assert "0REDUCE_WAIT:norm@-1" in out
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2}


def test_schedules(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "schedules")
    assert code == 0
    assert all(name in out for name in (*SCHEDULES, *ALIASES))
    assert "1f1b-flush (also 1f1b, pipedream-flush, dapple)\n  Fill the pipeline, alternate one forward" in out
    assert "bubble 42.9%\n  peak activations per rank      4 4 4 4\n" in out
    _, out, _ = run(capsys, "schedules --stages 4 --microbatches 1")
    assert "does not work for 4 stages and 1 microbatch\n" in out


def test_validate_finds_the_bound(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "validate --max-stages 5 --max-microbatches 6")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "2bw: m >= d-1 (24 of 30 valid: d <= 5, m <= 6)"
    assert lines[1].startswith("  first refusal: 2bw (d=3, m=1): reduction waited for too early: rank 0")
    assert lines[2:5] == [
        f"{name}: all d and m (30 of 30 valid: d <= 5, m <= 6)" for name in ("1f1b-flush", "gpipe", "inter-layer")
    ]
    assert lines[5::2] == [
        "pipedream: m = 1 (5 of 30 valid: d <= 5, m <= 6)",
        "gems: d even, all m (12 of 30 valid: d <= 5, m <= 6)",
        "chimera: d even, m a multiple of d (4 of 30 valid: d <= 5, m <= 6)",
        "mixpipe: d even, m even and m >= d (5 of 30 valid: d <= 5, m <= 6)",
    ]
    assert run(capsys, "validate pipedream-flush --max-stages 2 --max-microbatches 1")[1].startswith("1f1b-flush: all")


def test_feasible_region():
    every = {(d, m) for d in range(1, 5) for m in range(1, 9)}
    for offset, text in ((-1, "m >= d-1"), (0, "m >= d"), (1, "m >= d+1")):
        assert feasible_region({(d, m) for d, m in every if m >= d + offset}, 4, 8) == text
    assert feasible_region(every, 4, 8) == "all d and m"
    assert feasible_region(set(), 4, 8) == "none"
    assert feasible_region({(2, m) for m in range(1, 9)} | {(4, m) for m in range(1, 9)}, 4, 8) == "d even, all m"
    assert feasible_region({(2, 2), (2, 4), (4, 4)}, 4, 5) == "d even, m a multiple of d"
    assert feasible_region({(2, 2), (2, 4), (2, 6), (4, 4), (4, 6)}, 4, 6) == "d even, m even and m >= d"
    assert feasible_region({(1, 2), (3, 1)}, 4, 8) == "no rule known; valid (d, m): (1, 2), (3, 1)"


BAD = {
    "show 2bw --stages 3 --microbatches 3 --extra-in-flight 1": "number that 2bw works with is 4 micro",
    "show 2bw --stages 3 --microbatches 3 --delayed-microbatches 1": "the next number that 2bw works with is 2 delayed",
    "show 2bw --stages 4 --microbatches 2 --delayed-microbatches 2": "is 3 microbatches, and as many delayed",
    "show gpipe --stages 2 --microbatches 2 --delayed-microbatches 2": "gpipe computes all microbatches of a batch a",
    "show 2bw --stages 2 --microbatches 2 --delayed-microbatches 0": "'0' is no count",
    "show gpipe --stages 2 --microbatches 2 --extra-in-flight 1": "gpipe keeps a fixed number of activations in flight",
    "show 2bw --stages 2 --microbatches 2 --extra-in-flight -1": "'-1' is no count",
    "show nosuch --stages 2 --microbatches 2": "unknown schedule 'nosuch'; choose one of 2bw, 1f1b-flush, gpipe",
    "show 2bw --stages 4 --microbatches 2": "with 4 stages, the next number that 2bw works with is 3 microbatches",
    "show 2bw --stages 0 --microbatches 2": "'0' is no count; give a whole number of at least 1",
    "show 2bw --stages two --microbatches 2": "'two' is no count",
    "show 2bw --microbatches 2": "show needs --stages, or a run to show: --measured FILE",
    "show --stages 2 --microbatches 2": "show needs a SCHEDULE, --compare, or a run to show: --measured FILE",
    "show 2bw --stages 2 --microbatches 2 --mixpipe-k 2": "2bw has no k and gamma (--mixpipe-k, ",
    "show mixpipe --stages 4 --microbatches 4 --mixpipe-k 3": "k = 3 (--mixpipe-k); use an even number from 2",
    "show chimera --stages 4 --microbatches 6": "the next number that chimera works with is 8 micro",
    "show --compare --stages 4 --microbatches 4 --mixpipe-k 3": "k = 3 (--mixpipe-k); use an even number",
    "show --compare --stages 4 --microbatches 8 --mixpipe-k 2": "leave them out, or use as many microbatches as stages",
    "show gems --stages 3 --microbatches 4": "gems sends microbatches in both directions and got 3 stages",
    "show gpipe --stages 1 --microbatches 1 --batches 0": "'0' is no count",
    "show gpipe --stages 1 --microbatches 1 --forward-time 0": "'0' is no duration; give a number above 0",
    "show gpipe --stages 1 --microbatches 1 --backward-time x": "'x' is no duration",
    "show gpipe --stages 1 --microbatches 1 --svg /nowhere/a.svg": "cannot write /nowhere/a.svg: No such file",
    "validate nosuch": "unknown schedule 'nosuch'",
    "validate --max-stages -1": "'-1' is no count",
    "": "COMMAND is missing; give it, --help says what it is",
    "train": "COMMAND train: choose one of ",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_gets_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str], command: str):
    code, _, err = run(capsys, command)
    assert code == 2
    (message,) = err.splitlines()
    assert BAD[command] in message


def test_as_a_process():
    command = [sys.executable, "-m", "megatron_2bw.cli", "show", "nosuch", "--stages", "2", "--microbatches", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("megatron-2bw: error: unknown schedule")
    assert "Traceback" not in result.stderr
