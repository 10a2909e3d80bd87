"""Calls in which any action may wait for the whole device: a job's first ones, or all.

CUDA loads a kernel when it is first used, and torch's allocator gives memory back when there is none left. Both wait
for all that runs on the device: also for a receive that was posted early, though its peer may wait for what this rank
has yet to compute. Here receives are posted in an order in which all ranks get through even then. It leaves transfers
less time beside computations: other calls post their receives early, see `lowering.add_transfers`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from functools import cache
from itertools import chain

from megatron_2bw.schedule.action import RECEIVES, TRANSFERS, Action
from megatron_2bw.schedule.clock import SLOTS, ActionKey, clock, in_order_of_sends, is_timed
from megatron_2bw.schedule.program import Schedule

FIRST_CALLS = 2
"""A job's first ones, in which its kernels are first used: with a delay the first update is in the second one."""

Lefts = tuple[int | None, ...]
"""Of each call since the pipeline was empty: how many batches are left after it; None for as many as it takes."""


def calls_as_sent(schedule: Schedule) -> int:
    """So many calls of a job have this order."""
    return sys.maxsize if schedule.late_receives else FIRST_CALLS


def followed(lefts: Lefts, left: int | None, ahead: int) -> Lefts:
    """With one more call; shorter where that makes no difference: calls far from the end are as the second one.

    Args:
        lefts: of the calls before.
        left: of this one.
        ahead: batches by which forwards run ahead; further from its end than that, a run does not know how long it is.

    >>> followed((None,), 7, ahead=1), followed((None, None), 6, ahead=1), followed((None, None), 0, ahead=1)
    ((None, None), (None, None), (None, None, 0))
    """
    known = left if left is not None and left < max(ahead, 1) else None
    return lefts if known is None and lefts == (None, None) else (*lefts, known)


@cache
def as_sent(schedule: Schedule, lefts: Lefts) -> tuple[tuple[Action, ...], ...]:
    """Per rank: what it does in a call of a lowered schedule; the first one fills the pipeline, too.

    Receives are posted when, by the `clock`, their tensors have been sent. Then no rank waits for itself, or for one
    that waits for it, even if every action waits for all that its rank has posted: all waits are for earlier starts.

    Args:
        schedule: of all ranks.
        lefts: up to this call; see `followed`.

    >>> from megatron_2bw.schedule.lowering import lower
    >>> from megatron_2bw.schedule.registry import build
    >>> schedule = lower(build("chimera", stages=2, microbatches=2))
    >>> print(*schedule.programs[0].steady[:4], "-", *as_sent(schedule, (None,))[0][:4])
    1RECV_F1 0F0v0 0SEND_F0 1F1v0 - 0F0v0 0SEND_F0 1RECV_F1 1F1v0
    """
    calls = [[program.call(left) for left in lefts] for program in schedule.programs]
    for program, of_rank in zip(schedule.programs, calls, strict=True):
        of_rank[0] = (*program.fill(lefts[0]), *of_rank[0])
        of_rank[:] = [tuple(action.shifted(number) for action in call) for number, call in enumerate(of_rank)]
    ends = clock(schedule, map(chain.from_iterable, calls))
    return tuple(
        tuple(action.shifted(1 - len(lefts)) for action in _in_order(call, ends, _end_of(before, ends)))
        for *before, call in calls
    )


def _end_of(calls: Iterable[tuple[Action, ...]], ends: dict[ActionKey, int]) -> int:
    return max((ends.get(action[:4], 0) for call in calls for action in call if is_timed(action)), default=0)


def _in_order(call: tuple[Action, ...], ends: dict[ActionKey, int], now: int) -> Iterable[Action]:
    receives = deque(in_order_of_sends((action for action in call if action.type in RECEIVES), ends))
    for action in call:
        end = ends.get(action[:4], sys.maxsize) if is_timed(action) else now
        while action.type not in TRANSFERS and receives and receives[0][0] <= end - SLOTS.get(action.type, 0):
            yield receives.popleft()[1]
        if action.type not in RECEIVES:
            yield action
        now = end
    yield from (receive for _, receive in receives)
