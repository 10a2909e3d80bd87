"""Things that go wrong, or slowly, on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .case import Case, Fault


def before_forward(case: Case, rank: int, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """``forward_step`` with the faults of ``rank`` that strike before one of its training forwards."""
    faults = {fault.call: fault for fault in case.faults if fault.rank == rank and fault.kind in _AT_FORWARD}
    calls = 0

    def step(data_iterator: Any, model: Any) -> Any:
        nonlocal calls
        if model.training:
            fault = faults.get(calls)
            calls += 1
            if fault is not None:
                _AT_FORWARD[fault.kind](fault)
        return forward_step(data_iterator, model)

    return step


def inject(case: Case, rank: int) -> None:
    """Put the other faults of ``rank`` in place."""
    for fault in case.faults:
        if fault.rank == rank and fault.kind not in _AT_FORWARD:
            _AT_START[fault.kind](fault)


def _sleep(fault: Fault) -> None:
    time.sleep(fault.seconds)


def _raise(fault: Fault) -> None:
    raise RuntimeError(fault.text)


_AT_FORWARD: dict[str, Callable[[Fault], None]] = {"sleep before forward": _sleep, "raise in forward": _raise}
_AT_START: dict[str, Callable[[Fault], None]] = {}
