"""How a rank ends when its script fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType


def end_at_once_on_errors() -> Callable[[], None]:
    """After an uncaught exception, print it and end the process; returns what undoes this.

    Normal shutdown would wait for threads and process groups that wait for this rank, and the other
    ranks learn of the failure only when it is gone.
    """
    previous = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if isinstance(error, KeyboardInterrupt):
            return
        print(f"megatron_2bw: rank {os.environ.get('RANK', '0')} failed with the error above", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    def undo() -> None:
        if sys.excepthook is end:
            sys.excepthook = previous

    sys.excepthook = end
    return undo
