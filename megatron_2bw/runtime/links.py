"""Transfers between neighbouring stages, started early and waited for late."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_2bw.runtime.errors import needs_peers, place_of
from megatron_2bw.schedule.action import ACTIVATIONS, Action, ActionType


class Way(NamedTuple):
    """A kind of transfers, and a direction of theirs."""

    activations: bool
    """Not their gradients."""
    to_higher_rank: bool


ONE_WAY = (Way(True, True), Way(False, False))
"""Of a pipeline whose stages are in the order of its ranks."""
TWO_WAYS = (*ONE_WAY, Way(True, False), Way(False, True))
"""Of two pipelines in opposite directions."""


class _Transfer(NamedTuple):
    """One transfer under way."""

    work: dist.Work
    tensor: torch.Tensor
    action: Action
    peer: int
    """Global rank of the other end."""
    group: dist.ProcessGroup

    def wait(self) -> torch.Tensor:
        with needs_peers(_what(self.action, self.peer)):
            if backend_of(self.group, self.tensor.device.type) == "gloo":
                # Its transfers do not know of a timeout that was set after their group was made.
                self.work.wait(self.group._get_backend(torch.device("cpu")).options._timeout)
            else:
                self.work.wait()  # With a timeout, NCCL's would block the host.
        return self.tensor


class _Taken(NamedTuple):
    """A receive that the device waits for; without its tensor, which would stay in memory."""

    done: torch.cuda.Event
    what: str


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
        groups: of the pipeline's ranks, by `Way`.
        ranks: global rank of each rank of the pipeline.
        per_boundary: tensors that may lie between two stages when a call ends.
    """

    def __init__(
        self,
        *,
        groups: Mapping[Way, dist.ProcessGroup],
        ranks: list[int],
        per_boundary: int = 1,
    ) -> None:
        self._most_sends = per_boundary + 1
        self._groups = groups
        self._ranks = ranks
        self._rank = ranks.index(dist.get_rank())
        self._receives: dict[Action, _Transfer] = {}
        self._sends: dict[tuple[ActionType, int], deque[_Transfer]] = {}
        self._taken: deque[_Taken] = deque()
        """Over NCCL: receives that may not be complete."""

    def post_receive(self, action: Action, peer: int, boundary: Boundary) -> None:
        """Start receiving into a fresh tensor; ``take`` waits for it."""
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
        group = self._group(action, peer, self._rank)
        with needs_peers(_what(action, self._ranks[peer])), _unseen_by_profiler():
            work = dist.irecv(tensor, src=self._ranks[peer], group=group)
        self._receives[action] = _Transfer(work, tensor, action, self._ranks[peer], group)

    def take(self, receive: Action) -> torch.Tensor:
        """What ``receive`` has brought, once it is here."""
        transfer = self._receives.pop(receive)
        tensor = transfer.wait()
        if backend_of(transfer.group, tensor.device.type) == "nccl":
            while self._taken and self._taken[0].done.query():
                self._taken.popleft()
            done = torch.cuda.current_stream(tensor.device).record_event()
            self._taken.append(_Taken(done, _what(transfer.action, transfer.peer)))
        return tensor

    def waiting(self, failed: dist.ProcessGroup) -> str | None:
        """The receive that the device waits for, in words; None if there is none, or ``failed`` is not of transfers."""
        if failed not in self._groups.values():
            return None
        return next((taken.what for taken in list(self._taken) if not taken.done.query()), None)

    def send(self, action: Action, peer: int, tensor: torch.Tensor) -> None:
        """Start sending ``tensor``; its memory is held here until the send is complete."""
        sends = self._sends.setdefault((action.type, peer), deque())
        while sends and sends[0].work.is_completed():
            sends.popleft()
        group = self._group(action, self._rank, peer)
        if backend_of(group, tensor.device.type) == "gloo":
            # It reports a send complete only to a caller that waits for it.
            while len(sends) >= self._most_sends:
                sends.popleft().wait()
        payload = tensor.detach().contiguous()
        with needs_peers(_what(action, self._ranks[peer])), _unseen_by_profiler():
            work = dist.isend(payload, dst=self._ranks[peer], group=group)
        sends.append(_Transfer(work, payload, action, self._ranks[peer], group))

    def flush(self) -> None:
        """Wait for every transfer under way and forget what was received but not used."""
        for transfer in self._receives.values():
            transfer.wait()
        self._receives.clear()
        for sends in self._sends.values():
            while sends:
                sends.popleft().wait()

    def _group(self, action: Action, source: int, destination: int) -> dist.ProcessGroup:
        return self._groups[Way(action.type in ACTIVATIONS, source < destination)]


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """What carries tensors of ``cpu`` or ``cuda``; None where nothing does.

    ``get_backend`` answers "undefined" where ``init_process_group`` was not told of one, and the group has both.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((backend for device, backend in pairs if device == device_type), None)


def _what(action: Action, peer: int) -> str:
    return f"{place_of(action)}, with rank {peer},"


@contextlib.contextmanager
def _unseen_by_profiler() -> Iterator[None]:
    """Hide a transfer that may end after torch's profiler: gloo would then write into memory that it has given back."""
    hide = getattr(torch._C._autograd, "_enable_record_function", None)
    if hide is None or not torch.autograd._profiler_enabled():
        yield
        return
    hide(False)
    try:
        yield
    finally:
        hide(True)
