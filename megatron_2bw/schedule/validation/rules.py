"""The rules that one rank's actions have to keep, in the order in which it runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from megatron_2bw.schedule.action import Action, ActionType, Reduction
from megatron_2bw.schedule.calls import Span
from megatron_2bw.schedule.program import GradientCopy, Schedule


class Rule(StrEnum):
    """What a schedule can do wrong; error messages start with it."""

    DECLARATION = "bad declaration"
    """The schedule's own bounds do not fit its Programs."""
    MISSING = "missing action"
    """Every rank does each thing that its stages need once per batch."""
    DUPLICATE = "duplicate action"
    """... and only once."""
    FOREIGN = "action out of place"
    """... and nothing else."""
    BATCH = "batch out of range"
    """Only updates and reductions may name a batch from before the run, where they do nothing."""
    VERSION = "wrong weight version"
    """F and B of batch t compute with W(t - delay), or W(t) where the microbatch has no delay."""
    NOT_CREATED = "version not created yet"
    """... which its update has created: otherwise the update comes too late."""
    OVERWRITTEN = "version overwritten"
    """... and no later update has written into its place."""
    NO_INPUT = "input missing"
    """Inputs are computed on this rank or their receive is posted."""
    NO_FORWARD = "backward before its forward"
    """A backward follows its own forward."""
    NOTHING_TO_SEND = "send out of place"
    """A send follows the action that made the tensor, and an activation's comes before its backward."""
    IN_FLIGHT = "too many in flight"
    """Forwards without backward stay within ``Schedule.in_flight``."""
    UPDATE_EARLY = "update too early"
    """An update follows the last backward of its batch."""
    START_EARLY = "reduction started too early"
    """Reductions start after the last backward of their batch."""
    START_LATE = "reduction started too late"
    """Gradients are captured before the next batch's first backward adds to them."""
    UNSAVED = "gradients overwritten"
    """Where only a shard of them is kept, or nothing, that backward comes after their sum, or their update."""
    CAPTURE = "captured gradients overwritten"
    """There is one buffer for captured gradients, free again when their update is done."""
    CHAIN = "reduction order"
    """Every rank starts a batch's reductions in the order of the chain, so all members agree."""
    WAIT_EARLY = "reduction waited for too early"
    """A reduction is waited for after its start."""
    WAIT_LATE = "reduction waited for too late"
    """An update follows the wait for every reduction of its batch."""
    LEFT_OVER = "left over after the last call"
    """A drain leaves nothing behind."""
    TRANSFER_ORDER = "transfers in different order"
    """Channels are first in, first out: both sides list the same transfers in the same order."""
    BOUNDARY = "transfers in flight"
    """At the end of a call at most ``Schedule.per_boundary`` tensors are between two stages, on their way or not
    used yet."""
    DEADLOCK = "deadlock"
    """All ranks come to the end of every run."""


class RuleBroken(Exception):
    """A rule, what breaks it, and where, as far as the one who raises it knows: by an action of a rank; or by a rank as
    such; in a part of a run, or in all of it."""

    def __init__(
        self, rule: Rule, detail: str, rank: int | None = None, span: Span | None = None, action: Action | None = None
    ) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail
        self.rank, self.span, self.action = rank, span, action


class RankRules:
    """Follows one rank through its calls, with every batch and version counted from the start.

    Args:
        schedule: lowered, with each action once per call.
        rank: whom to follow.
        chain: reductions that this rank takes part in, in order.
    """

    def __init__(self, schedule: Schedule, rank: int, chain: tuple[Reduction, ...]) -> None:
        self._schedule = schedule
        self._rank = rank
        self._chain = chain
        self._slots = schedule.weight_versions[rank]
        self._in_flight = schedule.in_flight[rank]
        self._last = schedule.stages - 1
        self._first = 0
        actions = schedule.programs[rank].steady
        self._here = {(action.stage, action.microbatch) for action in actions if action.type is ActionType.FORWARD}
        self._backwards = Counter(action.stage for action in actions if action.type is ActionType.BACKWARD)
        self._newest = dict.fromkeys(self._backwards, 0)
        self._left: dict[tuple[int, int], int] = {}
        """Backwards of a (stage, batch) still to come."""
        self._open: set[tuple[int, int | None, int]] = set()
        """Stage, microbatch and batch of forwards without their backward."""
        self._inputs: set[tuple[ActionType, int, int | None, int]] = set()
        """Type, stage, microbatch and batch of a forward or backward: receives posted and results of this rank's
        other stages."""
        self._to_send: set[tuple[ActionType, int, int | None, int, None, None]] = set()
        """The fields of an Action; plain tuples, here and above, are made in a third of the time."""
        self._started: dict[int, list[Reduction]] = {}
        self._waited: dict[int, set[Reduction]] = {}
        self._handlers: dict[ActionType, Callable[[Action, int], None]] = {
            ActionType.FORWARD: self._forward,
            ActionType.BACKWARD: self._backward,
            ActionType.SEND_FORWARD: self._send,
            ActionType.SEND_BACKWARD: self._send,
            ActionType.RECV_FORWARD: self._receive,
            ActionType.RECV_BACKWARD: self._receive,
            ActionType.REDUCE_START: self._reduce_start,
            ActionType.REDUCE_WAIT: self._reduce_wait,
            ActionType.UPDATE: self._update,
        }

    def begin(self, first: int) -> None:
        """A run starts with batch ``first``."""
        self._first = first

    def step(self, action: Action, call: int) -> None:
        """Run ``action`` in ``call``.

        Raises:
            RuleBroken: by this action, given all before it.
        """
        batch = action.batch + call
        if batch < self._first:
            if action.type in (ActionType.UPDATE, ActionType.REDUCE_START, ActionType.REDUCE_WAIT):
                return
            raise RuleBroken(Rule.BATCH, f"batch {batch} comes before the first batch, {self._first}")
        self._handlers[action.type](action, batch)

    def end(self, batches: int) -> None:
        """A run has ended after batch ``batches - 1``.

        Raises:
            RuleBroken: something is left over.
        """
        for what, left in (
            ("no backward for", {f"{stage}F{microbatch}" for stage, microbatch, _ in self._open}),
            ("no use of the input of", {f"{stage}{type_}{microbatch}" for type_, stage, microbatch, _ in self._inputs}),
            ("no", {str(Action(*send)) for send in self._to_send}),
        ):
            if left:
                raise RuleBroken(Rule.LEFT_OVER, f"{what} {', '.join(sorted(left))}")
        for stage, newest in self._newest.items():
            if newest < batches:
                raise RuleBroken(Rule.LEFT_OVER, f"stage {stage} has no update for batch {newest}")

    def _forward(self, action: Action, batch: int) -> None:
        stage, microbatch = action.stage, action.microbatch
        self._check_version(action, batch)
        if stage > 0:
            self._take(ActionType.FORWARD, stage, microbatch, batch)
        self._open.add((stage, microbatch, batch))
        if len(self._open) > self._in_flight:
            raise RuleBroken(
                Rule.IN_FLIGHT,
                f"{len(self._open)} forwards without their backward; rank {self._rank} declares {self._in_flight}",
            )
        if stage < self._last:
            self._give(action, batch, ActionType.SEND_FORWARD, stage + 1)

    def _backward(self, action: Action, batch: int) -> None:
        stage, microbatch = action.stage, action.microbatch
        if (stage, microbatch, batch) not in self._open:
            raise RuleBroken(Rule.NO_FORWARD, f"microbatch {microbatch} of batch {batch} has no forward before it")
        self._check_version(action, batch)
        unsent = ActionType.SEND_FORWARD, stage, microbatch, batch, None, None
        if unsent in self._to_send:
            raise RuleBroken(
                Rule.NOTHING_TO_SEND, f"{Action(*unsent)} comes after this backward, which frees its tensor"
            )
        if stage < self._last:
            self._take(ActionType.BACKWARD, stage, microbatch, batch)
        self._check_saved(stage, batch)
        self._open.remove((stage, microbatch, batch))
        self._left[stage, batch] = self._left.get((stage, batch), self._backwards[stage]) - 1
        if stage > 0:
            self._give(action, batch, ActionType.SEND_BACKWARD, stage - 1)

    def _check_saved(self, stage: int, batch: int) -> None:
        """Batch ``batch`` is about to add to the gradients of the batch before it."""
        before = batch - 1
        if before < self._first or self._newest[stage] >= batch:
            return
        if before not in self._started:
            raise RuleBroken(
                Rule.START_LATE, f"gradients of batch {before} must be captured before batch {batch} adds to them"
            )
        copy, waited = self._schedule.gradient_copy, self._waited.get(before, ())
        if copy is GradientCopy.NONE or (copy is GradientCopy.SHARD and Reduction.GRADIENTS not in waited):
            what = "the UPDATE" if copy is GradientCopy.NONE else "the wait for the sum over replicas"
            raise RuleBroken(
                Rule.UNSAVED, f"{what} of batch {before} must come before batch {batch} adds to the same buffer"
            )

    def _check_version(self, action: Action, batch: int) -> None:
        version, newest = action.version + batch - action.batch, self._newest[action.stage]
        if version < 0:
            version = 0
        if version > newest:
            raise RuleBroken(
                Rule.NOT_CREATED,
                f"it needs W({version}), the newest is W({newest}): the UPDATE of batch {newest} is late",
            )
        if version <= newest - self._slots:
            raise RuleBroken(
                Rule.OVERWRITTEN,
                f"it needs W({version}), but the update that made W({newest}) was too early: "
                f"rank {self._rank} declares {self._slots} weight version{'s' if self._slots > 1 else ''}",
            )

    def _take(self, consumer: ActionType, stage: int, microbatch: int | None, batch: int) -> None:
        key = consumer, stage, microbatch, batch
        if key not in self._inputs:
            raise RuleBroken(
                Rule.NO_INPUT, f"{stage}RECV_{consumer}{microbatch} of batch {batch} is not posted before it"
            )
        self._inputs.remove(key)

    def _give(self, producer: Action, batch: int, send: ActionType, user: int) -> None:
        if (user, producer.microbatch) in self._here:
            self._inputs.add((producer.type, user, producer.microbatch, batch))
        else:
            self._to_send.add((send, producer.stage, producer.microbatch, batch, None, None))

    def _send(self, action: Action, batch: int) -> None:
        key = action.type, action.stage, action.microbatch, batch, action.version, action.reduction
        if key not in self._to_send:
            raise RuleBroken(Rule.NOTHING_TO_SEND, f"its tensor, of batch {batch}, is not there")
        self._to_send.remove(key)

    def _receive(self, action: Action, batch: int) -> None:
        consumer = ActionType.FORWARD if action.type is ActionType.RECV_FORWARD else ActionType.BACKWARD
        self._inputs.add((consumer, action.stage, action.microbatch, batch))

    def _backwards_left(self, batch: int, stage: int | None = None) -> int:
        return sum(
            self._left.get((s, batch), count) for s, count in self._backwards.items() if stage is None or s == stage
        )

    def _reduce_start(self, action: Action, batch: int) -> None:
        left = self._backwards_left(batch)
        if left:
            raise RuleBroken(Rule.START_EARLY, f"backwards of batch {batch} still to come: {left}")
        if min(self._newest.values()) < batch:
            raise RuleBroken(
                Rule.CAPTURE, f"batch {batch} overwrites gradients of batch {batch - 1}, whose UPDATE is still to come"
            )
        started = self._started.setdefault(batch, [])
        expected = self._chain[len(started)]
        if action.reduction is not expected:
            chain = ", ".join(self._chain)
            raise RuleBroken(Rule.CHAIN, f"{expected} of batch {batch} has to start first; the chain is {chain}")
        started.append(action.reduction)

    def _reduce_wait(self, action: Action, batch: int) -> None:
        if action.reduction not in self._started.get(batch, ()):
            detail = f"{action.reduction} of batch {batch} has not been started"
            left = self._backwards_left(batch)
            raise RuleBroken(Rule.WAIT_EARLY, f"{detail}; backwards of that batch still to come: {left}")
        self._waited.setdefault(batch, set()).add(action.reduction)

    def _update(self, action: Action, batch: int) -> None:
        stage = action.stage
        left = self._backwards_left(batch, stage)
        if left:
            raise RuleBroken(Rule.UPDATE_EARLY, f"backwards of batch {batch} still to come on stage {stage}: {left}")
        missing = [kind for kind in self._chain if kind not in self._waited.get(batch, ())]
        if missing:
            raise RuleBroken(Rule.WAIT_LATE, f"waits for {', '.join(missing)} of batch {batch} have to come before it")
        # Updates come batch by batch: a batch cannot get here before the update of the one before it.
        self._newest[stage] = batch + 1
