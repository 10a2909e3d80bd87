"""One step of one rank: what it does, for which stage, microbatch and batch."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from megatron_2bw.schedule.errors import ScheduleError


class ActionType(StrEnum):
    """What a rank does in one step; the value is the name in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE_START = "REDUCE_START"
    REDUCE_WAIT = "REDUCE_WAIT"
    UPDATE = "UPDATE"


class Reduction(StrEnum):
    """What a batch still needs from other ranks before its update, in the order of the chain."""

    GRADIENTS = "grads"
    """Gradients leave the accumulation buffer and are summed over the ranks of the same stage."""
    EMBEDDING = "embedding"
    """Gradients of tied word embeddings are summed over the first and the last stage."""
    NORM = "norm"
    """Squared gradient norms and overflow flags are summed over all stages."""


COMPUTE = frozenset({ActionType.FORWARD, ActionType.BACKWARD})
WORK = COMPUTE | {ActionType.UPDATE}
"""What schedules are authored in; the rest is communication."""
ACTIVATIONS = frozenset({ActionType.SEND_FORWARD, ActionType.RECV_FORWARD})
"""Transfers of them; the others are of their gradients."""
SENDS = frozenset({ActionType.SEND_FORWARD, ActionType.SEND_BACKWARD})
RECEIVES = frozenset({ActionType.RECV_FORWARD, ActionType.RECV_BACKWARD})
TRANSFERS = SENDS | RECEIVES
OTHER_END = {
    ActionType.SEND_FORWARD: (ActionType.RECV_FORWARD, 1),
    ActionType.RECV_FORWARD: (ActionType.SEND_FORWARD, -1),
    ActionType.SEND_BACKWARD: (ActionType.RECV_BACKWARD, -1),
    ActionType.RECV_BACKWARD: (ActionType.SEND_BACKWARD, 1),
}
"""Of a transfer: its type, and so many stages further."""
_OF_MICROBATCH = COMPUTE | TRANSFERS
_REDUCTIONS = frozenset({ActionType.REDUCE_START, ActionType.REDUCE_WAIT})

_TEXT = re.compile(
    r"(?P<stage>\d+)"
    r"(?P<type>SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_START|REDUCE_WAIT|UPDATE|F|B)"
    r"(?P<microbatch>\d+)?(?::(?P<reduction>\w+))?"
    r"(?:@(?P<batch>-?\d+))?(?:v(?P<version>-?\d+))?"
)


class Action(NamedTuple):
    """An action of one rank, written ``2F5@1v0``.

    The example reads: stage 2, forward, microbatch 5, of the next batch (``@1``), with the weights
    of this batch's number (``v0``). ``batch`` and ``version`` count from the batch of the current
    call: in call ``t``, ``@1`` is batch ``t + 1`` and ``v-1`` is ``W(t - 1)``. ``UPDATE@b`` uses
    the gradients of batch ``b`` and creates version ``b + 1``.

    >>> Action.parse("2F5@1v0")
    Action(2F5@1v0)
    >>> Action.parse("0REDUCE_WAIT:norm@-1").reduction
    <Reduction.NORM: 'norm'>
    >>> Action(ActionType.SEND_BACKWARD, stage=1, microbatch=3)
    Action(1SEND_B3)
    """

    type: ActionType
    stage: int
    microbatch: int | None = None
    """Index within its batch; None for reductions and updates."""
    batch: int = 0
    version: int | None = None
    """Weights that a forward or backward computes with; None elsewhere."""
    reduction: Reduction | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        reduction = "" if self.reduction is None else f":{self.reduction}"
        batch = "" if self.batch == 0 else f"@{self.batch}"
        version = "" if self.version is None else f"v{self.version}"
        return f"{self.stage}{self.type}{microbatch}{reduction}{batch}{version}"

    def __repr__(self) -> str:
        return f"Action({self})"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            ScheduleError: ``text`` is no action, or carries a field that its type does not have.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is no action; write for example 2F5@1v0, 0UPDATE@-1 or 1REDUCE_WAIT:norm")
        type_ = ActionType(match["type"])
        if (match["microbatch"] is not None) != (type_ in _OF_MICROBATCH):
            raise ScheduleError(f"{text!r}: F, B and transfers name a microbatch, other actions do not")
        if (match["reduction"] is not None) != (type_ in _REDUCTIONS):
            raise ScheduleError(f"{text!r}: REDUCE_START and REDUCE_WAIT name a reduction, other actions do not")
        if match["reduction"] is not None and match["reduction"] not in set(Reduction):
            raise ScheduleError(f"{text!r}: reductions are {', '.join(Reduction)}")
        if match["version"] is not None and type_ not in COMPUTE:
            raise ScheduleError(f"{text!r}: only F and B name a weight version")
        return cls(
            type=type_,
            stage=int(match["stage"]),
            microbatch=None if match["microbatch"] is None else int(match["microbatch"]),
            batch=int(match["batch"] or 0),
            version=None if match["version"] is None else int(match["version"]),
            reduction=None if match["reduction"] is None else Reduction(match["reduction"]),
        )

    def other_end(self) -> Action:
        """The receive of a send, or the send of a receive.

        >>> Action.parse("2SEND_B5@1").other_end()
        Action(1RECV_B5@1)
        """
        type_, further = OTHER_END[self.type]
        return self._replace(type=type_, stage=self.stage + further)

    def shifted(self, batches: int) -> Action:
        """The same action as seen from ``batches`` calls earlier (its batch and version grow)."""
        version = None if self.version is None else self.version + batches
        return Action(self.type, self.stage, self.microbatch, self.batch + batches, version, self.reduction)
