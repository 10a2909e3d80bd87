"""Seconds per batch of 2BW, whose pipeline never drains, whatever its stages are, by following the microbatches.

In step i, counted on from batch to batch, stage s runs forward ``i + (1+x)*(d-1-s)`` and then backward i, and updates
where ``schedule.systems.two_bw`` and ``schedule.lowering.with_gradient_copy`` say. What a step needs is of steps before
or of a stage behind. So once everything is equally much later than some steps or batches before, that repeats.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from megatron_2bw.planner.pipeline import periods
from megatron_2bw.planner.pipeline.followed import shift_of
from megatron_2bw.planner.pipeline.periods import ROUNDING, Delay, Pipeline, Stage
from megatron_2bw.planner.pipeline.receives import LateReceives
from megatron_2bw.schedule.program import GradientCopy

_MOST_BATCHES = 200
_MANY_FORWARDS, _MOST_FORWARDS = 20_000, 500_000
_NEAR = 1e-4
"""Of the time of a batch, that need not be known better; see ``two_bw_s``."""


def two_bw_s(pipeline: Pipeline, delay: Delay) -> float:
    """What ``periods.two_bw_s`` is for some pipelines, and for the others at least: exact once everything repeats.

    However much later than some batches before it is: a batch takes no longer than what became later by most, and no
    less than what did by least. Where stages and links take so nearly the same that they fall into step only after very
    many batches, the lower of both is taken once they differ by 1e-4 of it and 20,000 forwards have been
    followed, or after 200 batches or half a million forwards.

    >>> even = Stage(1, 2)
    >>> pipeline = Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even, gradients_s=3, update_s=1)
    >>> [two_bw_s(pipeline, Delay(copy=copy)) for copy in (GradientCopy.WHOLE, GradientCopy.SHARD)]
    [25, 27]
    """
    least_s, run = periods.two_bw_s(pipeline, delay), _Run.of(pipeline, delay)
    turn = (1 + delay.extra_in_flight) * (pipeline.stages - 1) + 1
    earlier, most_s = deque[list[float]](maxlen=turn + 1), math.inf
    for _ in range(_MOST_BATCHES):
        run.follow()
        now_s = [*run.moving_s(), *run.reduced_s()]
        for batches, before_s in enumerate(earlier, 1):
            shift_s = shift_of(before_s, now_s)
            if shift_s is not None:
                return max(least_s, shift_s / batches)
        for batches in {1, len(earlier)} if earlier else ():
            shifts_s = [now - before for now, before in zip(now_s, earlier[batches - 1], strict=True)]
            least_s, most_s = max(least_s, min(shifts_s) / batches), min(most_s, max(shifts_s) / batches)
        near = _NEAR if run.forwards > _MANY_FORWARDS else ROUNDING
        if most_s <= least_s * (1 + near) or run.forwards > _MOST_FORWARDS:
            break
        earlier.appendleft(now_s)
    return least_s


@dataclass(slots=True, kw_only=True)
class _Stage:
    """A stage: what it does in which step of a batch, and when all of it that is under way is done."""

    forward_s: float
    backward_s: float
    send_s: float
    """To the next stage and back; 0 of the last."""
    ahead: int
    """Forwards before the backward of the first."""
    update_step: int
    """Its update comes before the forward of this step, or where it ``updates_early`` before the backward."""
    updates_early: bool
    """Without a copy of the gradients that the next backward writes."""
    awaits_sum: bool
    """Whether the first backward of a batch waits for the sum that the one before left."""
    reduces_late: bool
    """Whether there is no room for another batch's gradients until the update; then they are summed after it."""
    end_s: float = 0
    """Of what it ran last."""
    inputs_s: deque[float] = field(default_factory=deque)
    """Arrivals of what its next forwards need; of the first stage that is nothing."""
    output_s: float = 0
    """Arrival of what its last forward sent."""
    gradient_s: float = 0
    """Arrival of what its last backward needed."""
    sum_s: float = 0
    """End of the sum of its gradients over replicas, of the last finished batch."""
    receives: LateReceives | None = None
    """When it posts them, where transfers wait for that."""

    @classmethod
    def of(cls, work: Stage, send_s: float, ahead: int, delayed: int, microbatches: int, copy: GradientCopy) -> _Stage:
        lag = delayed - ahead  # Steps of a batch until the first forward that is not delayed.
        early = copy is GradientCopy.NONE and lag > 0
        return cls(
            forward_s=work.forward_s,
            backward_s=work.backward_s,
            send_s=send_s,
            ahead=ahead,
            update_step=0 if early else lag % microbatches,
            updates_early=early,
            awaits_sum=copy is GradientCopy.SHARD and lag > 0,
            reduces_late=lag == microbatches and not early,
        )

    def forward(self, following: _Stage | None, step: int = 0) -> None:
        """Run one, and send its output to the stage ``following``."""
        end_s, receives = self.end_s, self.receives
        if receives is not None:
            receives.before_forward(step, end_s)
        if self.inputs_s:
            arrival_s = self.inputs_s.popleft()
            if receives is not None:
                arrival_s = receives.arrival_s(arrival_s)
            end_s = arrival_s if arrival_s > end_s else end_s
        self.end_s = end_s = end_s + self.forward_s
        if following is not None and following.receives is not None:
            following.inputs_s.append(end_s)
        elif following is not None:
            self.output_s = (end_s if end_s > self.output_s else self.output_s) + self.send_s
            following.inputs_s.append(self.output_s)

    def backward(self, following: _Stage | None, step: int) -> None:
        """Run one, of what ``following`` has just sent."""
        if following is not None:
            free_s, sent_s = self.gradient_s, following.end_s
            if self.receives is not None:
                sent_s = max(sent_s, self.receives.gradient_posted_s(step))
            self.gradient_s = arrival_s = (sent_s if sent_s > free_s else free_s) + self.send_s
            if arrival_s > self.end_s:
                self.end_s = arrival_s
        self.end_s += self.backward_s


@dataclass(slots=True, kw_only=True)
class _Run:
    """An endless run, begun as if the batch before had taken no time."""

    pipeline: Pipeline
    stages: list[_Stage]
    turns: list[int]
    """Steps of the slowest turns."""
    norm_s: float = 0
    """End of the sum of the norm over stages, of the last batch with which all have begun."""
    forwards: int = 0
    """That were followed."""

    @classmethod
    def of(cls, p: Pipeline, delay: Delay) -> _Run:
        per_boundary, m = 1 + delay.extra_in_flight, p.microbatches
        delayed = m if delay.delayed is None else min(delay.delayed, m)
        stages = [
            _Stage.of(work, send_s, per_boundary * (p.stages - 1 - stage), delayed, m, delay.copy)
            for stage, (work, send_s) in enumerate(zip(p.in_order, (*p.links_s, 0), strict=True))
        ]
        for stage, before_s in zip(stages, (None, *p.links_s), strict=True):
            if p.late_receives:
                stage.receives = LateReceives(
                    extra_in_flight=delay.extra_in_flight,
                    update_step=delayed - stage.ahead,
                    has_copy=delay.copy is not GradientCopy.NONE,
                    transfer_s=before_s,
                )
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            for _ in range(stage.ahead):
                stage.forward(following)
        return cls(pipeline=p, stages=stages, turns=[per_boundary * (width - 1) + 1 for width in p.widths])

    def follow(self) -> None:
        """Run the steps of a batch, but for those in which all becomes equally much later than in steps before."""
        m, step, steps = self.pipeline.microbatches, 0, list[list[float]]()
        # Where more happens than forwards and backwards.
        special = {0, m - 1, *(stage.update_step for stage in self.stages)}
        for stage in self.stages:
            special.update(stage.receives.special_steps() if stage.receives is not None else ())
        events = [*sorted(step for step in special if 0 <= step < m), m]
        while step < m:
            self._step(step)
            if step in events:
                steps.clear()
            step += 1
            left = next(event for event in events if event >= step) - step
            if left:
                steps.append(self.moving_s())
            for turn in self.turns:
                if left < turn or len(steps) <= turn:
                    break
                shift_s = shift_of(steps[-1 - turn], steps[-1])
                if shift_s is not None:
                    self._shift(left // turn * shift_s)
                    step += left // turn * turn
                    steps.clear()
                    break

    def moving_s(self) -> list[float]:
        """What every step makes later."""
        times_s: list[float] = []
        for stage in self.stages:
            times_s += (stage.end_s, *stage.inputs_s)
            if stage.receives is not None:
                times_s += stage.receives.moving_s()
        for stage in self.stages[:-1]:
            times_s += (stage.output_s, stage.gradient_s) if stage.receives is None else (stage.gradient_s,)
        return times_s

    def reduced_s(self) -> list[float]:
        """What every batch makes later."""
        return [*(stage.sum_s for stage in self.stages), self.norm_s]

    def _shift(self, shift_s: float) -> None:
        """What some steps would."""
        for stage in self.stages:
            stage.end_s += shift_s
            stage.output_s += shift_s
            stage.gradient_s += shift_s
            stage.inputs_s = deque(arrival_s + shift_s for arrival_s in stage.inputs_s)
            if stage.receives is not None:
                stage.receives.shift(shift_s)

    def _step(self, step: int) -> None:
        is_last, following = step == self.pipeline.microbatches - 1, None
        self.forwards += len(self.stages)
        for stage in reversed(self.stages):
            if step == stage.update_step and not stage.updates_early:
                self._update(stage)
                if stage.reduces_late:
                    self._reduce(stage)
            stage.forward(following, step)
            if step == 0 and stage.updates_early:
                self._update(stage)
            if stage.receives is not None:
                stage.receives.before_backward(step, stage.end_s)
            if step == 0 and stage.awaits_sum:
                stage.end_s = max(stage.end_s, stage.sum_s)
            stage.backward(following, step)
            if is_last and not stage.reduces_late:
                self._reduce(stage)
            following = stage

    def _reduce(self, stage: _Stage) -> None:
        """Begin with the sum of the gradients of a finished batch, and once all stages have, of their norm."""
        stage.sum_s = max(stage.end_s, self.norm_s) + self.pipeline.gradients_s
        first, last = self.stages[0], self.stages[-1]
        if stage is (last if last.reduces_late else first):
            self.norm_s = max(stage.sum_s for stage in self.stages) + self.pipeline.norm_s

    def _update(self, stage: _Stage) -> None:
        if stage.receives is not None:
            stage.receives.before_norm(stage.end_s)
        stage.end_s = max(stage.end_s, self.norm_s) + self.pipeline.update_s
