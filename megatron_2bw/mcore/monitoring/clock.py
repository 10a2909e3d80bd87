"""One clock for the ranks of a pipeline, which may be on different machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_2bw.mcore.groups import TransferGroups, device_of

_EXCHANGES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Reading(NamedTuple):
    """What the first stage's clock shows, beside this rank's."""

    here_s: float
    first_s: float


class SharedClock:
    """Turns times of this rank into times of the pipeline's first stage.

    Ranks of one machine share ``time.perf_counter``. Others exchange readings with the first stage, now and when
    times are asked for, as NTP does (RFC 5905, section 8): of many exchanges the fastest one, whose error is at most
    half its round trip. In between, drift is taken to be even.

    Args:
        groups: of the pipeline. Collective over its ranks.
    """

    def __init__(self, groups: TransferGroups) -> None:
        self._groups = groups
        ids: list[str | None] = [None] * len(groups.ranks)
        dist.all_gather_object(ids, _BOOT_ID.read_text() if _BOOT_ID.exists() else "", group=groups.forward)
        self._elsewhere = [stage for stage, boot_id in enumerate(ids) if boot_id != ids[0]]
        self._start = self._read()

    def conversion(self) -> Callable[[float], float]:
        """From seconds of this rank's clock to those of the first stage's. Collective over the pipeline's ranks."""
        return converter(self._start, self._read())

    def _read(self) -> Reading:
        """Of this rank; while a stage exchanges readings with the first one, the others pass on."""
        groups, device = self._groups, device_of(self._groups.forward)
        here = dist.get_rank()
        now_s = time.perf_counter()
        reading = Reading(now_s, now_s)
        for stage in self._elsewhere:
            if here == groups.ranks[stage]:
                reading = _ask(groups.ranks[0], groups.forward, device)
            elif here == groups.ranks[0]:
                _answer(groups.ranks[stage], groups.forward, device)
        return reading


def converter(start: Reading, end: Reading) -> Callable[[float], float]:
    """The line through two readings; one reading, if they are the same moment.

    >>> converter(Reading(0.0, 10.0), Reading(4.0, 18.0))(2.0)
    14.0
    """
    elapsed_s = end.here_s - start.here_s
    rate = (end.first_s - start.first_s) / elapsed_s if elapsed_s > 0 else 1.0
    return lambda time_s: start.first_s + (time_s - start.here_s) * rate


def fastest(exchanges: list[tuple[float, float, float]]) -> Reading:
    """Of exchanges (asked, answer of the other clock, received): the reading with the least error.

    >>> fastest([(0.0, 7.0, 4.0), (10.0, 16.5, 11.0)])
    Reading(here_s=10.5, first_s=16.5)
    """
    asked_s, answer_s, received_s = min(exchanges, key=lambda times: times[2] - times[0])
    return Reading((asked_s + received_s) / 2, answer_s)


def _ask(first: int, group: dist.ProcessGroup, device: torch.device) -> Reading:
    exchanges = []
    for _ in range(_EXCHANGES):
        message = torch.zeros(1, dtype=torch.float64, device=device)
        asked_s = time.perf_counter()
        dist.send(message, first, group=group)
        dist.recv(message, first, group=group)
        answer_s = message.item()
        exchanges.append((asked_s, answer_s, time.perf_counter()))
    return fastest(exchanges)


def _answer(peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
    for _ in range(_EXCHANGES):
        message = torch.zeros(1, dtype=torch.float64, device=device)
        dist.recv(message, peer, group=group)
        message.item()  # On a GPU: wait until it is there.
        message.fill_(time.perf_counter())
        dist.send(message, peer, group=group)
