"""The end of a process whose collectives run on gloo's own threads."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_LOOK_AFTER_S = 0.01
"""The interpreter is free for so long, and a thread that waits for it looks every 5 ms."""
_GIVE_UP_AFTER_S = 5.0


@functools.cache
def finish_at_exit() -> None:
    """Have `finish` called when the process exits, once; for whoever makes groups of gloo."""
    atexit.register(finish)


def finish() -> None:
    """Wait until gloo's threads have let go of the tensors of the last collectives.

    A collective is complete for its caller a moment before the thread that carried it out drops its tensors, for
    which the thread needs the interpreter. One that asks a finalizing interpreter for it is ended by Python and takes
    the process with it: "terminate called without an active exception", after a training that went well (pytorch
    issue 190489, not solved in 2.13; destroying the process groups does not end the threads while Megatron's modules
    refer to them).

    What sleeps, and has slept all the time while the interpreter was free, waits for something else. So does a
    collective whose peer is gone: nothing here waits for other ranks. One whose peer answers just then still aborts.
    """
    give_up_s = time.monotonic() + _GIVE_UP_AFTER_S
    before = _states()
    while time.monotonic() < give_up_s:
        time.sleep(_LOOK_AFTER_S)
        now = _states()
        if now == before and all("(sleeping)" in state for state in now):
            return
        before = now


def _states() -> list[str]:
    """Of each of the threads, what it does and how often it was switched to; nothing on other systems than Linux."""
    states = []
    for task in sorted(_TASKS.glob("*")):
        with contextlib.suppress(OSError):  # It has ended.
            name, *lines = (task / "status").read_text(errors="replace").splitlines()
            if name.split()[-1] == _NAME:
                states.append(" ".join(line for line in lines if line.startswith("State") or "ctxt_switches" in line))
    return states
