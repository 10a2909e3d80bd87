"""The rules that both sides of a transfer have to keep together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from megatron_2bw.schedule.action import ACTIVATIONS, COMPUTE, OTHER_END, SENDS, TRANSFERS, Action, ActionType
from megatron_2bw.schedule.calls import Part, Span
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.validation.rules import Rule, RuleBroken

Channel = tuple[int, int, bool]
"""Source rank, destination rank, and whether it carries activations; first in, first out."""


class _Transfers:
    """What one rank sends into a channel, or expects from it, in every part of its Program."""

    def __init__(self) -> None:
        self._actions: defaultdict[Part, list[Action]] = defaultdict(list)
        self._uses: defaultdict[Part, list[int]] = defaultdict(list)

    def add(self, part: Part, action: Action, use: int) -> None:
        """Take down an action; ``use`` is the number of the one that needs the tensor, in call 0."""
        self._actions[part].append(action)
        self._uses[part].append(use)

    def uses(self, walk: tuple[Span, ...], stride: int) -> list[int]:
        """Of the whole walk, in order, with ``stride`` from call to call."""
        return [use + span.call * stride for span in walk for use in self._uses[span.part]]

    def calls(self, walk: tuple[Span, ...]) -> list[int]:
        """The call of each."""
        return [span.call for span in walk for _ in self._uses[span.part]]

    def find(self, walk: tuple[Span, ...], index: int) -> tuple[Span, Action] | None:
        """The action of that index; None behind the last one."""
        for span in walk:
            actions = self._actions[span.part]
            if index < len(actions):
                return span, actions[index]
            index -= len(actions)
        return None


class Channels:
    """All transfers of a walk through the Programs of all ranks, as each rank lists them.

    Args:
        schedule: lowered.
        parts: of each rank.
        walk: the parts in the order in which every rank runs them.
    """

    def __init__(
        self, schedule: Schedule, parts: Sequence[Mapping[Part, Iterable[Action]]], walk: tuple[Span, ...]
    ) -> None:
        self._schedule = schedule
        self._walk = walk
        self._stride = 2 * schedule.stages * schedule.microbatches
        self._sent: defaultdict[Channel, _Transfers] = defaultdict(_Transfers)
        self._posted: defaultdict[Channel, _Transfers] = defaultdict(_Transfers)
        self._call_of_use: dict[int, int] = {}
        for rank, of_part in enumerate(parts):
            for part, actions in of_part.items():
                computed = self._record(rank, part, actions)
                for call in (span.call for span in walk if span.part == part):
                    self._call_of_use.update((use + call * self._stride, call) for use in computed)

    def _record(self, rank: int, part: Part, actions: Iterable[Action]) -> list[int]:
        """Sort the transfers of a part by channel; returns the uses that forwards and backwards are."""
        computed = []
        for action in actions:
            type_, stage = action.type, action.stage
            if type_ in COMPUTE:
                computed.append(self._use(type_ is ActionType.FORWARD, stage, action))
            elif type_ in TRANSFERS:
                peer = self._schedule.peer_of(action)
                activations = type_ in ACTIVATIONS
                if type_ in SENDS:
                    use = self._use(activations, stage + OTHER_END[type_][1], action)
                    self._sent[rank, peer, activations].add(part, action, use)
                else:
                    self._posted[peer, rank, activations].add(part, action, self._use(activations, stage, action))
        return computed

    def _use(self, activations: bool, stage: int, action: Action) -> int:
        """A number for the action that needs a tensor, in call 0."""
        index = 2 * (stage * self._schedule.microbatches + action.microbatch) + activations
        return index + action.batch * self._stride

    def check(self) -> None:
        """Compare both sides of every channel, and count what is in flight when calls end.

        Raises:
            RuleBroken: at the receive, or at the send that has none.
        """
        in_flight: Counter[tuple[int, int]] = Counter()
        for channel in sorted({*self._sent, *self._posted}):
            self._check_channel(channel, in_flight)

    def _check_channel(self, channel: Channel, in_flight: Counter[tuple[int, int]]) -> None:
        activations = channel[2]
        sent, posted = self._sent[channel], self._posted[channel]
        both = zip_longest(sent.uses(self._walk, self._stride), posted.uses(self._walk, self._stride))
        calls = zip_longest(sent.calls(self._walk), posted.calls(self._walk))
        for index, ((use, expected), both_calls) in enumerate(zip(both, calls, strict=True)):
            if use != expected:
                raise self._mismatch(channel, index)
            for call in range(min(both_calls), self._call_of_use[use]):
                boundary = use % self._stride // (2 * self._schedule.microbatches) - activations
                in_flight[boundary, call] += 1
                if in_flight[boundary, call] > self._schedule.per_boundary:
                    raise RuleBroken(
                        Rule.BOUNDARY,
                        f"{in_flight[boundary, call]} tensors are between stages {boundary} and {boundary + 1} "
                        f"at the end of call {call}; declared: {self._schedule.per_boundary}",
                        channel[1],
                        *posted.find(self._walk, index),
                    )

    def _mismatch(self, channel: Channel, index: int) -> RuleBroken:
        source, destination, _ = channel
        sent, posted = (side[channel].find(self._walk, index) for side in (self._sent, self._posted))

        def written(side: tuple[Span, Action] | None) -> str:
            return "nothing" if side is None else f"{side[1]} in call {side[0].call}"

        return RuleBroken(
            Rule.TRANSFER_ORDER,
            f"rank {source} sends {written(sent)} where rank {destination} expects {written(posted)}",
            *((destination, *posted) if posted else (source, *sent)),
        )
