"""The first calls of a job, in which its kernels are first used.

CUDA loads a kernel when it is first used, and that waits for all that runs on the device: also for a receive that was
posted early, though its peer may wait for what this rank has yet to compute.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

from megatron_2bw.schedule.action import RECEIVES, TRANSFERS, Action
from megatron_2bw.schedule.clock import SLOTS, ActionKey, clock, in_order_of_sends, is_timed
from megatron_2bw.schedule.program import Schedule

FIRST_CALLS = 2
"""So many calls are ordered: with a delay the first update is in the second one."""


@lru_cache(maxsize=2 * FIRST_CALLS)
def first_calls(schedule: Schedule, lefts: tuple[int | None, ...]) -> tuple[tuple[Action, ...], ...]:
    """Per rank: what it does in one of its first calls, of a lowered schedule; the first one fills the pipeline, too.

    Receives are posted when, by the `clock`, their tensors have been sent. Then no rank waits for itself, or for one
    that waits for it, even if every action waits for all that its rank has posted: all waits are for earlier starts.

    Args:
        schedule: of all ranks.
        lefts: how many batches were left after each call up to this one; None for as many as it takes.

    >>> from megatron_2bw.schedule.lowering import lower
    >>> from megatron_2bw.schedule.registry import build
    >>> schedule = lower(build("chimera", stages=2, microbatches=2))
    >>> print(*schedule.programs[0].steady[:4], "-", *first_calls(schedule, (None,))[0][:4])
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
