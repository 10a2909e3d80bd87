"""An exception on one rank ends the job with that rank's message; nobody hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .case import Case, Fault
from .harness import ENVIRONMENT, import_path, launch
from .worker import through_launcher, write_case

MESSAGE = "the coolant of this test has leaked"
WITHIN_S = 20.0


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_every_rank_ends_by_itself(schedule: str, rank: int, tmp_path: Path) -> None:
    """No launcher kills the others here."""
    fault = Fault(kind="raise in forward", rank=rank, call=13, text=MESSAGE)
    case = Case(schedule=schedule, stages=4, microbatches=4, clip=1.0, faults=(fault,))
    ended = launch(through_launcher, case, case.ranks, tmp_path, timeout_s=WITHIN_S)
    assert ended.exit_codes == [1] * case.ranks, ended.tails()
    assert MESSAGE in ended.outputs[rank]
    assert f"rank {rank} failed" in ended.outputs[rank]
    others = [output for other, output in enumerate(ended.outputs) if other != rank]
    assert all("look for that rank's own error" in output for output in others), ended.tails()


def test_torchrun_ends_with_the_message(tmp_path: Path) -> None:
    fault = Fault(kind="raise in forward", rank=1, call=5, text=MESSAGE)
    case = Case(schedule="2bw", stages=2, microbatches=2, faults=(fault,))
    script = Path(__file__).with_name("script.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "megatron_2bw", script, __package__, write_case(case, tmp_path), tmp_path]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": import_path()}
    ended = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=120.0
    )
    assert ended.returncode != 0
    assert MESSAGE in ended.stderr
    assert "rank 1 failed" in ended.stderr
