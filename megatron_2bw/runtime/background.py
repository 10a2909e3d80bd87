"""A chain of reductions that runs beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue

import torch

from megatron_2bw.runtime.errors import PeerLostError

_GRACE_S = 5.0
"""A collective that fails at its own timeout says which it is: it is given the time to."""


class Background:
    """Runs functions one after the other on one thread, each when the one before it is done.

    Blocking collectives in it wait for other ranks while this rank's computation, and its blocking
    receives, go on: the next link of a chain never waits for the main thread to look.

    On a GPU the work has a stream of its own. Collectives of the device do not block the host there, and
    must be enqueued in one order on all ranks: ``enqueue`` does so in the caller's thread. Whatever
    reads a result on the host belongs into ``submit``.

    The thread is a daemon: a rank that fails must end, not wait for a reduction with its peers.

    Args:
        device: where the work runs.
        name: of the thread.
        timeout_s: of the collectives in the work; ``result`` waits a little longer. None for as long as it takes.
    """

    def __init__(self, device: torch.device, name: str, timeout_s: float | None = None) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Of what the thread runs: small kernels, which an update waits for and long ones would keep waiting.
        self._beside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._queue: SimpleQueue[tuple[Future, Callable[[], object], torch.cuda.Event | None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], object]) -> Future:
        """Run ``function`` on the thread, after all work given so far, here and on the caller's stream."""
        future: Future = Future()
        ready = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            ready = self._stream.record_event(torch.cuda.Event(blocking=True))  # The thread gives its core away.
        self._queue.put((future, function, ready))
        return future

    def enqueue(self, function: Callable[[], object]) -> Future:
        """The same for a function that on a GPU only enqueues work: there it runs at once, in this thread.

        Collectives over gloo, of tensors on a GPU, do more than that: they wait for the other ranks here.
        """
        if self._stream is None:
            return self.submit(function)
        future: Future = Future()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            value = function()
        future.set_result((value, self._stream.record_event()))
        return future

    def result(self, future: Future) -> object:
        """Wait for ``future``; what it wrote on the GPU is visible to the caller's stream.

        Raises:
            PeerLostError: it is not there in time, though every collective in it has a timeout of its own.
            Exception: whatever the function raised.
        """
        if not wait([future], None if self._timeout_s is None else self._timeout_s + _GRACE_S).done:
            raise PeerLostError(f"not complete after {self._timeout_s:.0f} s: this rank or a peer hangs in it")
        value, done = future.result()
        if done is not None:  # Not the whole stream: the next link may wait for a rank that waits for this one.
            torch.cuda.current_stream(self._device).wait_event(done)
        return value

    def close(self) -> None:
        """End the thread, after all work given so far."""
        self._queue.put(None)

    def _work(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One function; False at the end. What it held is let go of before the next is waited for."""
        work = self._queue.get()
        if work is None:
            return False
        future, function, ready = work
        try:
            if ready is None:
                with torch.no_grad():
                    future.set_result((function(), None))
                return True
            torch.cuda.set_device(self._beside.device)  # Each thread has its own.
            # On the host: with one hardware queue, a kernel that waits there holds up the computation.
            ready.synchronize()
            with torch.no_grad(), torch.cuda.stream(self._beside):
                value = function()
            future.set_result((value, self._beside.record_event()))
        except BaseException as error:  # Raised again in the thread that waits for the result.
            future.set_exception(error)
        return True
