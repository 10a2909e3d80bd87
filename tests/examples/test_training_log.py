"""The filter and the summary of scripts/training_log.py, on lines that Megatron writes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

ITERATION = (
    " [2026-01-02 03:04:05.678901] iteration {iteration:8d}/{last:8d} | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): {time_ms:.1f} | learning rate: 1.000000E-03 | global batch size:     8 | "
    "lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.098 | number of skipped iterations:   0 |\n"
)
VALIDATION = " validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: 2.4E+02 | \n"
AT_END = " validation loss at iteration 30 on validation set | lm loss value: 1.0E+00 | lm loss PPL: 2.7E+00 | \n"
TRACE = {
    "traceEvents": [],
    "otherData": {
        "schedule": "2bw",
        "stages": 2,
        "microbatches": 2,
        "bubble": 0.0421,
        "flush_bubble": 1 / 3,
        "batches": 30,
    },
}


@pytest.fixture(scope="module")
def training_log(load):
    return load("scripts/training_log.py")


def lines() -> list[str]:
    """30 iterations of 10, 11, ... ms with losses 7.0, 6.9, ...; validation after 15 and 30."""
    result = ["> building train, validation, and test datasets ...\n", "training ...\n"]
    for index in range(30):
        row = {"iteration": index + 1, "last": 30, "samples": 8 * (index + 1), "time_ms": 10.0 + index}
        result.append(ITERATION.format(loss=7.0 - index / 10, **row))
        if index + 1 in (15, 30):
            result.append(VALIDATION.format(iteration=index + 1, loss=6.0 - index / 10))
    return [*result, AT_END]


def test_summary_reads_losses_times_and_bubble(training_log):
    summary = training_log.summarize(lines(), TRACE)

    assert summary.iterations == 30
    assert summary.first_loss == pytest.approx(7.0)
    assert summary.last_loss == pytest.approx(sum(7.0 - index / 10 for index in range(20, 30)) / 10)
    assert summary.validation_losses == pytest.approx((4.6, 3.1))
    assert summary.iteration_time_s == pytest.approx(24.5e-3)
    assert summary.pipeline == TRACE["otherData"]


def test_summary_of_a_short_run_takes_the_evaluation_at_its_end(training_log):
    log = [*lines()[:5], AT_END]
    assert training_log.summarize(log).validation_losses == (1.0,)


def test_summary_of_a_run_without_trace_and_validation(training_log):
    summary = training_log.summarize(line for line in lines() if "validation" not in line)
    assert summary.validation_losses == ()
    assert summary.pipeline is None
    assert "bubble" not in training_log.render(summary, {})


def test_a_log_without_iterations_is_refused(training_log):
    with pytest.raises(ValueError, match="no training iteration"):
        training_log.summarize(["training ...\n"])


def test_the_command_prints_the_table(root, tmp_path):
    log, trace = tmp_path / "train.log", tmp_path / "timeline.json"
    log.write_text("".join(lines()))
    trace.write_text(json.dumps(TRACE))
    command = [sys.executable, root / "scripts/training_log.py", "summary", log, "--trace", trace, "--checkpoint", "ck"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    rows = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in output.splitlines())
    assert rows == {
        "iterations": "30",
        "training loss": "7.000 -> 4.550",
        "validation loss": "4.600 -> 3.100",
        "iteration time": "24.5 ms (median)",
        "schedule": "2bw, 2 stages, 2 microbatches per batch",
        "pipeline bubble": "4.2% measured over 30 batches; with a flush at least 33.3%",
        "checkpoint": "ck",
        "timeline": str(trace),
        "full log": str(log),
    }


def test_follow_shows_progress_and_hides_noise(training_log, capsys):
    log = io.StringIO()
    training_log.follow(["megatron_2bw: rerun mode is disabled\n", *lines()], log, every=10)

    assert capsys.readouterr().out.splitlines() == [
        "megatron_2bw: rerun mode is disabled",
        "  iteration  1/30   loss 7.0000   10 ms",
        "  iteration 10/30   loss 6.1000   19 ms",
        "  validation loss 4.6000",
        "  iteration 20/30   loss 5.1000   29 ms",
        "  iteration 30/30   loss 4.1000   39 ms",
        "  validation loss 3.1000",
    ]
    assert log.getvalue().splitlines()[1:] == [line.rstrip("\n") for line in lines()]


def shown(training_log, capsys, lines: list[str]) -> list[str]:
    log = io.StringIO()
    training_log.follow([line + "\n" for line in lines], log, every=10)
    assert log.getvalue().splitlines() == lines
    return capsys.readouterr().out.splitlines()


def test_follow_shows_a_failure_once(training_log, capsys):
    first = ["[rank1]: Traceback (most recent call last):", "[rank1]:   File 'a.py'", "[rank1]: ValueError: too few"]
    report = (
        "E1120 14:16:35 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1"
    )
    repeated = ["Traceback (most recent call last):", "ChildFailedError:", "ValueError: too few"]
    assert shown(training_log, capsys, ["noise", *first, report, *repeated]) == [*first, report]


def test_follow_shows_a_killed_rank(training_log, capsys):
    report = (
        "E1120 14:16:35 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0"
    )
    assert shown(training_log, capsys, ["noise", report, "Traceback (most recent call last):"]) == [report]


@pytest.mark.parametrize("message", ["megatron_2bw: error: 1 microbatch", "pretrain_gpt.py: error: no such flag: --x"])
def test_follow_shows_a_refusal_alone(training_log, capsys, message):
    around = ["usage: pretrain_gpt.py [-h]", "                       [--sequence-parallel]"]
    report = (
        "E1120 14:16:35 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2) local_rank: 0"
    )
    assert shown(training_log, capsys, [*around, message, *around, report, "Traceback (most recent"]) == [message]


def test_follow_goes_on_to_the_end_of_the_job(root, tmp_path):
    """A signal to all processes is for the ranks, which may save now; and whatever they print, none fails to."""
    log = tmp_path / "train.log"
    command = [sys.executable, root / "scripts/training_log.py", "follow", log]
    ascii_alone = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ascii_alone) as following:
        following.stdin.write("".join(lines()[:3]).encode())
        following.stdin.flush()
        assert b"iteration  1/30" in following.stdout.readline()  # It has begun.
        for number in (signal.SIGINT, signal.SIGTERM):
            following.send_signal(number)
        time.sleep(0.2)
        traceback = "Traceback (most recent call last):\n  \u2014\nOSError: \u2014\n".encode()
        output, _ = following.communicate(b"torn \xe2\x80\n" + lines()[-2].encode() + traceback, timeout=20)
    assert following.returncode == 0
    assert b"validation loss 3.1000" in output
    assert "torn" in log.read_text(encoding="utf-8")


def test_a_run_too_short_for_a_bubble_has_none(training_log):
    trace = {"otherData": TRACE["otherData"] | {"bubble": 0.0, "batches": 3}}
    rendered = training_log.render(training_log.summarize(lines()[:5], trace), {})
    assert "0.0%" not in rendered
    assert "not measured, 3 batches" in rendered
