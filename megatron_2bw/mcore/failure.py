"""How a rank ends when its script fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist

from megatron_2bw.runtime.errors import PeerLostError, lost_in
from megatron_2bw.runtime.links import backend_of

_POLL_S = 0.2
_RECORDED_IN = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_RECORDING_S = 10.0
"""Torch's monitor looks every second whether it is to write what was recorded."""
_ending = threading.RLock()
"""Hooks may be chained."""


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
        if not active:
            previous(kind, error, trace)
            return
        _ending.acquire()  # Another thread that fails, too, waits here for the end.
        previous(kind, error, trace)
        is_from_keyboard = isinstance(error, KeyboardInterrupt)
        if not is_from_keyboard:
            rank = os.environ.get("RANK", "0")
            print(f"megatron_2bw: rank {rank} failed with the error above, {where()}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Megatron starts some to save, and its data loader others; nobody else ends them, and they may ignore SIGTERM.
        for child in multiprocessing.active_children():
            child.kill()
        if is_from_keyboard:  # As Python ends, and so shells know.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(1)

    def undo() -> None:
        nonlocal active
        active = False
        if sys.excepthook is end:
            sys.excepthook = previous

    sys.excepthook = end
    return undo


def end_at_once_where_nccl_fails(waiting: weakref.WeakMethod) -> Callable[[], None]:
    """Look after NCCL's groups, and fail with a `PeerLostError` when one of them does; returns what ends this.

    No wait raises there, as it is the device that waits. Torch's watchdog notes that a peer is gone or too late, gives
    all ranks a minute to write down what they did, and aborts the process, without a word about stages and actions.
    That minute is not waited for, but for some seconds of it where Megatron was given a place for what they did
    (``--flight-recorder-dump-path``).

    Args:
        waiting: says what this rank waits for, by the group that has failed; when its object is gone, so is the watch.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S) and waiting() is not None:
            failure = nccl_failure()
            if failure is not None and not ended.is_set() and (says := waiting()) is not None:
                error = PeerLostError(lost_in(says(failure[0]), failure[1]))
                if any(name in os.environ for name in _RECORDED_IN):
                    print(f"megatron_2bw: {error}", file=sys.stderr, flush=True)
                    ended.wait(_RECORDING_S)
                sys.excepthook(type(error), error, None)
                os._exit(1)  # If another hook is in the place of ours.

    if has_nccl():
        threading.Thread(target=watch, name="2bw failures", daemon=True).start()
    return ended.set


def has_nccl() -> bool:
    """Whether there may be groups of it."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def nccl_failure() -> tuple[dist.ProcessGroup, str] | None:
    """The first group that has failed, and what torch's watchdog has noted."""
    for group in list(dist.distributed_c10d._world.pg_map):
        # One that is being destroyed, or that torch wraps to debug it, may not answer.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            if backend_of(group, "cuda") == "nccl":
                error = group._get_backend(torch.device("cuda")).get_error()
                if error.name != "SUCCESS":
                    return group, f"NCCL, {group.group_desc}: {error.name}"
    return None
