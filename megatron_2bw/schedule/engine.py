"""Runs the Programs of all ranks together; the validator and the simulator both stand on it.

Every rank is a generator that walks through its actions and yields the key of what it has to wait
for. Nothing ever takes back a key that is there, so the order in which ranks advance changes
neither the times nor whether they get stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from megatron_2bw.schedule.action import ACTIVATIONS, OTHER_END, SENDS, TRANSFERS, Action, ActionType, Reduction
from megatron_2bw.schedule.calls import Part, Span, groups, walk_of
from megatron_2bw.schedule.durations import Durations, Seconds
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule


class Model(StrEnum):
    """What happens to an action that cannot finish yet."""

    HOST = "buffered sends"
    """Sends are buffered and receives are only posted; F and B wait for their input."""
    POSTED = "receives that are posted"
    """The same, but a transfer begins only when its receive is posted, too, behind what that rank has issued before, as
    over NCCL: for the times of orders of receives."""
    IN_ORDER_QUEUE = "one in-order hardware queue"
    """What ``CUDA_DEVICE_MAX_CONNECTIONS=1`` gives: actions are issued in order; a transfer is complete once
    both sides have issued it, and until then the next one of its channel holds up everything behind it. A norm's
    collective starts only when the host waits for it, behind all that the rank has issued before. That is the worst case:
    it is for finding deadlocks, not for times."""
    FIRST_USE = "one in-order hardware queue, every kernel used for the first time"
    """The same, from a job's first call on: also, each action of a call with the order of `as_sent` waits for all that
    its rank has posted before it, as CUDA does to load a kernel."""


class Blocked(NamedTuple):
    """Where a rank stands that will never go on."""

    rank: int
    span: Span
    action: Action


class Timed(NamedTuple):
    """A forward, backward or update as written in the Program, the call it ran in, and when."""

    action: Action
    call: int
    start_s: Seconds
    end_s: Seconds


class Outcome(NamedTuple):
    """What became of a run."""

    timed: tuple[list[Timed], ...]
    """Per rank, in order; updates of batches before the run are left out."""
    blocked: tuple[Blocked, ...]
    """Empty unless the run got stuck."""
    arrivals_s: tuple[tuple[Seconds, ...], ...]
    """Per batch: when its tensors arrived and its reductions ended, in an order that all batches share."""


def run(
    schedule: Schedule,
    runs: Iterable[int],
    durations: Durations,
    *,
    model: Model = Model.HOST,
    delays: Mapping[tuple[int, Action], Seconds] | None = None,
    record: bool = True,
) -> Outcome:
    """Run the Programs of all ranks of a lowered schedule together.

    Args:
        schedule: with transfers and reductions in place.
        runs: calls of each run; every run ends with a drain.
        durations: of every action.
        model: what waiting means.
        delays: by how much single actions take longer; the key is (rank, action), the action's batch and
            version counted from the start.
        record: without it, ``Outcome.timed`` and ``Outcome.arrivals_s`` stay empty.
    """
    return _Engine(schedule, runs, durations, model, dict(delays or {}), record).run()


class _Step(NamedTuple):
    """An action compiled; keys are those of call 0."""

    action: Action
    cost: Seconds
    awaits: int | None = None
    gives: int | None = None
    channel: int | None = None
    of_batch: int | None = None
    """Batch of an update or reduction."""
    begins: bool = False
    """Whether the reduction that this awaits starts here, unless it has for another stage of the rank."""
    send_s: Seconds = 0
    """Of a transfer, during which the rank goes on."""


class _Engine:
    def __init__(
        self,
        schedule: Schedule,
        runs: Iterable[int],
        durations: Durations,
        model: Model,
        delays: dict[tuple[int, Action], Seconds],
        record: bool,
    ) -> None:
        self._schedule = schedule
        self._durations = durations
        self._model = model
        self._delays = delays
        self._record = record
        self._posted = model is not Model.HOST
        self._queued = model not in (Model.HOST, Model.POSTED)
        self._spans = walk_of(schedule, runs, from_start=model is Model.FIRST_USE)
        self._ranks = range(len(schedule.programs))
        self._groups = groups(schedule)
        self._channels: dict[tuple[int | None, int | None, bool], int] = {}
        # Keys are numbers, tuples would cost half of the time: one block per batch.
        self._stride = 2 * schedule.stages * schedule.microbatches + len(Reduction) * len(self._ranks)
        parts = {part: part.of(schedule) for part in {span.part for span in self._spans}}
        self._steps = [self._compiled(rank, {part: parts[part][rank] for part in parts}) for rank in self._ranks]
        self._timed: tuple[list[Timed], ...] = tuple([] for _ in self._ranks)
        self._there: dict[int, Seconds] = {}
        self._waiting: dict[int, list[int]] = {}
        self._ready = list(self._ranks)
        self._position: list[tuple[Span, Action] | None] = [None for _ in self._ranks]
        self._channel_free_s: dict[int, Seconds] = {}
        self._issued_s: dict[int, Seconds] = {}
        reductions = {
            self._reduction_key(kind, rank): (ranks, durations.of_reduction(kind))
            for (kind, rank), ranks in self._groups.items()
        }
        self._chains = _Chains(reductions, self._stride, self._provide)

    def run(self) -> Outcome:
        walks = [self._walk(rank) for rank in self._ranks]
        while self._ready:
            rank = self._ready.pop()
            key = next(walks[rank], None)
            if key is not None:
                self._waiting.setdefault(key, []).append(rank)
        if self._delays:
            rank, action = next(iter(self._delays))
            raise ScheduleError(f"cannot delay {action} on rank {rank}: it does not occur in this run")
        stuck = sorted(rank for ranks in self._waiting.values() for rank in ranks)
        blocked = tuple(Blocked(rank, *self._position[rank]) for rank in stuck)
        return Outcome(self._timed, blocked, self._arrivals_s() if self._record else ())

    def _arrivals_s(self) -> tuple[tuple[Seconds, ...], ...]:
        there, stride, batches = self._there, self._stride, self._spans[-1].call + 1
        blocks = (range(batch * stride, (batch + 1) * stride) for batch in range(batches))
        return tuple(tuple(there[key] for key in block if key in there) for block in blocks)

    def _compiled(self, rank: int, parts: Mapping[Part, Iterable[Action]]) -> dict[Part, list[_Step]]:
        known: dict[Action, _Step] = {}  # A drain repeats most of the steady call.
        compiled: dict[Part, list[_Step]] = {}
        for part, actions in parts.items():
            steps = compiled[part] = []
            for action in actions:
                step = known.get(action)
                if step is None:
                    step = known[action] = self._step(rank, action)
                steps.append(step)
        if not self._posted:  # Posting a receive does nothing that the others could see.
            for part, steps in compiled.items():
                compiled[part] = [step for step in steps if step.channel is None or step.action.type in SENDS]
        return compiled

    def _step(self, rank: int, action: Action) -> _Step:
        type_, batch, stage = action.type, action.batch, action.stage
        if type_ in TRANSFERS:
            forward = type_ in ACTIVATIONS
            peer = self._schedule.peer_of(action)
            consumer, source, destination = stage, peer, rank
            if type_ in SENDS:
                consumer, source, destination = stage + OTHER_END[type_][1], rank, peer
            key, channel = self._transfer_key(action, consumer, forward), self._channel(source, destination, forward)
            send_s = self._durations.of_transfer(consumer - 1 if forward else consumer, self._schedule.stages)
            return _Step(action, 0, None, key, channel, send_s=send_s)
        if type_ in (ActionType.REDUCE_START, ActionType.REDUCE_WAIT):
            key = self._reduction_key(action.reduction, rank) + batch * self._stride
            is_late = self._queued and action.reduction is Reduction.NORM
            if type_ is ActionType.REDUCE_WAIT:
                return _Step(action, 0, awaits=key, of_batch=batch, begins=is_late)
            if self._queued and action.reduction is Reduction.EMBEDDING:
                return _Step(action, 0, awaits=key, of_batch=batch, begins=True)
            return _Step(action, 0, gives=None if is_late else key, of_batch=batch)
        cost = self._durations.of_stage(type_, stage, self._schedule.stages)
        if type_ is ActionType.UPDATE:
            return _Step(action, cost, of_batch=batch)
        forward = type_ is ActionType.FORWARD
        remote = self._schedule.rank_of(stage + (-1 if forward else 1), action.microbatch) not in (None, rank)
        return _Step(action, cost, self._transfer_key(action, stage, forward) if remote else None)

    def _channel(self, source: int | None, destination: int | None, forward: bool) -> int:
        """A number for the transfers of one kind between two ranks, which are first in, first out."""
        return self._channels.setdefault((source, destination, forward), len(self._channels))

    def _transfer_key(self, action: Action, consumer: int, forward: bool) -> int:
        index = 2 * (consumer * self._schedule.microbatches + action.microbatch) + forward
        return index + action.batch * self._stride

    def _reduction_key(self, kind: Reduction, rank: int) -> int:
        index = list(Reduction).index(kind) * len(self._ranks)
        members = self._groups[kind, rank]
        first = min(members) if rank in members else rank  # A rank that takes no part starts none.
        return 2 * self._schedule.stages * self._schedule.microbatches + index + first

    def _provide(self, key: int, time_s: Seconds) -> None:
        self._there[key] = time_s
        if key in self._waiting:
            self._ready.extend(self._waiting.pop(key))

    def _walk(self, rank: int) -> Iterator[int]:
        """Run one rank's actions; yields the key of what it waits for, each time it has to."""
        there, timed, delays, stride = self._there, self._timed[rank], self._delays, self._stride
        queued, record, first_use = self._queued, self._record, self._model is Model.FIRST_USE
        last_of_channel: dict[int, int] = {}
        posted: list[int] = []
        begun = -1
        now_s: Seconds = 0
        for span in self._spans:
            call = span.call
            base = call * stride
            for action, cost, awaits, gives, channel, of_batch, begins, send_s in self._steps[rank][span.part]:
                if of_batch is not None and of_batch + call < span.first:
                    continue
                if delays:
                    cost += delays.pop((rank, action.shifted(call)), 0)
                if first_use and span.part.as_sent:
                    if channel is not None:
                        posted.append(gives + base)
                    elif posted:
                        self._position[rank] = span, action
                        for key in posted:
                            while key not in there:
                                yield key
                        now_s = max(now_s, *map(there.__getitem__, posted))
                        posted.clear()
                key = None if awaits is None else awaits + base
                if begins and key > begun:
                    self._chains.start(rank, key, now_s)
                    begun = key
                if queued and channel is not None:
                    key = last_of_channel.get(channel)
                    last_of_channel[channel] = gives + base
                if key is not None:
                    while key not in there:
                        self._position[rank] = span, action
                        yield key
                    if there[key] > now_s:
                        now_s = there[key]
                start_s = now_s
                now_s += cost
                if channel is not None:
                    self._transfer(gives + base, channel, now_s, send_s)
                elif gives is not None:
                    self._chains.start(rank, gives + base, now_s)
                elif record and action.reduction is None:
                    timed.append(Timed(action, call, start_s, now_s))

    def _transfer(self, key: int, channel: int, now_s: Seconds, send_s: Seconds) -> None:
        """A send is issued, or where receives count, either side: the tensor moves once all that has to be is."""
        begin_s = now_s
        if self._posted:
            issued_s = self._issued_s.pop(key, None)
            if issued_s is None:
                self._issued_s[key] = now_s
                return
            begin_s = max(begin_s, issued_s)
        free_s = self._channel_free_s.get(channel, 0)
        end_s = (free_s if free_s > begin_s else begin_s) + send_s
        self._channel_free_s[channel] = end_s
        self._provide(key, end_s)


class _Chains:
    """Reductions in the background: each rank runs those it started in order, each with all its members."""

    def __init__(
        self,
        reductions: dict[int, tuple[tuple[int, ...], Seconds]],
        stride: int,
        provide: Callable[[int, Seconds], None],
    ) -> None:
        self._reductions = reductions
        self._stride = stride
        self._provide = provide
        self._queues: dict[int, deque[tuple[int, Seconds]]] = {}
        self._free_s: dict[int, Seconds] = {}
        self._entered: dict[int, list[Seconds]] = {}

    def start(self, rank: int, key: int, now_s: Seconds) -> None:
        """From ``now_s`` on, ``rank`` is ready for the reduction ``key``, once those before it are complete."""
        queue = self._queues.setdefault(rank, deque())
        queue.append((key, now_s))
        heads = [rank] if len(queue) == 1 else []
        while heads:
            rank = heads.pop()
            key, start_s = self._queues[rank][0]
            ready = self._entered.setdefault(key, [])
            ready.append(max(start_s, self._free_s.get(rank, 0)))
            group, cost_s = self._reductions[key % self._stride]
            if len(ready) < len(group):
                continue
            end_s = max(ready) + cost_s
            for member in group:
                self._queues[member].popleft()
                self._free_s[member] = end_s
            heads.extend(member for member in group if self._queues[member])
            self._provide(key, end_s)
