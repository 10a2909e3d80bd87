"""Run the GPU tests and a benchmark on the GPUs at hand, within nine minutes, and write a report.

    python scripts/gpu_report.py --output scripts/bench/results/gpu.txt

With one GPU all ranks share it, and what they exchange goes through the host: that shows whether 2BW is right there,
not how fast it is, so the benchmark compares the planner's predictions with runs of one rank. With two or more, one
rank runs on each, and schedules are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import heading, is_installed


def _jobs(most: int) -> int:
    """Tests at a time, each of up to four ranks."""
    return max(1, min(most, (os.cpu_count() or 1) // 4))


ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # A pool of compilers for a few kernels takes longer than these.
}
TO_END_S = 15.0
LIMIT_S = 9 * 60 - 2 * TO_END_S
"""What is stopped then may need so long to end, and what it has said so long to be read."""
PYTEST = (
    *("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", "xdist", "--no-header", "-vv", "-rs"),
    *("--durations", "0", "--durations-min", "5", "--tb", "short"),
)
STREAMS, OVER_NCCL = "tests/gpu/test_streams.py", "tests/gpu/test_over_nccl.py"
TESTS = (
    # What is timed on the GPU has it alone, and the kernels of NCCL hold it while they wait for ranks that share it;
    # the rest is mostly the start of ranks, which cores can share.
    (*PYTEST, STREAMS),
    (*PYTEST, OVER_NCCL, "-n", str(_jobs(2))),
    (*PYTEST, "tests/gpu", "--ignore", STREAMS, "--ignore", OVER_NCCL, "-n", str(_jobs(4))),
)
SCHEDULES = ("scripts/bench/schedules.py", "--rounds", "3", "--part", "gpt", "--microbatches", "4")
PLANNER = ("scripts/bench/planner_gpu.py",)
USUAL_S = {TESTS[0]: 15.0, PLANNER: 180.0, SCHEDULES: 180.0, TESTS[1]: 160.0, TESTS[2]: 120.0}
"""What each takes on an H200, and so what is left to it: one that hangs must not keep the rest from being seen. The
tests come last, which say each result as it comes; a benchmark that is stopped loses a row of its table."""


def main() -> int:
    """Run what the machine can show; the exit code is that of what failed first, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the report here, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; scripts/test.sh runs what a CPU can show")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Stops what runs first.
    end_s = time.monotonic() + LIMIT_S
    code = 0
    # Line by line: who stops this script keeps what it has said.
    with (options.output or Path(os.devnull)).open("w") as file:

        def say(text: str) -> None:
            for stream in (sys.stdout, file):
                print(text, file=stream, flush=True)

        say("\n".join(heading(*filter(is_installed, ("transformer-engine", "apex")))))
        alone, *shared = TESTS
        commands = (alone, SCHEDULES if torch.cuda.device_count() > 1 else PLANNER, *shared)
        for index, command in enumerate(commands):
            say(f"\n$ python {' '.join(command)}\n")
            start_s = time.monotonic()
            its_code = _run(command, end_s - start_s - sum(USUAL_S[later] for later in commands[index + 1 :]), say)
            say(f"took {time.monotonic() - start_s:.0f} s")
            code = code or its_code
    return code


def _run(command: tuple[str, ...], limit_s: float, say: Callable[[str], None]) -> int:
    """Say what it says; returns its exit code. What is not done in time is stopped."""
    # A shell starts what runs in the background with this signal ignored, and what that starts would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # A group of its own: a signal reaches pytest's workers, too, as in a terminal.
    )
    # A thread reads, so that what is said while it ends is seen, too, and only this one stops it.
    reader = threading.Thread(target=lambda: [say(line.rstrip("\n")) for line in process.stdout], daemon=True)
    reader.start()
    is_stopped = False
    try:
        process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        is_stopped = True
        _stop(process)
    except BaseException:
        _stop(process)
        raise
    finally:
        reader.join(TO_END_S)  # Not longer: what left its group may keep the pipe open.
    if is_stopped:
        say(f"stopped: not done after {limit_s:.0f} s")
    return 1 if is_stopped else process.returncode


def _stop(process: subprocess.Popen[str]) -> None:
    """End a process and its group.

    Ranks have sessions of their own: pytest ends them when it is interrupted, and says what has failed so far.
    """
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(TO_END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # All that write to the pipe: it is read to its end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
