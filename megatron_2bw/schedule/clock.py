"""When actions run if a forward takes one slot and a backward two."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from operator import itemgetter

from megatron_2bw.schedule.action import COMPUTE, SENDS, Action, ActionType, Reduction
from megatron_2bw.schedule.program import Schedule

ActionKey = tuple[ActionType, int, int | None, int]
"""Type, stage, microbatch and batch."""
SLOTS = {ActionType.FORWARD: 1, ActionType.BACKWARD: 2}
"""Time slots that an action takes, as MixPipe's section III-B draws them; others take none."""
_SEND_OF = {ActionType.FORWARD: ActionType.SEND_FORWARD, ActionType.BACKWARD: ActionType.SEND_BACKWARD}
_MEETS_IN = {Reduction.EMBEDDING: ActionType.REDUCE_START, Reduction.NORM: ActionType.REDUCE_WAIT}
_TIMED = COMPUTE | SENDS


def is_timed(action: Action) -> bool:
    """Whether the `clock` knows it: forwards, backwards, sends, and where ranks meet."""
    return action.type in _TIMED or _is_meeting(action)


def _is_meeting(action: Action) -> bool:
    """Whether, in one hardware queue, what a rank issues next begins when the others have come to the same.

    The sum of the tied embedding's gradients is issued with its start; the norm when the host waits for it.
    """
    return action.batch >= 0 and action.type is _MEETS_IN.get(action.reduction)


def clock(schedule: Schedule, calls: Iterable[Iterable[Action]]) -> dict[ActionKey, int]:
    """When what `is_timed` in the ranks' ``calls`` ends.

    What is sent is there at once; where ``calls`` have no transfers yet, so is what is computed. A meeting ends when its
    last rank has come; of those of batches before ``calls`` nothing is left. Actions that can never start, or that wait
    for another call, get no time.

    >>> from megatron_2bw.schedule.registry import build
    >>> schedule = build("gpipe", stages=2, microbatches=1)
    >>> ends = clock(schedule, [program.steady for program in schedule.programs])
    >>> [ends[type_, stage, 0, 0] for type_, stage in (("F", 0), ("F", 1), ("B", 1), ("B", 0))]
    [1, 2, 4, 6]
    """
    ends: dict[ActionKey, int] = {}
    waiting = [deque(filter(is_timed, call)) for call in calls]
    sends = {action[:4] for actions in waiting for action in actions if action.type in SENDS}
    now = [0 for _ in waiting]
    # Who meets, by reduction: also where one of them comes to it in another call.
    ranks = Counter(
        kind
        for program in schedule.programs
        for kind in {action.reduction for action in program.steady if _is_meeting(action._replace(batch=0))}
    )
    arrived: defaultdict[tuple[Reduction, int], dict[int, int]] = defaultdict(dict)
    """By reduction and batch: when each rank came."""

    def ready(rank: int, action: Action) -> int | None:
        """When the action can start at the earliest; None if that is not known yet."""
        type_, stage, microbatch, batch, *_ = action
        if _is_meeting(action):
            meeting = action.reduction, batch
            arrived[meeting].setdefault(rank, now[rank])
            return max(arrived[meeting].values()) if len(arrived[meeting]) == ranks[meeting[0]] else None
        before = stage + (-1 if type_ is ActionType.FORWARD else 1)
        if type_ in SENDS or before in (-1, schedule.stages):
            return 0
        send = (_SEND_OF[type_], before, microbatch, batch)
        return ends.get(send if send in sends else (type_, before, microbatch, batch))

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(waiting):
            while actions and (start := ready(rank, actions[0])) is not None:
                action = actions.popleft()
                now[rank] = max(now[rank], start) + SLOTS.get(action.type, 0)
                ends[action[:4]] = now[rank]
                if action.type in COMPUTE and not sends:
                    ends[_SEND_OF[action.type], *action[1:4]] = now[rank]
                moved = True
    return ends


def passes(schedule: Schedule) -> dict[ActionKey, int]:
    """When the forwards and backwards of one call end, if nothing is left of the call before.

    >>> from megatron_2bw.schedule.registry import build
    >>> max(passes(build("chimera", stages=4, microbatches=4)).values())
    16
    """
    ends = clock(schedule, [program.steady for program in schedule.programs])
    return {key: end for key, end in ends.items() if key[0] in SLOTS}


def in_order_of_sends(receives: Iterable[Action], ends: dict[ActionKey, int]) -> list[tuple[int, Action]]:
    """With the slots after which their tensors are sent; those of tensors that are sent in another call come last."""

    sent = ((ends.get(receive.other_end()[:4], sys.maxsize), receive) for receive in receives)
    return sorted(sent, key=itemgetter(0))
