"""Jobs on this machine, one process per rank."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.specs.model import Model

LOGGED = re.compile(r"iteration\s+(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
"""Iteration and milliseconds, in a line of Megatron's log."""
_TAIL_LINES = 30
_END_OF_OUTPUT = re.compile(r"torch\.distributed\.elastic|elastic/multiprocessing/api\.py")
"""What torchrun itself says once a rank has failed; the reason stands before."""


def random_data(model: Model) -> list[str]:
    """Megatron's flags of a run without files."""
    return ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size)]


def gpus_here() -> list[str]:
    """What the GPUs of this machine are called that a run would see; none where torch sees none."""
    code = "import torch; print(*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())), sep='\\n')"
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    return [name for name in found.stdout.splitlines() if name]


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
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | os.environ  # Megatron asks for it with tensor parallelism.
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    ended = False
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with _exit_when_terminated(), subprocess.Popen(command, env=environment, **pipe) as job:
        try:
            for line in job.stdout:
                ended = ended or _END_OF_OUTPUT.search(line) is not None
                if not ended:
                    tail.append(line)
                yield line.rstrip("\n")
        except BaseException:  # Nobody reads on: torchrun ends its ranks when it is told to.
            job.terminate()
            job.wait()
            raise
    if job.returncode:
        raise PlanError(f"{what} failed on this machine; the end of its output:\n{''.join(tail).rstrip()}")


@contextlib.contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """By an exception, after which a job is ended; the signal itself would leave it running."""
    try:
        before = signal.signal(signal.SIGTERM, _exit)
    except ValueError:  # Only a process's first thread hears of signals.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: Any) -> NoReturn:
    sys.exit(128 + number)
