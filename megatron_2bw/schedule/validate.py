"""Proof that the Programs of all ranks work together and keep the bounds they declare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import zip_longest
from typing import NamedTuple

from megatron_2bw.schedule.action import COMPUTE, TRANSFERS, Action, ActionType, Reduction
from megatron_2bw.schedule.calls import Phase, Span, lowered, phases_of, spans
from megatron_2bw.schedule.engine import Blocked, Durations, Model, run
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.inventory import Misplaced, check_communication, check_compute, check_declaration
from megatron_2bw.schedule.listing import listing
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.rules import RankRules, Rule, RuleBroken

_FORWARD_TRANSFERS = frozenset({ActionType.SEND_FORWARD, ActionType.RECV_FORWARD})
_SENDS = frozenset({ActionType.SEND_FORWARD, ActionType.SEND_BACKWARD})
_FREE = Durations(forward_s=0, backward_s=0)


def validate(schedule: Schedule) -> None:
    """Prove that a schedule is correct, or say what is wrong with it.

    Runs all ranks together: a run of one call, and runs one after the other with enough calls to
    repeat themselves, each with its fill and its drain. ``Rule`` lists what is checked. Deadlocks are looked
    for under every ``Model``. Where the schedule has only F, B and UPDATE, default reductions and
    transfers are added first; otherwise it is taken as it is, with any subset of the reductions.

    Raises:
        ScheduleError: the rule, the rank, the call, the action and the values; ``grid`` marks the action.

    >>> from megatron_2bw.schedule.registry import build
    >>> validate(build("2bw", stages=4, microbatches=3))
    >>> try:
    ...     validate(build("2bw", stages=4, microbatches=2))
    ... except ScheduleError as error:
    ...     print(error.message)
    2bw (d=4, m=2): update too early: rank 0, steady call 0, 0UPDATE: backwards of batch 0 still to come on stage 0: 1
    """
    try:
        check_declaration(schedule)
        check_compute(schedule)
        schedule = lowered(schedule)
        chains = check_communication(schedule)
    except Misplaced as error:
        raise _error(schedule, error, [(error.rank, error.action)]) from None
    for runs in ((1,), (_calls_to_repeat(schedule), 1, 2)):
        _check_ranks(schedule, chains, runs)
        for model in Model:
            _check_progress(schedule, runs, model)


def _calls_to_repeat(schedule: Schedule) -> int:
    """Calls after which nothing new happens: what a call does reaches this many calls back and ahead."""
    batches = [action.batch for program in schedule.programs for action in program.steady]
    return 2 + max(batches) - min(batches) + max(schedule.delay)
