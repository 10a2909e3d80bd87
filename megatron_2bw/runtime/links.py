"""Transfers between neighbouring stages, started early and waited for late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_2bw.schedule.action import Action, ActionType

_TOWARDS_LAST = frozenset({ActionType.SEND_FORWARD, ActionType.RECV_FORWARD})
_CONSUMER = {ActionType.RECV_FORWARD: ActionType.FORWARD, ActionType.RECV_BACKWARD: ActionType.BACKWARD}


class PeerLostError(RuntimeError):
    """A transfer or reduction failed because another rank is gone; the cause is in that rank's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What crosses a stage boundary: activations one way, their gradients the other."""

    shape: tuple[int, ...]
    """(sequence, microbatch size, hidden) in elements."""
    dtype: torch.dtype
    device: torch.device


class Links:
    """Sends and receives of one rank, on process groups of their own.

    One group per direction keeps each direction first-in first-out, and keeps evaluation, which
    uses Megatron's own pipeline group, from meeting a transfer of a batch that runs ahead.

    Args:
        forward_group: group of the pipeline's ranks for activations.
        backward_group: group of the same ranks for gradients.
        ranks: global rank of each rank of the pipeline.
    """

    _UNFINISHED_SENDS = 2

    def __init__(
        self, *, forward_group: dist.ProcessGroup, backward_group: dist.ProcessGroup, ranks: list[int]
    ) -> None:
        self._forward_group = forward_group
        self._backward_group = backward_group
        self._ranks = ranks
        self._receives: dict[tuple[ActionType, int, int | None, int], tuple[dist.Work, torch.Tensor, Action, int]] = {}
        self._sends: dict[tuple[ActionType, int], deque[tuple[dist.Work, torch.Tensor, Action]]] = {}

    def post_receive(self, action: Action, peer: int, boundary: Boundary) -> None:
        """Start receiving into a fresh tensor; ``take`` waits for it."""
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
        work = dist.irecv(tensor, src=self._ranks[peer], group=self._group(action))
        self._receives[_CONSUMER[action.type], action.stage, action.microbatch, action.batch] = work, tensor, action, peer

    def take(self, consumer: Action) -> torch.Tensor:
        """The received input of a forward, or output gradient of a backward, once it is here."""
        work, tensor, action, peer = self._receives.pop(
            (consumer.type, consumer.stage, consumer.microbatch, consumer.batch)
        )
        self._wait(work, action, self._ranks[peer])
        return tensor

    def send(self, action: Action, peer: int, tensor: torch.Tensor) -> None:
        """Start sending ``tensor``; its memory is held here until the send is complete."""
        sends = self._sends.setdefault((action.type, peer), deque())
        while sends and sends[0][0].is_completed():
            sends.popleft()
        if tensor.device.type == "cpu":
            # Gloo reports a send complete only to a caller that waits for it.
            while len(sends) >= self._UNFINISHED_SENDS:
                work, _, earlier = sends.popleft()
                self._wait(work, earlier, self._ranks[peer])
        payload = tensor.detach().contiguous()
        work = dist.isend(payload, dst=self._ranks[peer], group=self._group(action))
        sends.append((work, payload, action))

    def flush(self) -> None:
        """Wait for every transfer under way and forget what was received but not used."""
        for work, _, action, peer in self._receives.values():
            self._wait(work, action, self._ranks[peer])
        self._receives.clear()
        for (_, peer), sends in self._sends.items():
            for work, _, action in sends:
                self._wait(work, action, self._ranks[peer])
            sends.clear()

    def _group(self, action: Action) -> dist.ProcessGroup:
        return self._forward_group if action.type in _TOWARDS_LAST else self._backward_group

    @staticmethod
    def _wait(work: dist.Work, action: Action, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(
                f"stage {action.stage} waited for {action} (batch counted from the start of the run) with rank {peer}, "
                f"which is gone or too late: look for that rank's own error. ({error})"
            ) from error
