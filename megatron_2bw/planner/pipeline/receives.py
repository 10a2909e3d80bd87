"""Pipelines whose receives are posted late, when by the schedule their tensors are sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_2bw.planner.pipeline.periods import Pipeline, Stage


def with_late_receives(pipeline: Pipeline) -> Pipeline:
    """``pipeline`` as if every rank computed nothing while it receives: with longer stages, and no other transfers.

    Without more activations in flight than a stage needs, tensors are sent when they are needed: the order of
    ``schedule.as_sent`` posts a receive right before the forward or backward that uses it, but for one per batch at
    most, around the update. So what this takes is exact, or too long by a transfer per batch.

    Args:
        pipeline: of stages in one direction, none of which has several chunks.

    >>> even = Stage(1, 2)
    >>> with_late_receives(Pipeline(stages=3, microbatches=3, first=even, middle=even, last=even, send_s=0.5)).in_order
    [Stage(forward_s=1, backward_s=2.5), Stage(forward_s=1.5, backward_s=2.5), Stage(forward_s=1.5, backward_s=2)]
    """
    p, links_s = pipeline, pipeline.links_s

    def with_receives(stage: Stage, before_s: float, behind_s: float) -> Stage:
        return Stage(stage.forward_s + before_s, stage.backward_s + behind_s)

    if p.stages == 1:
        return replace(p, late_receives=False)
    ends = with_receives(p.first, 0, links_s[0]), with_receives(p.last, links_s[-1], 0)
    each = tuple(map(with_receives, p.each, (0, *links_s), (*links_s, 0)))
    middle = with_receives(p.middle, p.send_s, p.send_s)
    if each:
        middle = max(each[1:-1], key=lambda stage: stage.pair_s, default=each[-1])
    return replace(p, first=ends[0], middle=middle, last=ends[1], each=each, send_s=0, sends_s=(), late_receives=False)


@dataclass(slots=True, kw_only=True)
class LateReceives:
    """When a stage of 2BW posts its receives late, with x more microbatches in flight per boundary: exact.

    By the order of ``schedule.as_sent``, all stages come to their update at once. Until then, a stage has its forwards'
    inputs x steps ahead, and waits for its backwards' gradients; from then on the other way round. What the change
    takes is posted before the wait for the norm.
    """

    extra_in_flight: int
    """x."""
    update_step: int
    """Its update comes before the forward of this step; or without a copy of gradients, in step 0."""
    has_copy: bool
    transfer_s: float | None
    """From the stage before, if there is one."""
    _input_s: float = 0
    """Arrival of its last forward's input."""
    _posted_s: float = 0
    """Of the input of its next forward."""
    _norm_s: float = 0
    """When it came to wait for the norm."""
    _forwards_s: deque[float] = field(init=False)
    """When it came to each of its last 1 + x forwards."""
    _backwards_s: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._forwards_s = deque(maxlen=1 + self.extra_in_flight)
        self._backwards_s = deque(maxlen=1 + self.extra_in_flight)

    def special_steps(self) -> Iterator[int]:
        """Steps of a batch in which receives are not posted as in the step before."""
        yield from range(2 + self.extra_in_flight)
        if self.has_copy:
            yield from range(self.update_step, self.update_step + self.extra_in_flight + 2)

    def moving_s(self) -> list[float]:
        """What every step makes later."""
        inputs_s = () if self.transfer_s is None else (self._input_s,)
        return [*inputs_s, *self._forwards_s, *self._backwards_s]

    def shift(self, shift_s: float) -> None:
        """What some steps would."""
        self._input_s += shift_s
        for times_s in (self._forwards_s, self._backwards_s):
            for index in range(len(times_s)):
                times_s[index] += shift_s

    def before_norm(self, now_s: float) -> None:
        """It waits for the norm of the batch before."""
        self._norm_s = now_s

    def before_forward(self, step: int, now_s: float) -> None:
        """It comes to the forward of a step."""
        if step == 0 and self.has_copy:
            self._forwards_s.clear()
        self._forwards_s.append(now_s)
        if self.has_copy:
            self._posted_s = self._forwards_s[0] if step < self.update_step else now_s
        else:
            self._posted_s = self._norm_s if step == 1 + self.extra_in_flight else self._forwards_s[0]

    def arrival_s(self, sent_s: float) -> float:
        """Of the input of that forward."""
        self._input_s = max(sent_s, self._posted_s, self._input_s) + self.transfer_s
        return self._input_s

    def before_backward(self, step: int, now_s: float) -> None:
        """It comes to the backward of a step."""
        if step == 0:
            self._backwards_s.clear()
        self._backwards_s.append(now_s)

    def gradient_posted_s(self, step: int) -> float:
        """When it posts the receive of what that backward needs."""
        if not self.has_copy or step < self.update_step:
            return self._backwards_s[-1]
        return self._norm_s if step <= self.update_step + self.extra_in_flight else self._backwards_s[0]
