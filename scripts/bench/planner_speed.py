"""How long the planner takes from the shell: a trillion parameters on 3,072 GPUs, experts on 2,048, the start alone.

python scripts/bench/planner_speed.py [--repetitions 7] [--output scripts/bench/results/planner_speed.txt]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading, put

COMMANDS = (
    "plan --model gpt-1t --cluster dgx-a100 --nodes 384 --global-batch-size 3072",
    "plan --model mixtral-8x7b --cluster dgx-h100 --nodes 256 --global-batch-size 2048",
    "plan --help",
)


def seconds_of(command: str) -> tuple[float, float]:
    """Wall and processor time of a fresh interpreter that runs ``command``."""
    # An installed package has its bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words = [sys.executable, "-m", "megatron_2bw.cli", *command.split()]
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment)
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [*heading(), "", f"{'megatron-2bw':<86} {'wall/s: median':>15} {'min':>6} {'max':>6} {'processor/s':>12}"]
    for command in COMMANDS:
        seconds_of(command)  # Leaves the bytecode.
        wall_s, busy_s = zip(*(seconds_of(command) for _ in range(options.repetitions)), strict=True)
        lines.append(
            f"{command:<86} {statistics.median(wall_s):>15.2f} {min(wall_s):>6.2f} {max(wall_s):>6.2f} "
            f"{statistics.median(busy_s):>12.2f}"
        )
    put(lines, options.output)


if __name__ == "__main__":
    main()
