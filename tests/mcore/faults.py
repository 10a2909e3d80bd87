"""Things that go wrong, or slowly, on one rank."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from .case import Case, Fault

INFINITE_GRADIENT = "infinite gradient"
sleeps: list[tuple[float, float]] = []
"""Start and end of every sleep of this rank, on the clock of the executor's recorder."""


def before_install(case: Case, rank: int) -> None:
    """Faults that the extension must find when it is installed."""
    for fault in _of(case, rank, "missing symbol"):
        module, _, name = fault.text.rpartition(".")
        delattr(importlib.import_module(module), name)
    for fault in _of(case, rank, "changed symbol"):
        module, _, name = fault.text.rpartition(".")
        setattr(importlib.import_module(module), name, lambda: None)


def before_training(case: Case, rank: int) -> None:
    """Faults inside the extension."""
    if _of(case, rank, "jitter"):
        from megatron_2bw.mcore.stages.stage import MegatronStage

        MegatronStage.backward = _after(MegatronStage.backward, _counted(case, rank))
    if _of(case, rank, "sleep before reduction"):
        from megatron_2bw.mcore.stages.stage import DelayedStage

        DelayedStage.reduce_start = _before_first_link(
            DelayedStage.reduce_start, _counted(case, rank, "sleep before reduction")
        )
    if _of(case, rank, "blocking step"):
        from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer

        DelayedOptimizer.step = _blocking(DelayedOptimizer.step)


def before_forward(case: Case, rank: int, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """``forward_step`` with the faults of ``rank`` that strike before one of its training forwards."""
    strike = _counted(case, rank, "sleep before forward", "raise in forward", "signal before forward")
    infinite = {fault.call: fault.text for fault in _of(case, rank, INFINITE_GRADIENT)}
    calls = itertools.count()

    def step(data_iterator: Any, model: Any) -> Any:
        if not model.training:
            return forward_step(data_iterator, model)
        strike()
        output, loss = forward_step(data_iterator, model)
        weight = infinite.get(next(calls))
        if weight is not None:
            struck = output if not weight else _nothing_of(model, weight)
            struck.register_hook(lambda gradient: gradient + math.inf)
            output = output + struck if weight else output
        return output, loss

    return step


def _nothing_of(model: Any, name: str) -> torch.Tensor:
    """Zero, whose gradient is that of one weight alone."""
    (weight,) = (weight for its_name, weight in model.named_parameters() if its_name.endswith(name))
    return 0 * weight.sum()


def before(function: Callable[..., Any], strike: Callable[[], None]) -> Callable[..., Any]:
    """``function``, with ``strike`` before every call."""

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        strike()
        return function(*args, **keywords)

    return wrapper


def in_call(number: int, strike: Callable[[], None]) -> Callable[[], None]:
    """``strike``, in the call of that number, from 0, and in no other."""
    calls = itertools.count()
    return lambda: strike() if next(calls) == number else None


def kill_process() -> None:
    """End this process at once, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def _of(case: Case, rank: int, *kinds: str) -> list[Fault]:
    return [fault for fault in case.faults if fault.rank == rank and fault.kind in kinds]


def _counted(case: Case, rank: int, *kinds: str) -> Callable[[], None]:
    """A function that strikes in the call that a fault names, and sleeps a little in each for jitter."""
    faults = {fault.call: fault for fault in _of(case, rank, *kinds)}
    jitter_s = sum(fault.seconds for fault in _of(case, rank, "jitter"))
    draw = random.Random(rank).random
    calls = 0

    def strike() -> None:
        nonlocal calls
        fault = faults.get(calls)
        calls += 1
        if jitter_s:
            time.sleep(jitter_s * draw())
        if fault is None:
            return
        if fault.kind == "raise in forward":
            raise RuntimeError(fault.text)
        if fault.kind == "signal before forward":
            os.kill(os.getpid(), signal.SIGTERM)
        start_s = time.perf_counter()
        time.sleep(fault.seconds)
        sleeps.append((start_s, time.perf_counter()))

    return strike


def _after(function: Callable[..., Any], strike: Callable[[], None]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        strike()
        return result

    return wrapper


def _before_first_link(reduce_start: Callable[..., Any], strike: Callable[[], None]) -> Callable[..., Any]:
    """Strikes when a batch's last backward is done and sent, once per batch."""

    def wrapper(self: Any, action: Any) -> Any:
        if action.reduction == "grads":
            strike()
        return reduce_start(self, action)

    return wrapper


def _blocking(step: Callable[..., Any]) -> Callable[..., Any]:
    """What a plain optimizer does: update at the end of the batch, waiting for all stages."""

    def wrapper(self: Any) -> Any:
        self.settle()
        return step(self)

    return wrapper
