"""Passes that turn authored Programs (F, B, UPDATE) into ones that a rank can execute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat

from megatron_2bw.schedule.action import COMPUTE, SENDS, Action, ActionType, Reduction
from megatron_2bw.schedule.clock import ActionKey, clock, in_order_of_sends
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import GradientCopy, Program, Schedule, programs_of

DEFAULT_REDUCTIONS = (Reduction.GRADIENTS, Reduction.NORM)


def lower(schedule: Schedule, reductions: Iterable[Reduction] = DEFAULT_REDUCTIONS) -> Schedule:
    """Add the reductions that every update waits for, then the transfers between ranks.

    >>> from megatron_2bw.schedule.registry import build
    >>> lowered = lower(build("2bw", stages=2, microbatches=1))
    >>> for program in lowered.programs:
    ...     print(program)
    0REDUCE_WAIT:grads@-1 0REDUCE_WAIT:norm@-1 0UPDATE@-1 0RECV_B0 0F0@1v0 0SEND_F0@1 0B0v-1 0REDUCE_START:grads 0REDUCE_START:norm
    1F0v-1 1RECV_F0@1 1B0v-1 1SEND_B0 1REDUCE_WAIT:grads@-1 1REDUCE_WAIT:norm@-1 1UPDATE@-1 1REDUCE_START:grads 1REDUCE_START:norm
    """
    return add_transfers(add_reductions(schedule, reductions))


def with_gradient_copy(schedule: Schedule, copy: GradientCopy) -> Schedule:
    """Authored Programs that keep ``copy`` of finished gradients.

    Without a copy, updates of earlier batches move before the call's first backward, at the latest.

    >>> from megatron_2bw.schedule.registry import build
    >>> print(with_gradient_copy(build("2bw", stages=2, microbatches=2), GradientCopy.NONE).programs[1])
    1F0v-1 1UPDATE@-1 1B0v-1 1F1v-1 1B1v-1
    """

    def call(steady: tuple[Action, ...]) -> Iterable[Action]:
        first, late = _updates_after_first_backward(steady)
        yield from (*steady[:first], *late)
        yield from (action for action in steady[first:] if action not in late)

    if copy is not GradientCopy.NONE:
        return replace(schedule, gradient_copy=copy)
    programs = programs_of(call(program.steady) for program in schedule.programs)
    return replace(schedule, gradient_copy=copy, programs=programs)


def add_reductions(schedule: Schedule, reductions: Iterable[Reduction]) -> Schedule:
    """Start a batch's reductions right after its last backward; wait for them right before its update.

    A start only says from where on the chain may run: each reduction begins when the one before it
    in ``reductions`` is complete, in the background. Where the previous batch's update follows the
    last backward, the starts come after that update, which frees the one buffer that holds
    captured gradients. Where only a shard is kept, the sum over replicas is waited for before the
    call's first backward. Reductions that are not among the schedule's own are left out.
    """
    chain = tuple(kind for kind in reductions if kind in schedule.reductions)
    last = schedule.stages - 1

    def kinds(stage: int) -> Iterable[Reduction]:
        return (kind for kind in chain if kind is not Reduction.EMBEDDING or (stage in (0, last) and last > 0))

    def call(steady: tuple[Action, ...]) -> Iterable[Action]:
        final = max(i for i, action in enumerate(steady) if action.type is ActionType.BACKWARD)
        first, late = _updates_after_first_backward(steady)
        keeps_shard = schedule.gradient_copy is GradientCopy.SHARD and Reduction.GRADIENTS in chain
        early = [_reduce(ActionType.REDUCE_WAIT, update, Reduction.GRADIENTS) for update in late if keeps_shard]
        for i, action in enumerate(steady):
            if i == first:
                yield from early
            if action.type is ActionType.UPDATE:
                waits = (_reduce(ActionType.REDUCE_WAIT, action, kind) for kind in kinds(action.stage))
                yield from (wait for wait in waits if wait not in early)
            yield action
            following = steady[i + 1] if i + 1 < len(steady) else None
            frees_buffer = following is not None and following.type is ActionType.UPDATE and following.batch < 0
            if i >= final and not frees_buffer and (i == final or action.batch < 0):
                yield from (_reduce(ActionType.REDUCE_START, steady[final], kind) for kind in kinds(action.stage))

    return replace(schedule, programs=programs_of(call(program.steady) for program in schedule.programs))


def _updates_after_first_backward(steady: tuple[Action, ...]) -> tuple[int, list[Action]]:
    """Where the call's first backward is, and the updates of earlier batches that come after it."""
    first = next(i for i, action in enumerate(steady) if action.type is ActionType.BACKWARD)
    return first, [a for a in steady[first:] if a.type is ActionType.UPDATE and a.batch < 0]


def _reduce(type_: ActionType, of: Action, kind: Reduction) -> Action:
    return Action(type_, of.stage, batch=of.batch, reduction=kind)


def add_transfers(schedule: Schedule) -> Schedule:
    """Send every result that another rank needs; post its receive one compute action ahead of its use.

    Sends follow the action that produced the tensor. A call posts exactly the receives of what its
    peers send in that call: what the next call uses first before the last compute action of this one, with which it
    overlaps, and what that uses later at the end.

    All ranks have to reach their wait for a norm, and the first and the last stage the start of the embedding's sum. In
    one hardware queue these hold up everything behind them, and so does a transfer whose predecessor is not complete. So
    what a peer sends before such a meeting is received before this rank comes to it, but for the last one of each
    channel, behind which there is none.

    Where a rank has several stages, tensors may lie there for long before they are used, and two ranks that each
    wait for the other to post a receive would never go on. There a receive is posted before the action during which
    its tensor comes.

    Raises:
        ScheduleError: a tensor is used neither in the call that sends it nor in the next.
    """
    steady = [program.steady for program in schedule.programs]
    ends = clock(schedule, steady) if any(len(schedule.stages_of(rank)) > 1 for rank in range(len(steady))) else {}
    sending = [tuple(_with_sends(schedule, rank, program)) for rank, program in enumerate(schedule.programs)]
    incoming: list[list[Action]] = [[] for _ in sending]
    before: list[dict[Reduction, set[Action]]] = [{kind: set() for kind in Reduction} for _ in sending]
    for call in sending:
        for action in filter(_is_send, call):
            incoming[schedule.peer_of(action)].append(action.other_end())
        # Middle stages do not meet for the embedding, but have to get to the end for it.
        for kind, end in {Reduction.EMBEDDING: len(call), **_meetings(call)}.items():
            channels: dict[tuple[ActionType, int], list[Action]] = {}
            for action in filter(_is_send, call[:end]):
                channels.setdefault((action.type, schedule.peer_of(action)), []).append(action.other_end())
            for (_, peer), receives in channels.items():
                before[peer][kind].update(receives[:-1])
    calls = map(_with_receives, sending, incoming, before, repeat(ends))
    return replace(schedule, programs=programs_of(calls))


def _is_send(action: Action) -> bool:
    return action.type in SENDS


def _meetings(call: tuple[Action, ...]) -> dict[Reduction, int]:
    """Where in a call the rank comes to wait for others: the norm of an earlier batch, and the embedding's sum."""
    found: dict[Reduction, int] = {}
    for i, (type_, *_, batch, _, reduction) in enumerate(call):
        is_norm = reduction is Reduction.NORM and type_ is ActionType.REDUCE_WAIT and batch < 0
        if is_norm or (reduction is Reduction.EMBEDDING and type_ is ActionType.REDUCE_START):
            found.setdefault(reduction, i)
    return found


def _with_sends(schedule: Schedule, rank: int, program: Program) -> Iterable[Action]:
    for action in program.steady:
        yield action
        if action.type not in COMPUTE:
            continue
        type_ = ActionType.SEND_FORWARD if action.type is ActionType.FORWARD else ActionType.SEND_BACKWARD
        send = Action(type_, action.stage, action.microbatch, action.batch)
        if schedule.peer_of(send) not in (None, rank):
            yield send


def _with_receives(
    call: tuple[Action, ...],
    receives: list[Action],
    before: dict[Reduction, set[Action]],
    ends: dict[ActionKey, int],
) -> Iterable[Action]:
    posted = _posted_as_sent(call, receives, ends) if ends else _posted_ahead_of_use(call, receives)
    for kind, meeting in _meetings(call).items():
        late = [i for i in sorted(posted) if i > meeting]
        early = [receive for i in late for receive in posted[i] if receive in before[kind]]
        for i in late:
            posted[i] = [receive for receive in posted[i] if receive not in before[kind]]
        posted.setdefault(meeting, []).extend(early)
    for i, action in enumerate((*call, None)):
        yield from sorted(posted.get(i, ()), key=lambda receive: receive.type is ActionType.RECV_FORWARD)
        if action is not None:
            yield action


def _posted_ahead_of_use(call: tuple[Action, ...], receives: list[Action]) -> dict[int, list[Action]]:
    """By index in ``call``: the receives to post before it; its length for those to post at the end.

    A gradient is not received before the send that brings it about: what loads kernels in that forward waits, on a GPU,
    for everything that this rank has posted, and so would wait for itself.
    """
    compute = [i for i, action in enumerate(call) if action.type in COMPUTE]
    # The order of use goes on into the next call, whose compute actions are these, one batch later.
    uses = [(call[i], calls) for calls in (0, 1) for i in compute]
    slot_of = {
        (action.type, action.stage, action.microbatch, action.batch + calls): max(use - 1, 0)
        for use, (action, calls) in reversed([*enumerate(uses)])
    }
    posted: dict[int, list[Action]] = {}
    for receive in receives:
        type_ = ActionType.FORWARD if receive.type is ActionType.RECV_FORWARD else ActionType.BACKWARD
        slot = slot_of.get((type_, receive.stage, receive.microbatch, receive.batch))
        if slot is None:
            raise ScheduleError(f"{receive} is received in a call in which, and in the next, no {type_} uses it")
        if type_ is ActionType.BACKWARD and slot < len(compute):
            slot += call[compute[slot]]._replace(version=None) == receive._replace(type=ActionType.FORWARD)
        posted.setdefault(compute[slot] if slot < len(compute) else len(call), []).append(receive)
    return posted


def _posted_as_sent(
    call: tuple[Action, ...], receives: list[Action], ends: dict[ActionKey, int]
) -> dict[int, list[Action]]:
    """The same, those of earlier tensors first."""
    compute = [i for i, action in enumerate(call) if action.type in COMPUTE]
    posted: dict[int, list[Action]] = {}
    running = 0
    for sent_at, receive in in_order_of_sends(receives, ends):
        while running < len(compute) - 1 and ends.get(call[compute[running]][:4], 0) < sent_at:
            running += 1
        posted.setdefault(compute[running], []).append(receive)
    return posted
