"""Ranks that die or hang where no exception is raised."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from .case import Case
from .faults import before, in_call, kill_process
from .harness import Ended

WOKE_UP = 7
"""Exit code of a rank that hung for twice the timeout: nobody can be left to wait for it."""
PLACE = re.compile(
    r"stage (\d): (\S+ \(batches counted from the start of the run\)|between the calls of batches \d+ and \d+)"
)
"""The second is where Megatron adds up the losses of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How a rank is lost."""

    rank: int
    kind: str
    """killed or hanging."""
    place: str
    """forward, or reduction: in the background, before it meets the other ranks."""
    call: int
    """The n-th forward, or link of the chain of reductions, of that rank, from 0."""
    timeout_s: float = 0.0
    """Of a hanging rank: how long the others wait for it."""


def main(case: Case, rank: int, port: int, folder: Path, *, loss: Loss) -> None:
    """Run ``case`` as ``rank``, which is lost if it is the one."""
    from .worker import install, set_environment, train

    set_environment(rank, case.ranks, port)
    if loss.place == "forward" and loss.timeout_s:
        after_init = "--distributed-timeout-seconds-after-init", f"{loss.timeout_s:.0f}"
        case = replace(case, flags=(*case.flags, *after_init))
    install(case)
    if loss.place == "reduction":  # What waits for this rank's own background knows the first timeout only.
        from megatron_2bw.mcore.pipeline import Pipeline

        Pipeline.__init__ = _with_timeout(Pipeline.__init__, timedelta(seconds=loss.timeout_s))
    if rank == loss.rank:
        _prepare(loss)
    train(case, rank, folder)


def _prepare(loss: Loss) -> None:
    def hang() -> None:
        time.sleep(2 * loss.timeout_s)
        os._exit(WOKE_UP)

    strike = in_call(loss.call, kill_process if loss.kind == "killed" else hang)
    if loss.place == "forward":
        from megatron_2bw.mcore.stages.stage import MegatronStage

        MegatronStage.forward = before(MegatronStage.forward, strike)
    else:
        from megatron_2bw.runtime.background import Background

        submit = Background.submit
        Background.submit = lambda self, function: submit(self, before(function, strike))


def _with_timeout(initialize: Callable[..., None], timeout: timedelta) -> Callable[..., None]:
    def wrapper(self: Any, *args: Any, **keywords: Any) -> None:
        initialize(self, *args, **(keywords | {"timeout": timeout}))

    return wrapper


def assert_places(ended: Ended, ranks: set[int], stages: int) -> dict[int, str]:
    """What each of ``ranks`` says it was doing, at its own stage."""
    replicas = len(ended.outputs) // stages
    places = {}
    for rank in ranks:
        lines = [
            line for line in ended.outputs[rank].splitlines() if f"rank {rank} failed with the error above" in line
        ]
        assert len(lines) == 1, ended.tails()
        found = PLACE.search(lines[0])
        assert found is not None, lines
        assert int(found[1]) == rank // replicas
        places[rank] = found[2]
    return places
