"""CUDA streams and events on a CPU, where every operation is complete when it returns."""

from __future__ import annotations

import time

import torch


class CpuEvent:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._recorded_s = 0.0

    def record(self, stream: object = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds between the two records, as in torch."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


class CpuStream:
    """Stands in for ``torch.cuda.Stream``."""

    device = torch.device("cpu")

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = CpuEvent() if event is None else event
        event.record()
        return event
