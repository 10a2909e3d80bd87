"""A small machine that carries Programs out, to judge them by what comes out of it.

It shares no code with the validator and knows none of its rules. It has what real ranks have:
channels that deliver in order, whatever the label says; a ring of weight slots; one gradient
accumulator and one buffer for captured gradients; collectives that pair up by position. Tensors
are hashes of all that they were computed from, so anything wrong anywhere changes the weights.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count

from megatron_2bw.schedule.action import Action, ActionType, Reduction
from megatron_2bw.schedule.program import GradientCopy, Program, Schedule

MODULUS = 2**61 - 1


class WrongError(Exception):
    """The Programs crash, hang, leave something over, exceed a bound or compute something else."""


def mix(*values: object) -> int:
    """A tensor that depends on all of ``values``."""
    return hash(values) % MODULUS


def is_right(schedule: Schedule, runs: tuple[int, ...], seed: int = 0) -> bool:
    """Whether every way of running the ranks gives what delayed training gives, on both kinds of hardware."""
    try:
        for queued in (False, True):
            Machine(schedule, runs, queued=queued).run(random.Random(seed), eager=0.0)
            Machine(schedule, runs, queued=queued).run(random.Random(seed + 1), eager=0.3)
    except WrongError:
        return False
    return True


class Machine:
    """All ranks of a lowered schedule with one stage each."""

    def __init__(self, schedule: Schedule, runs: tuple[int, ...], *, queued: bool) -> None:
        self.schedule, self.queued = schedule, queued
        ranks = range(len(schedule.programs))
        self.runs = runs
        self.in_place = schedule.gradient_copy is GradientCopy.NONE
        self.todo = [deque(script(program, runs)) for program in schedule.programs]
        self.first = [0 for _ in ranks]
        self.slots = [[mix("W0", rank)] * schedule.weight_versions[rank] for rank in ranks]
        self.newest = [mix("W0", rank) for rank in ranks]
        self.updates: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self.accumulated = [0 for _ in ranks]
        self.captured = [0 for _ in ranks]
        self.collected: list[dict[Reduction, int]] = [{} for _ in ranks]
        self.background: list[deque[tuple[Reduction, int]]] = [deque() for _ in ranks]
        self.late: list[list[tuple[Reduction, int]]] = [[] for _ in ranks]
        self.reduced: list[dict[tuple[Reduction, int], int]] = [{} for _ in ranks]
        self.stash: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in ranks]
        self.gradients: list[dict[tuple[int, int], int]] = [{} for _ in ranks]
        self.losses: dict[tuple[int, int], int] = {}
        self.sent: dict[tuple[int, int], list[int]] = {}
        self.posted: dict[tuple[int, int], int] = {}
        self.receives: list[dict[tuple[str, int, int], tuple[tuple[int, int], int]]] = [{} for _ in ranks]
        self.used: Counter[tuple[int, int]] = Counter()
        self.at_call_end: dict[tuple[int, int], dict[tuple[int, int], Counter[str]]] = {}
        self.chain = [
            kind for kind in Reduction if any(a.reduction is kind for p in schedule.programs for a in p.steady)
        ]

    def run(self, rng: random.Random, eager: float) -> None:
        """Let ranks run in any order, reductions at the last moment or, with ``eager``, some of them earlier."""
        while any(self.todo):
            order = [rank for rank, todo in enumerate(self.todo) if todo]
            rng.shuffle(order)
            moved = False
            for rank in order:
                while self.todo[rank] and self.step(rank, *self.todo[rank][0]):
                    self.todo[rank].popleft()
                    moved = True
                    if rng.random() < eager:
                        self.reduce_one()
            if not moved and not any(self.reduce_for(rank) for rank in order):
                raise WrongError("hang")
        while self.reduce_one():
            pass
        self.check_result()

    def step(self, rank: int, call: int, action: Action | str) -> bool:
        """Carry out one action; False if the rank has to wait."""
        if action == "begin":
            self.first[rank] = call
            return True
        if action == "end":
            self.end_of_call(rank, call)
            return True
        if action.type in (ActionType.UPDATE, ActionType.REDUCE_START, ActionType.REDUCE_WAIT):
            if action.batch < self.first[rank]:
                return True
        elif action.batch < 0:
            raise WrongError("there is no such batch")
        try:
            return getattr(self, action.type.lower())(rank, action) is not False
        except KeyError as error:
            raise WrongError(f"{action} on rank {rank} finds nothing at {error}") from None

    def f(self, rank: int, action: Action) -> bool | None:
        key = action.microbatch, action.batch
        received = mix("data", *key) if rank == 0 else self.take(rank, "F", key)
        if received is None:
            return False
        output = mix("F", received, self.weights(rank, action))
        self.stash[rank][key] = received, output
        if len(self.stash[rank]) > self.schedule.in_flight[rank]:
            raise WrongError("out of memory")
        if rank == self.schedule.stages - 1:
            self.losses[key] = output
        return None

    def b(self, rank: int, action: Action) -> bool | None:
        key = action.microbatch, action.batch
        stashed = self.stash[rank][key]
        gradient = mix("loss", stashed) if rank == self.schedule.stages - 1 else self.take(rank, "B", key)
        if gradient is None:
            return False
        del self.stash[rank][key]
        weights = self.weights(rank, action)
        self.accumulated[rank] = (self.accumulated[rank] + mix("W", stashed, gradient, weights)) % MODULUS
        if rank > 0:
            self.gradients[rank][key] = mix("B", stashed, gradient, weights)
        return None

    def weights(self, rank: int, action: Action) -> int:
        return self.slots[rank][max(action.version, 0) % len(self.slots[rank])]

    def take(self, rank: int, use: str, key: tuple[int, int]) -> int | None:
        channel, index = self.receives[rank][use, *key]
        arrived = len(self.sent.get(channel, ()))
        if self.queued:
            arrived = min(arrived, self.posted.get(channel, 0))
        if index >= arrived:
            return None
        del self.receives[rank][use, *key]
        self.used[channel] += 1
        return self.sent[channel][index]

    def send_f(self, rank: int, action: Action) -> bool:
        return self.send((rank, rank + 1), self.stash[rank][action.microbatch, action.batch][1])

    def send_b(self, rank: int, action: Action) -> bool:
        key = action.microbatch, action.batch
        if not self.send((rank, rank - 1), self.gradients[rank][key]):
            return False
        del self.gradients[rank][key]
        return True

    def send(self, channel: tuple[int, int], tensor: int) -> bool:
        sent = self.sent.setdefault(channel, [])
        if self.queued and len(sent) > self.posted.get(channel, 0):
            return False
        sent.append(tensor)
        return True

    def recv_f(self, rank: int, action: Action) -> bool:
        return self.post((rank - 1, rank), rank, "F", action)

    def recv_b(self, rank: int, action: Action) -> bool:
        return self.post((rank + 1, rank), rank, "B", action)

    def post(self, channel: tuple[int, int], rank: int, use: str, action: Action) -> bool:
        index = self.posted.get(channel, 0)
        if self.queued and index > len(self.sent.get(channel, ())):
            return False
        self.posted[channel] = index + 1
        self.receives[rank][use, action.microbatch, action.batch] = channel, index
        return True

    def reduce_start(self, rank: int, action: Action) -> bool:
        job = action.reduction, action.batch
        blocks = self.queued and action.reduction is Reduction.EMBEDDING  # All that is behind it.
        if blocks and job in {*self.background[rank], *self.reduced[rank]}:
            return job in self.reduced[rank]
        if action.reduction is self.chain[0] and self.schedule.gradient_copy is GradientCopy.WHOLE:
            self.capture(rank)
        if self.queued and action.reduction is Reduction.NORM:  # The host launches it later.
            self.late[rank].append(job)
        else:
            self.background[rank].append(job)
        return not blocks

    def capture(self, rank: int) -> None:
        self.captured[rank], self.accumulated[rank] = self.accumulated[rank], 0

    def reduce_wait(self, rank: int, action: Action) -> bool:
        job = action.reduction, action.batch
        if job in self.late[rank]:  # At the latest; then it is behind all that is in the queue.
            self.late[rank].remove(job)
            self.background[rank].append(job)
        if job not in self.reduced[rank] and job not in self.background[rank]:
            raise WrongError("waits for what was never started")
        if job not in self.reduced[rank]:
            return False
        self.collected[rank][action.reduction] = self.reduced[rank][job]
        return True

    def update(self, rank: int, action: Action) -> None:
        if not self.chain or self.in_place:  # Nothing else takes gradients out of the accumulator.
            self.capture(rank)
        results = [self.collected[rank].pop(kind) for kind in self.chain if rank in self.group(rank, kind)]
        self.newest[rank] = mix("U", self.newest[rank], self.captured[rank], *results)
        self.slots[rank][(action.batch + 1) % len(self.slots[rank])] = self.newest[rank]
        self.updates[rank].append((action.batch, self.newest[rank]))

    def reduce_one(self) -> bool:
        """Carry out one reduction that has all its members; False if there is none."""
        for rank, jobs in enumerate(self.background):
            if not jobs:
                continue
            group = self.group(rank, jobs[0][0])
            if all(self.background[r] and self.group(r, self.background[r][0][0]) == group for r in group):
                self.reduce(group)
                return True
        return False

    def reduce_for(self, rank: int, asked: tuple[int, ...] = ()) -> bool:
        """Carry out one reduction without which ``rank`` cannot go on, and no other; False if there is none."""
        reductions = (ActionType.REDUCE_START, ActionType.REDUCE_WAIT)
        waits = asked or (self.todo[rank] and getattr(self.todo[rank][0][1], "type", None) in reductions)
        if not waits or not self.background[rank] or rank in asked:
            return False
        group = self.group(rank, self.background[rank][0][0])
        for peer in group:
            if not self.background[peer] or self.group(peer, self.background[peer][0][0]) != group:
                return self.reduce_for(peer, (*asked, rank))
        self.reduce(group)
        return True

    def group(self, rank: int, kind: Reduction) -> tuple[int, ...]:
        last = self.schedule.stages - 1
        everyone = tuple(range(self.schedule.stages))
        return {Reduction.GRADIENTS: (rank,), Reduction.EMBEDDING: (0, last)}.get(kind, everyone)

    def reduce(self, group: tuple[int, ...]) -> None:
        jobs = [self.background[rank].popleft() for rank in group]
        if self.schedule.gradient_copy is GradientCopy.SHARD and jobs[0][0] is self.chain[0]:
            for rank in group:
                self.capture(rank)
        gradients = self.accumulated if self.in_place else self.captured
        parts = [mix(kind.value, gradients[rank]) for rank, (kind, _) in zip(group, jobs, strict=True)]
        for rank, (kind, batch) in zip(group, jobs, strict=True):
            if kind in (Reduction.GRADIENTS, Reduction.EMBEDDING):
                gradients[rank] = mix(gradients[rank], *parts)
            self.reduced[rank][kind, batch] = mix(*parts)

    def end_of_call(self, rank: int, call: int) -> None:
        """Note how much this rank has sent, posted and used on each of its channels."""
        for channel in {*self.sent, *self.posted}:
            seen = self.at_call_end.setdefault((min(channel), call), {}).setdefault(channel, Counter())
            if channel[0] == rank:
                seen["sent"] = len(self.sent.get(channel, ()))
            if channel[1] == rank:
                seen["posted"], seen["used"] = self.posted.get(channel, 0), self.used[channel]

    def check_result(self) -> None:
        """Compare with delayed training done by one process, and look for what was left over."""
        left = (*self.stash, *self.gradients, *self.receives, *self.accumulated, *self.background, *self.late)
        if any(left) or any(len(tensors) != self.used[channel] for channel, tensors in self.sent.items()):
            raise WrongError("something is left over")
        for channels in self.at_call_end.values():
            between = sum(max(seen["sent"], seen["posted"]) - seen["used"] for seen in channels.values())
            if between > self.schedule.per_boundary:
                raise WrongError("too much is in flight at the end of a call")
        updates, losses = expected(self.schedule, self.chain, sum(self.runs))
        if self.updates != updates or self.losses != losses:
            raise WrongError("the weights or losses are others")


def script(program: Program, runs: tuple[int, ...]) -> Iterator[tuple[int, Action | str]]:
    """(call, action) in order; ``begin`` opens a run, ``end`` closes a call."""
    calls = count()
    for length in runs:
        for position in range(length):
            call = next(calls)
            left = length - 1 - position
            if position == 0:
                yield call, "begin"
                yield from ((call, action.shifted(call)) for action in program.fill(left))
            yield from ((call, action.shifted(call)) for action in program.call(left))
            yield call, "end"


def expected(
    schedule: Schedule, chain: list[Reduction], batches: int
) -> tuple[list[list[tuple[int, int]]], dict[tuple[int, int], int]]:
    """Updates per stage and losses of training in which batch t computes with W(max(t - delay, 0)).

    Where only the first microbatches of a batch are delayed, the others with W(t).
    """
    stages = range(schedule.stages)
    last = schedule.stages - 1
    versions = [[mix("W0", stage)] for stage in stages]
    losses = {}
    for batch in range(batches):
        older = [versions[stage][max(batch - schedule.delay[stage], 0)] for stage in stages]
        gradients = [0 for _ in stages]
        for microbatch in range(schedule.microbatches):
            delayed = schedule.delayed_microbatches
            is_delayed = delayed is None or microbatch < delayed
            weights = older if is_delayed else [versions[stage][batch] for stage in stages]
            stashed = []
            tensor = mix("data", microbatch, batch)
            for stage in stages:
                output = mix("F", tensor, weights[stage])
                stashed.append((tensor, output))
                tensor = output
            losses[microbatch, batch] = tensor
            gradient = mix("loss", stashed[last])
            for stage in reversed(stages):
                gradients[stage] += mix("W", stashed[stage], gradient, weights[stage])
                gradient = mix("B", stashed[stage], gradient, weights[stage])
        gradients = [gradient % MODULUS for gradient in gradients]
        results: list[list[int]] = [[] for _ in stages]
        for kind in chain:
            before = list(gradients)
            for stage in stages:
                group = {Reduction.GRADIENTS: [stage], Reduction.EMBEDDING: sorted({0, last})}.get(kind, stages)
                if stage not in group:
                    continue
                parts = [mix(kind.value, before[member]) for member in group]
                results[stage].append(mix(*parts))
                if kind in (Reduction.GRADIENTS, Reduction.EMBEDDING):
                    gradients[stage] = mix(before[stage], *parts)
        for stage in stages:
            versions[stage].append(mix("U", versions[stage][-1], gradients[stage], *results[stage]))
    return [list(enumerate(versions[stage][1:])) for stage in stages], losses
