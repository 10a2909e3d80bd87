"""scripts/gpu_report.py: that what it starts on GPUs can be started."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import gpu_report
import planner_gpu
import pytest
import report
import schedules

from megatron_2bw.planner.specs.layout import Layout


@pytest.fixture
def in_background() -> Iterator[None]:
    """As a shell starts it with ``&``: interrupts are ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def run(command: tuple[str, ...], limit_s: float = 60.0) -> tuple[int, str]:
    """Exit code and what it says."""
    said: list[str] = []
    return gpu_report._run(command, limit_s, said.append), "\n".join(said)


def test_a_checkout_of_megatron_has_a_version(monkeypatch) -> None:
    """One on the path has no metadata."""
    from megatron.core.package_info import __version__

    known = report.version

    def version(name: str) -> str:
        if name == "megatron-core":
            raise report.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(report, "version", version)
    assert f", megatron-core {__version__};" in report.heading()[1]


def test_every_gpu_test_is_run_once() -> None:
    files = {str(path.relative_to(gpu_report.ROOT)) for path in gpu_report.ROOT.glob("tests/gpu/test_*.py")}
    given = [[*words, "--collect-only", "-q", "-q", "-n", "0"] for _, _, *words in gpu_report.TESTS]
    # In one process, which imports torch once.
    program = f"import pytest\nfor words in {given}:\n    assert pytest.main(words) == 0\n    print('end')"
    code, said = run(("-c", program))
    assert code == 0, said
    *each, _ = said.split("\nend")
    collected = [{line.partition("::")[0] for line in one.splitlines() if "::" in line} for one in each]
    assert sorted(chain.from_iterable(collected)) == sorted(files)


def test_a_command_that_hangs_leaves_time_for_the_next() -> None:
    tests = sum(gpu_report.USUAL_S[command] for command in gpu_report.TESTS)
    for benchmark in (gpu_report.PLANNER, gpu_report.SCHEDULES):
        assert tests + gpu_report.USUAL_S[benchmark] <= gpu_report.LIMIT_S - 30.0


def test_the_benchmarks_take_their_arguments() -> None:
    assert gpu_report.ROOT / gpu_report.SCHEDULES[0] == Path(schedules.__file__)
    assert schedules.parser().parse_args(gpu_report.SCHEDULES[1:]).part == "gpt"
    assert gpu_report.ROOT / gpu_report.PLANNER[0] == Path(planner_gpu.__file__)


@pytest.mark.parametrize(
    ("device", "memory_gb", "gpu"),
    [
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32gb"),
    ],
)
def test_a_gpu_has_the_data_sheet_of_its_name_and_memory(device: str, memory_gb: float, gpu: str) -> None:
    cluster = planner_gpu.of_data_sheet(device, memory_gb)
    assert (cluster.gpu.name, cluster.gpus) == (gpu, 1)
    assert planner_gpu.of_data_sheet("another", memory_gb) is None


def test_a_run_is_measured_by_its_log_without_the_first_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [f" iteration {n}/ 12 | elapsed time per iteration (ms): 9000.0 |" for n in (1, 3)]
    said += ["[Rank 0] (after 3 iterations) memory (MB) | allocated: 2.00 | max allocated: 4.00 | reserved: 5.00"]
    said += [
        f" iteration {n}/ 12 | elapsed time per iteration (ms): {ms} |" for n, ms in ((6, 90.0), (9, 110.0), (12, 95.0))
    ]
    monkeypatch.setattr(planner_gpu, "lines_of", lambda words, **_: said)
    layout = Layout(schedule="megatron", pipeline=1, data=1, microbatch=1, global_batch=16)
    assert planner_gpu.ran(planner_gpu.MODEL, layout, []) == (0.095, 4.0 * 2**20)


def test_each_line_is_written_as_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "gpu.txt"
    first = ("-c", "print('one'); exit(3)")
    second = (
        "-c",
        f"print('two', flush=True); import time; time.sleep(1); print(open({str(report)!r}).read().upper()); exit(4)",
    )
    monkeypatch.setattr(gpu_report, "heading", lambda *packages: ["today"])
    monkeypatch.setattr(gpu_report, "TESTS", (first,))
    monkeypatch.setattr(gpu_report, "PLANNER", second)
    monkeypatch.setattr(gpu_report, "USUAL_S", {second: 60.0})
    monkeypatch.setattr(gpu_report.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--output", str(report)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert gpu_report.main() == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    so_far, _, rest = re.sub(r"(?i)took \d s\n", "", report.read_text()).partition("TODAY")
    ran_first, _, ran_second = so_far.partition("\n\n$ python -c print('two'")
    assert ran_first.splitlines() == ["today", "", "$ python -c print('one'); exit(3)", "", "one"]
    assert ran_second.endswith("\n\ntwo\n")
    assert f"TODAY{rest}" == f"{so_far.upper()}\n"


@pytest.mark.parametrize(("command", "code"), [(("-c", "print(1)"), 0), (("-c", "print(1); exit(3)"), 3)])
def test_what_a_command_says_and_how_it_ends(command: tuple[str, ...], code: int) -> None:
    assert run(command) == (code, "1")


@pytest.mark.usefixtures("in_background")
def test_what_takes_too_long_is_stopped_and_says_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import time\ndef test_a():\n    assert 1 == 2\ndef test_b():\n    time.sleep(60)\n")
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", "-n", "2", str(file))
    code, said = run(command, 10.0)
    assert code == 1
    assert "assert 1 == 2" in said
    assert said.endswith("stopped: not done after 10 s")


def test_what_is_no_text_is_read(tmp_path: Path) -> None:
    """Nobody reading, the rest of it would fill the pipe."""
    code, said = run(("-c", "import sys; sys.stdout.buffer.write(b'\\xff' + b'a' * 200_000 + b'\\nb\\n')"), 20.0)
    assert (code, said[0], said[-2:]) == (0, "\ufffd", "\nb")


def test_what_is_left_behind_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "TO_END_S", 0.5)
    finished = tmp_path / "finished"
    left = f"import pathlib, time; time.sleep(20); pathlib.Path({str(finished)!r}).touch()"
    leaving = f"import subprocess, sys; print(1, flush=True); subprocess.Popen([sys.executable, '-c', {left!r}])"
    assert run(("-c", leaving)) == (0, "1")
    assert not finished.exists()


@pytest.mark.usefixtures("in_background")
def test_an_interrupt_is_passed_on(tmp_path: Path) -> None:
    """pytest then ends the ranks, which have sessions of their own."""
    started, ended = tmp_path / "started", tmp_path / "ended"
    waiting = (
        f"import pathlib, time\ntry: pathlib.Path({str(started)!r}).touch(); time.sleep(60)\n"
        f"finally: pathlib.Path({str(ended)!r}).touch()"
    )

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(("-c", waiting))
    assert ended.exists()


def test_what_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "TO_END_S", 0.5)
    finished = tmp_path / "finished"
    # What it has started is deaf, too, and keeps the pipe open.
    started = f"import pathlib, time; time.sleep(20); pathlib.Path({str(finished)!r}).touch()"
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(1, flush=True); "
        f"subprocess.run([sys.executable, '-c', {started!r}])"
    )
    code, said = run(("-c", deaf), 2.0)
    assert code == 1
    assert said.startswith("1\nstopped")
    assert not finished.exists()


def test_a_benchmark_says_each_line_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "benchmark.txt"

    def lines() -> Iterator[str]:
        yield "one"
        assert path.read_text() == capsys.readouterr().out == "one\n"
        yield "two"

    report.put_each(lines(), path)
    assert path.read_text() == "one\ntwo\n"
