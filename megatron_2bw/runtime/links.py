"""Transfers between neighbouring stages, started early and waited for late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_2bw.runtime.errors import needs_peers, place_of
from megatron_2bw.schedule.action import ACTIVATIONS, Action, ActionType

_enable_record_function = getattr(torch._C._autograd, "_enable_record_function", None)


class Lane(NamedTuple):
    """Transfers of one kind in one direction, which have a process group of their own."""

    activations: bool
    """Otherwise their gradients."""
    to_higher_rank: bool


LANES = (Lane(True, True), Lane(False, False))
"""Of a pipeline whose stages are in the order of its ranks."""
ALL_LANES = (*LANES, Lane(True, False), Lane(False, True))
"""Of two pipelines in opposite directions."""


class _Crossing(NamedTuple):
    """One end of a transfer, which few ask to see: its text is made when it is asked for."""

    action: Action
    peer: int
    """Global rank of the other end."""

    def __str__(self) -> str:
        return f"{place_of(self.action)}, with rank {self.peer},"


class _Transfer(NamedTuple):
    """One transfer under way."""

    work: dist.Work
    tensor: torch.Tensor
    crossing: _Crossing
    group: dist.ProcessGroup
    backend: str | None

    def wait(self) -> torch.Tensor:
        with needs_peers(self.crossing):
            if self.backend == "gloo":
                # Its transfers do not know of a timeout that was set after their group was made.
                self.work.wait(self.group._get_backend(torch.device("cpu")).options._timeout)
            else:
                self.work.wait()  # With a timeout, NCCL's would block the host.
        return self.tensor


class _Taken(NamedTuple):
    """A receive that the device waits for; without its tensor, which would stay in memory."""

    done: torch.cuda.Event
    crossing: _Crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What crosses a stage boundary: activations one way, their gradients the other."""

    shape: tuple[int, ...]
    """(sequence, microbatch size, hidden) in elements."""
    dtype: torch.dtype
    device: torch.device


class Links:
    """Sends and receives of one rank, on process groups of their own.

    One group per kind and direction keeps each first-in first-out, and keeps evaluation, which
    uses Megatron's own pipeline group, from meeting a transfer of a batch that runs ahead. NCCL carries
    out in order what one group is told, so that both ways in one group could wait for each other.

    On a GPU nothing inside a call may wait for the whole device: a receive that is posted early may
    depend on what this rank has yet to send.

    Args:
        groups: of the pipeline's ranks, by `Lane`.
        ranks: global rank of each rank of the pipeline.
        device: of what is transferred.
        per_boundary: tensors that may lie between two stages when a call ends.
    """

    def __init__(
        self,
        *,
        groups: Mapping[Lane, dist.ProcessGroup],
        ranks: list[int],
        device: torch.device,
        per_boundary: int = 1,
    ) -> None:
        self._most_sends = per_boundary + 1
        self._groups = groups
        self._backends = {lane: backend_of(group, device.type) for lane, group in groups.items()}
        self._ranks = ranks
        self._rank = ranks.index(dist.get_rank())
        self._receives: dict[Action, _Transfer] = {}
        self._sends: dict[tuple[ActionType, int], deque[_Transfer]] = {}
        self._taken: deque[_Taken] = deque()
        """Over NCCL: receives that may not be complete."""

    def post_receive(self, action: Action, peer: int, boundary: Boundary) -> None:
        """Start receiving into a fresh tensor; ``take`` waits for it."""
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
        lane = Lane(action.type in ACTIVATIONS, peer < self._rank)
        self._receives[action] = self._started(dist.irecv, tensor, action, peer, lane)

    def take(self, receive: Action) -> torch.Tensor:
        """What ``receive`` has brought, once it is here."""
        transfer = self._receives.pop(receive)
        tensor = transfer.wait()
        if transfer.backend == "nccl":
            while self._taken and self._taken[0].done.query():
                self._taken.popleft()
            done = torch.cuda.current_stream(tensor.device).record_event()
            self._taken.append(_Taken(done, transfer.crossing))
        return tensor

    def waiting(self, failed: dist.ProcessGroup) -> str | None:
        """The receive that the device waits for, in words; None if there is none, or ``failed`` is not of transfers."""
        if failed not in self._groups.values():
            return None
        return next((str(taken.crossing) for taken in list(self._taken) if not taken.done.query()), None)

    def send(self, action: Action, peer: int, tensor: torch.Tensor) -> None:
        """Start sending ``tensor``; its memory is held here until a later send to that peer finds this one complete."""
        sends = self._sends.setdefault((action.type, peer), deque())
        while sends and sends[0].work.is_completed():
            sends.popleft()
        lane = Lane(action.type in ACTIVATIONS, self._rank < peer)
        if self._backends[lane] == "gloo":
            # It reports a send complete only to a caller that waits for it.
            while len(sends) >= self._most_sends:
                sends.popleft().wait()
        sends.append(self._started(dist.isend, tensor.detach().contiguous(), action, peer, lane))

    def flush(self) -> None:
        """Wait for every transfer under way and forget what was received but not used."""
        for transfer in self._receives.values():
            transfer.wait()
        self._receives.clear()
        for sends in self._sends.values():
            while sends:
                sends.popleft().wait()

    def _started(
        self, start: Callable[..., dist.Work], tensor: torch.Tensor, action: Action, peer: int, lane: Lane
    ) -> _Transfer:
        group, crossing = self._groups[lane], _Crossing(action, self._ranks[peer])
        with needs_peers(crossing):
            work = _unseen_by_profiler(start, tensor, crossing.peer, group)
        return _Transfer(work, tensor, crossing, group, self._backends[lane])


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """What carries tensors of ``cpu`` or ``cuda``; None where nothing does.

    ``get_backend`` answers "undefined" where ``init_process_group`` was not told of one, and the group has both.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((backend for device, backend in pairs if device == device_type), None)


def _unseen_by_profiler(start: Callable[..., dist.Work], *given: object) -> dist.Work:
    """Start what may end after torch's profiler: gloo would then write into memory that it has given back."""
    if _enable_record_function is None or not torch.autograd._profiler_enabled():
        return start(*given)
    _enable_record_function(False)
    try:
        return start(*given)
    finally:
        _enable_record_function(True)
