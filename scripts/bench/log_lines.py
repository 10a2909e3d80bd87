"""What a log line of every iteration costs under 2BW: the time spent in Megatron's ``training_log``, waiting included.

    python scripts/bench/log_lines.py [--output scripts/bench/results/log_lines.txt]

The difference between two runs of a real GPT, with and without the lines, is smaller than the machine's jitter; see
``schedules.py``. So the same GPT is run once and the function that logs is timed inside it, on every rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

ITERATIONS, WARM = 60, 4


def main() -> None:
    from live_job import Job
    from report import heading, put
    from schedules import GPT, SAMPLES_PER_MICROBATCH, STAGES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [
        *heading("numpy"),
        "",
        f"2bw, PP={STAGES}, m = {options.microbatches}, --log-interval 1, GPT of schedules.py, {ITERATIONS} batches",
        "",
        f"{'rank':>4} {'in training_log, ms: median':>28} {'mean':>6} {'max':>6} {'ms/iteration':>13} {'share':>6}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *(folder, *GPT, "--global-batch-size", str(SAMPLES_PER_MICROBATCH * options.microbatches)),
            *("--train-iters", str(ITERATIONS), "--log-interval", "1", "--pipeline-schedule", "2bw"),
        ]
        job = Job(Path(__file__), arguments, ranks=STAGES)
        try:
            iteration_s = job.turn_s(WARM, ITERATIONS - WARM)
            job.finish()
        finally:
            job.close()
        for rank in range(STAGES):
            spent_s = json.loads((Path(folder) / f"{rank}.json").read_text())[WARM:]
            mean_s = statistics.fmean(spent_s)
            lines.append(
                f"{rank:>4} {1000 * statistics.median(spent_s):>28.2f} {1000 * mean_s:>6.2f} "
                f"{1000 * max(spent_s):>6.1f} {1000 * iteration_s:>13.1f} {mean_s / iteration_s:>6.2%}"
            )
    put(lines, options.output)


def train() -> None:
    """One rank: the example, with every call of ``training_log`` timed into a file in the first argument's folder."""
    from megatron.training import training

    folder, spent_s, original = Path(sys.argv.pop(1)), [], training.training_log

    @functools.wraps(original)
    def timed(*args: object, **keywords: object) -> object:
        start_s = time.perf_counter()
        result = original(*args, **keywords)
        spent_s.append(time.perf_counter() - start_s)
        return result

    training.training_log = timed
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__")
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(spent_s))


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
