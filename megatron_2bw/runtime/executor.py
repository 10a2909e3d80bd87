"""Runs one rank's Program, call by call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from megatron_2bw.runtime.errors import place_of, waiting_in
from megatron_2bw.runtime.links import Boundary, Links
from megatron_2bw.runtime.pace import Pace
from megatron_2bw.runtime.recorder import Recorder
from megatron_2bw.schedule.action import Action, ActionType
from megatron_2bw.schedule.as_sent import Lefts, as_sent, calls_as_sent, followed
from megatron_2bw.schedule.program import Schedule


class StageWorker(Protocol):
    """What the executor asks of a model: the mathematics of one rank, without any order.

    Actions handed over are absolute: ``batch`` counts from the start of the run, and ``version``
    may be negative, meaning the initial weights.
    """

    boundary: Boundary

    def use_weights(self, version: int) -> None:
        """Make the next forward or backward compute with ``W(version)``, or the first one if that is older."""

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage; ``received`` is None where the stage reads data."""

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Gradient of ``received``; accumulates the weights' gradients."""

    def sent(self, output: torch.Tensor) -> None:
        """``output`` is on its way: only its graph is needed from here on."""

    def reduce_start(self, action: Action) -> None:
        """From here on the reduction may run in the background."""

    def reduce_wait(self, action: Action) -> None:
        """Block until the reduction is complete."""

    def update(self, action: Action) -> None:
        """Apply the gradients of ``action.batch``; does nothing when that is done already."""


class Executor:
    """One rank of a lowered Schedule, executed.

    Forwards that ran ahead stay here between calls, with their inputs, outputs and the receives
    already posted.

    Args:
        schedule: a lowered and validated schedule.
        rank: position in the pipeline.
        worker: the computation.
        links: the transfers.
        recorder: if given, is told when every F, B and UPDATE ran, and every wait for a transfer or a reduction.
    """

    def __init__(
        self, schedule: Schedule, rank: int, worker: StageWorker, links: Links, recorder: Recorder | None = None
    ) -> None:
        self.schedule = schedule
        self.at: Action | None = None
        """What is running, counted from the start of the run; None between calls."""
        self._rank = rank
        self._program = schedule.programs[rank]
        self._worker = worker
        self._links = links
        self._recorder = recorder
        self._pace = Pace(worker.boundary.device)
        self._in_flight: dict[tuple[int, int | None, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._results: dict[tuple[int, int | None, int], torch.Tensor] = {}
        self._left: int | None = 0
        """Of the call before; 0 where the pipeline is empty."""
        self._lefts: Lefts | None = ()
        """Of the calls since the pipeline was empty; None when those in the order of `as_sent` are over."""
        self._orders: dict[Lefts, tuple[Action, ...]] = {}
        """Of this rank, as `as_sent` gave them; to ask it again takes the hash of the whole schedule."""
        self._steps: dict[ActionType, Callable[[Action], None]] = {
            ActionType.FORWARD: self._forward,
            ActionType.BACKWARD: self._backward,
            ActionType.SEND_FORWARD: self._send_forward,
            ActionType.SEND_BACKWARD: self._send_backward,
            ActionType.RECV_FORWARD: self._receive,
            ActionType.RECV_BACKWARD: self._receive,
            ActionType.REDUCE_START: worker.reduce_start,
            ActionType.REDUCE_WAIT: partial(self._settle, worker.reduce_wait),
            ActionType.UPDATE: partial(self._settle, worker.update),
        }

    def run(self, batch: int, *, left: int | None) -> None:
        """Run the call of ``batch``.

        Args:
            batch: counted from the start of the run.
            left: batches after it until the pipeline drains; 0 leaves nothing pending and nothing in flight, None is
                as many as it takes. Where forwards run several batches ahead, it has to be known so many before.

        Raises:
            ValueError: ``left`` is not what the call before announced.
        """
        self._check_announced(left)
        if self._lefts is not None:
            actions = self._as_sent(self._lefts, left)
        elif self._left != 0:
            actions = self._program.call(left)
        else:
            actions = (*self._program.fill(left), *self._program.call(left))
        self._run(actions, batch)
        self._left = left

    def _check_announced(self, left: int | None) -> None:
        """Whether forwards that ran ahead are of batches that come, and none is missing."""
        ahead = self.schedule.ahead
        if self._left == 0:
            return
        if self._left is None or self._left >= ahead:
            if left is not None and left < ahead - 1:
                raise ValueError(
                    f"left {left}: forwards ran {ahead} batches ahead, into one that would not come; give {ahead - 1}, "
                    "and count down from there"
                )
        elif left != self._left - 1:
            raise ValueError(
                f"left {left}: the batch before this one was announced with {self._left} after it; give "
                f"{self._left - 1}"
            )

    def _as_sent(self, before: Lefts, left: int | None) -> tuple[Action, ...]:
        lefts = followed(before, left, self.schedule.ahead)
        if left == 0:
            self._emptied()
        else:
            self._lefts = lefts if len(lefts) < calls_as_sent(self.schedule) else None
        if lefts not in self._orders:
            self._orders[lefts] = as_sent(self.schedule, lefts)[self._rank]
        return self._orders[lefts]

    def _emptied(self) -> None:
        self._lefts = () if self.schedule.late_receives else None

    @property
    def is_ahead(self) -> bool:
        """Whether forwards of the next batch have run, on this rank or another."""
        return self._left != 0 and self.schedule.ahead > 0

    def abandon(self) -> None:
        """Drop what ran ahead, at the end of a run: the data that it read is gone."""
        self._links.flush()
        self._in_flight.clear()
        self._left = 0
        self._emptied()

    def _run(self, actions: tuple[Action, ...], batch: int) -> None:
        for action in actions:
            self.at = action.shifted(batch)
            self._steps[action.type](self.at)
        self.at = None

    def _forward(self, action: Action) -> None:
        received = self._take(action, ActionType.RECV_FORWARD)
        if received is not None:
            received.requires_grad_()
        start = self._mark()
        self._worker.use_weights(action.version)
        output = self._worker.forward(action, received)
        self._in_flight[action.stage, action.microbatch, action.batch] = received, output
        self._note(action, start)
        self._pace.computed()

    def _backward(self, action: Action) -> None:
        grad = self._take(action, ActionType.RECV_BACKWARD)
        start = self._mark()
        received, output = self._in_flight.pop((action.stage, action.microbatch, action.batch))
        self._worker.use_weights(action.version)
        result = self._worker.backward(action, received, output, grad)
        if result is not None:
            self._results[action.stage, action.microbatch, action.batch] = result
        self._note(action, start)
        self._pace.computed()

    def _take(self, action: Action, type_: ActionType) -> torch.Tensor | None:
        receive = action._replace(type=type_, version=None)
        if self.schedule.peer_of(receive) is None:
            return None
        start = self._mark()
        tensor = self._links.take(receive)
        self._note(receive, start)
        return tensor

    def _receive(self, action: Action) -> None:
        self._links.post_receive(action, self.schedule.peer_of(action), self._worker.boundary)

    def _send_forward(self, action: Action) -> None:
        _, output = self._in_flight[action.stage, action.microbatch, action.batch]
        self._links.send(action, self.schedule.peer_of(action), output)
        self._worker.sent(output)

    def _send_backward(self, action: Action) -> None:
        grad = self._results.pop((action.stage, action.microbatch, action.batch))
        self._links.send(action, self.schedule.peer_of(action), grad)

    def _settle(self, settled: Callable[[Action], None], action: Action) -> None:
        """Wait for a reduction, or update; of batches before the run there is nothing to do."""
        if action.batch < 0:
            return
        start = self._mark()
        with waiting_in(place_of(action)):
            settled(action)
        self._note(action, start)

    def _mark(self) -> object:
        return None if self._recorder is None else self._recorder.mark()

    def _note(self, action: Action, start: object) -> None:
        if self._recorder is not None:
            self._recorder.note(action, start, self._recorder.mark())
