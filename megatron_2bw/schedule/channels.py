"""The rules that both sides of a transfer have to keep together."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import zip_longest
from typing import NamedTuple

from megatron_2bw.schedule.action import COMPUTE, TRANSFERS, Action, ActionType
from megatron_2bw.schedule.calls import Span
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.rules import Rule, RuleBroken

_ACTIVATIONS = frozenset({ActionType.SEND_FORWARD, ActionType.RECV_FORWARD})
_SENDS = frozenset({ActionType.SEND_FORWARD, ActionType.SEND_BACKWARD})


class Place(NamedTuple):
    """Where an action stands."""

    rank: int
    span: Span
    action: Action | None
    """As written in the Program; None for the rank as such."""


class RuleBrokenAt(RuleBroken):
    """A rule broken at a place."""

    def __init__(self, rule: Rule, detail: str, place: Place) -> None:
        super().__init__(rule, detail)
        self.place = place


class _Use(NamedTuple):
    """The action that needs the tensor of a transfer; its batch counts from the start."""

    type: ActionType
    stage: int
    microbatch: int | None
    batch: int


class Channels:
    """All transfers of a run, as each rank lists them."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._sent: dict[tuple[int, int | None, bool], list[tuple[_Use, Place]]] = defaultdict(list)
        self._posted: dict[tuple[int | None, int, bool], list[tuple[_Use, Place]]] = defaultdict(list)
        self._call_of_use: dict[_Use, int] = {}

    def note(self, place: Place) -> None:
        """Take down an action of one rank; call it in that rank's order."""
        rank, span, action = place
        stage, microbatch, batch = action.stage, action.microbatch, action.batch + span.call
        if action.type in COMPUTE:
            self._call_of_use[_Use(action.type, stage, microbatch, batch)] = span.call
        elif action.type in TRANSFERS:
            peer = self._schedule.peer_of(action)
            activations = action.type in _ACTIVATIONS
            user = ActionType.FORWARD if activations else ActionType.BACKWARD
            if action.type in _SENDS:
                use = _Use(user, stage + (1 if activations else -1), microbatch, batch)
                self._sent[rank, peer, activations].append((use, place))
            else:
                self._posted[peer, rank, activations].append((_Use(user, stage, microbatch, batch), place))

    def check(self) -> None:
        """Compare both sides of every channel, and count what is in flight when calls end.

        Raises:
            RuleBrokenAt: at the receive, or at the send that has none.
        """
        in_flight: Counter[tuple[int, int]] = Counter()
        for channel in sorted({*self._sent, *self._posted}):
            for sent, posted in zip_longest(self._sent[channel], self._posted[channel]):
                _check_match(channel, sent, posted)
                use, place = posted
                boundary = use.stage - (use.type is ActionType.FORWARD)
                for call in range(min(sent[1].span.call, place.span.call), self._call_of_use[use]):
                    in_flight[boundary, call] += 1
                    if in_flight[boundary, call] > self._schedule.per_boundary:
                        raise RuleBrokenAt(
                            Rule.BOUNDARY,
                            f"{in_flight[boundary, call]} tensors are between stages {boundary} and {boundary + 1} "
                            f"at the end of call {call}; declared: {self._schedule.per_boundary}",
                            place,
                        )


def _check_match(
    channel: tuple[int, int, bool], sent: tuple[_Use, Place] | None, posted: tuple[_Use, Place] | None
) -> None:
    if sent is not None and posted is not None and sent[0] == posted[0]:
        return
    source, destination, _ = channel

    def written(side: tuple[_Use, Place] | None) -> str:
        return "nothing" if side is None else f"{side[1].action} in call {side[1].span.call}"

    raise RuleBrokenAt(
        Rule.TRANSFER_ORDER,
        f"rank {source} sends {written(sent)} where rank {destination} expects {written(posted)}",
        (posted or sent)[1],
    )
