"""Jobs on this machine, one process per rank."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence

from megatron_2bw.planner.errors import PlanError

_TAIL_LINES = 15


def lines_of(words: Sequence[str], *, ranks: int, what: str) -> Iterator[str]:
    """Run ``torchrun --nproc-per-node RANKS WORDS``; yields its output line by line.

    Args:
        words: script or ``-m`` module, and its arguments.
        ranks: processes.
        what: is run, for the error message.

    Raises:
        PlanError: the job failed; with the end of its output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            for line in job.stdout:
                tail.append(line)
                yield line.rstrip("\n")
        except BaseException:  # Nobody reads on: torchrun ends its ranks when it is told to.
            job.terminate()
            raise
    if job.returncode:
        raise PlanError(f"{what} failed on this machine; the end of its output:\n{''.join(tail).rstrip()}")
