"""Programs: what every rank does in one call, and a schedule as the set of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megatron_2bw.schedule.action import OTHER_END, Action, ActionType, Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All that one rank does, described by one call of the forward-backward function.

    Only the steady call is written. What comes before the first call and how a run comes to its end
    follow from it, so they cannot disagree:

    - ``fill``: what the calls before the first one would have done for batches 0, 1, ...;
    - ``call``: the steady call, near the end without what belongs to batches that never come; the
      last one is followed by what later calls would still have done for the batches up to this one.

    >>> program = Program.parse("0UPDATE@-1 0F0@1v0 0B0v-1")
    >>> print(*program.fill())
    0F0v-1
    >>> print(*program.call(left=0))
    0UPDATE@-1 0B0v-1 0UPDATE
    """

    steady: tuple[Action, ...]

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read a steady call from actions separated by blanks."""
        return cls(steady=tuple(Action.parse(word) for word in text.split()))

    def __str__(self) -> str:
        return " ".join(str(action) for action in self.steady)

    @property
    def ahead(self) -> int:
        """Batches by which its forwards run ahead: so many calls before the end of a run differ."""
        return max((action.batch for action in self.steady), default=0)

    def fill(self, left: int | None = None) -> tuple[Action, ...]:
        """Runs once before the first call, or before the first one after a drain.

        Args:
            left: batches after the first one; None for as many as it takes.
        """
        ahead = self.ahead
        left = ahead if left is None else left
        return tuple(
            action.shifted(-calls)
            for calls in range(ahead, 0, -1)
            for action in self.steady
            if calls <= action.batch <= calls + left
        )

    def call(self, left: int | None = None) -> tuple[Action, ...]:
        """One call.

        Args:
            left: batches after this one; None for as many as it takes.
        """
        if left is None or left >= self.ahead > 0:
            return self.steady
        behind = -min((action.batch for action in self.steady), default=0) if left == 0 else 0
        return tuple(
            action.shifted(calls)
            for calls in range(max(behind, 0) + 1)
            for action in self.steady
            if action.batch <= left - calls
        )


class GradientCopy(StrEnum):
    """What is kept of a batch's gradients, apart from the buffer in which the next batch accumulates."""

    WHOLE = "whole"
    """All of them, copied right after the last backward."""
    SHARD = "shard"
    """This rank's shard, copied once it is summed over the replicas: that sum has to be complete before the
    next batch's first backward."""
    NONE = "none"
    """Nothing: the update has to be complete before the next batch's first backward."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The Programs of all ranks of one pipeline and the bounds they promise to keep.

    A rank may host several stages (bidirectional pipelines), and a stage may live on several ranks
    as long as each (stage, microbatch) has one home; ``rank_of`` finds it in the Programs.
    """

    name: str
    stages: int
    """Pipeline depth d."""
    microbatches: int
    """Microbatches per batch m."""
    programs: tuple[Program, ...]
    """One per rank."""
    delay: tuple[int, ...]
    """Per stage: batch t computes with W(max(t - delay, 0))."""
    delayed_microbatches: int | None = None
    """How many microbatches of a batch, the first ones, are that late; the others compute with W(t). None for all."""
    weight_versions: tuple[int, ...]
    """Per rank: weight versions alive at once, at most."""
    in_flight: tuple[int, ...]
    """Per rank: forwards without their backward, at most."""
    gradient_copy: GradientCopy = GradientCopy.WHOLE
    per_boundary: int = 1
    """Per stage boundary: tensors on their way, or not used yet, at the end of a call, at most."""
    reductions: tuple[Reduction, ...] = tuple(Reduction)
    """What its updates may wait for."""
    late_receives: bool = False
    """Whether all calls, not only a job's first ones, post their receives in the order of `as_sent.as_sent`."""
    options: tuple[tuple[str, int], ...] = ()
    """What ``registry.build`` was given beside its size."""

    @property
    def ahead(self) -> int:
        """Batches by which forwards run ahead, on any rank."""
        return max(program.ahead for program in self.programs)

    @cached_property
    def _homes(self) -> dict[tuple[int, int | None], int]:
        return {
            (action.stage, action.microbatch): rank
            for rank, program in enumerate(self.programs)
            for action in program.steady
            if action.type is ActionType.FORWARD
        }

    def version_of(self, action: Action) -> int:
        """What a forward or backward computes with, by the declared delay."""
        is_delayed = self.delayed_microbatches is None or action.microbatch < self.delayed_microbatches
        return action.batch - (self.delay[action.stage] if is_delayed else 0)

    def rank_of(self, stage: int, microbatch: int | None) -> int | None:
        """Rank that computes ``stage`` for ``microbatch``; None past either end of the pipeline."""
        return self._homes.get((stage, microbatch))

    def stages_of(self, rank: int) -> frozenset[int]:
        """Stages whose weights ``rank`` has."""
        return frozenset(action.stage for action in self.programs[rank].steady)

    def peer_of(self, transfer: Action) -> int | None:
        """Rank at the other end of ``transfer``."""
        _, further = OTHER_END[transfer.type]
        return self.rank_of(transfer.stage + further, transfer.microbatch)


def forward(stage: int, microbatch: int, *, batch: int = 0, delay: int = 0) -> Action:
    """A forward of ``batch`` under a rule of ``delay`` versions."""
    return Action(ActionType.FORWARD, stage, microbatch, batch, batch - delay)


def backward(stage: int, microbatch: int, *, delay: int = 0) -> Action:
    """A backward of the call's batch under a rule of ``delay`` versions."""
    return Action(ActionType.BACKWARD, stage, microbatch, 0, -delay)


def update(stage: int, *, batch: int = 0) -> Action:
    """The update with the gradients of ``batch``, which creates version ``batch + 1``."""
    return Action(ActionType.UPDATE, stage, batch=batch)


def programs_of(calls: Iterable[Iterable[Action]]) -> tuple[Program, ...]:
    """Programs from one sequence of actions per rank."""
    return tuple(Program(steady=tuple(call)) for call in calls)
