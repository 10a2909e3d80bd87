"""Pipelines whose receives are posted late, when their tensors are sent."""

from __future__ import annotations

from dataclasses import replace

from megatron_2bw.planner.pipeline.periods import Pipeline, Stage


def with_late_receives(pipeline: Pipeline, extra_in_flight: int = 0) -> Pipeline:
    """``pipeline`` as if every rank computed nothing while it receives: with longer stages, and no other transfers.

    Late, a receive is posted where the schedule ``schedule.as_sent`` has it: without more microbatches in flight right
    before the forward or backward that needs it, as tensors are sent when they are needed. With more, forwards have
    their input one forward earlier, which hides that transfer. Around updates it can be a few actions earlier or
    later: a batch differs from the simulated one (``schedule.engine.Model.POSTED``) by some transfers, see the tests.

    Args:
        pipeline: of stages in one direction, none of which has several chunks.
        extra_in_flight: x of 2bw.

    >>> even = Stage(1, 2)
    >>> with_late_receives(Pipeline(stages=3, microbatches=3, first=even, middle=even, last=even, send_s=0.5)).in_order
    [Stage(forward_s=1, backward_s=2.5), Stage(forward_s=1.5, backward_s=2.5), Stage(forward_s=1.5, backward_s=2)]
    """
    p, links_s = pipeline, pipeline.links_s

    def with_receives(stage: Stage, before_s: float, behind_s: float) -> Stage:
        if extra_in_flight:
            before_s = max(before_s - stage.forward_s, 0)
        return Stage(stage.forward_s + before_s, stage.backward_s + behind_s)

    if p.stages == 1:
        return p
    ends = with_receives(p.first, 0, links_s[0]), with_receives(p.last, links_s[-1], 0)
    each = tuple(map(with_receives, p.each, (0, *links_s), (*links_s, 0)))
    middle = with_receives(p.middle, p.send_s, p.send_s)
    if each:
        middle = max(each[1:-1], key=lambda stage: stage.pair_s, default=each[-1])
    return replace(p, first=ends[0], middle=middle, last=ends[1], each=each, send_s=0, sends_s=())
