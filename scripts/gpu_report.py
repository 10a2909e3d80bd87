"""Run the GPU tests and compare schedules on the GPUs at hand, within nine minutes, and write a report.

    python scripts/gpu_report.py --output scripts/bench/results/gpu.txt

With one GPU all ranks share it and transfers go through the host: that shows whether 2BW is right there, not how
fast it is. With two or more, one rank runs on each over NCCL, and the schedules are compared, too.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from report import heading

ROOT = Path(__file__).resolve().parents[1]
TO_END_S = 15.0
LIMIT_S = 9 * 60 - 2 * TO_END_S
"""Of the tests and the benchmark: either may need as long again to end."""
TESTS = ("-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", "-rs", "--durations", "5", "--tb", "short")
BENCH = ("scripts/bench/schedules.py", "--rounds", "3", "--part", "gpt")


def main() -> int:
    """Run what the machine can show; the exit code is that of what failed first, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the report here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; scripts/test.sh runs what a CPU can show")
    end_s = time.monotonic() + LIMIT_S
    code, tests = _output_of(TESTS, end_s)
    parts = ["\n".join(heading()), f"$ python {' '.join(TESTS)}", tests]
    if torch.cuda.device_count() > 1:
        bench_code, compared = _output_of(BENCH, end_s)
        code = code or bench_code
        parts += [f"$ python {' '.join(BENCH)}", compared]
    report = "\n\n".join(parts) + "\n"
    print(report)
    if options.output is not None:
        options.output.write_text(report)
    return code


def _output_of(command: tuple[str, ...], end_s: float) -> tuple[int, str]:
    """Exit code and output; what is not done in time is stopped, and the report says so."""
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then ends the ranks and says what has failed so far.
            try:
                output, _ = process.communicate(timeout=TO_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            return 1, f"{output.strip()}\nstopped: not done {LIMIT_S:.0f} s after the start"
    return process.returncode, output.strip()


if __name__ == "__main__":
    sys.exit(main())
