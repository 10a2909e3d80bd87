"""How a rank ends when its script fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import TracebackType


def end_at_once_on_errors(where: Callable[[], str]) -> Callable[[], None]:
    """After an uncaught exception, print it and end the process; returns what undoes this.

    Normal shutdown would wait for threads and process groups that wait for this rank, and the other
    ranks learn of the failure only when it is gone.

    Args:
        where: says what this rank was doing, for a wait in Megatron that does not say it.
    """
    previous = sys.excepthook
    active = True

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not active:
            return
        if isinstance(error, KeyboardInterrupt):
            return
        rank = os.environ.get("RANK", "0")
        print(f"megatron_2bw: rank {rank} failed with the error above, {where()}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        for child in multiprocessing.active_children():  # Megatron starts some to save; nobody else ends them.
            child.kill()
        os._exit(1)

    def undo() -> None:
        nonlocal active
        active = False
        if sys.excepthook is end:
            sys.excepthook = previous

    sys.excepthook = end
    return undo
