"""Training jobs that are all alive at once, of which one at a time is let run.

A shared machine drifts within seconds by more than the differences looked for. Jobs that take turns every few
iterations meet the same moments: what is compared is never further apart than one turn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from megatron_2bw.planner.measure.torchrun import LOGGED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0
_TAIL_LINES = 60


class Job:
    """One training run of several ranks, stopped but for its turns.

    Args:
        script: the training script.
        arguments: Megatron's and ours; ``{trace}`` stands for the file of the trace.
        ranks: one process each, one thread per process.
    """

    def __init__(self, script: Path, arguments: list[str], *, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.trace = Path(self._folder.name) / "trace.json"
        self._logged: SimpleQueue[tuple[int, float]] = SimpleQueue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._done = 0
        arguments = [argument.replace("{trace}", str(self.trace)) for argument in arguments]
        port = str(_free_port())
        self._processes = [self._start([str(script), *arguments], rank, ranks, port) for rank in range(ranks)]
        for process in self._processes:
            threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def turn_s(self, warm: int, measured: int) -> float:
        """Run ``warm`` iterations, then ``measured``; the mean seconds of the latter.

        What a log line says is counted if the line covers no iteration before or within the warm ones:
        the first line of a turn covers the pause.

        Raises:
            RuntimeError: the job has ended or hangs; with the end of its output.
        """
        start, counted = self._done, []
        self._signal(signal.SIGCONT)
        while sum(iterations for iterations, _ in counted) < measured:
            done, ms = self._next()
            if self._done >= start + warm:
                counted.append((done - self._done, ms))
            self._done = done
        self._signal(signal.SIGSTOP)
        return sum(iterations * ms for iterations, ms in counted) / sum(iterations for iterations, _ in counted) / 1000

    def finish(self) -> None:
        """Run to the end.

        Raises:
            RuntimeError: a rank failed.
        """
        self._signal(signal.SIGCONT)
        codes = [process.wait(TIMEOUT_S) for process in self._processes]
        if any(codes):
            raise RuntimeError(f"the job failed:\n{self._end()}")

    def close(self) -> None:
        """End it at once, if it still runs."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._folder.cleanup()

    def _start(self, arguments: list[str], rank: int, ranks: int, port: str) -> subprocess.Popen[str]:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "megatron_2bw", *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _next(self) -> tuple[int, float]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(Empty):
                return self._logged.get(timeout=1.0)
            if any(process.poll() for process in self._processes):
                raise RuntimeError(f"the job failed:\n{self._end()}")
        raise RuntimeError(f"no log line within {TIMEOUT_S:.0f} s:\n{self._end()}")

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._tail.append(line)
            found = LOGGED.search(line)
            if found:
                self._logged.put((int(found[1]), float(found[2])))

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _end(self) -> str:
        return "".join(self._tail)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
