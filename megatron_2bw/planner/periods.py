"""Seconds per batch of a pipeline in closed form: what ``schedule.simulate.steady_state`` finds by simulation.

A schedule is a graph of forwards and backwards, and a batch takes as long as the longest path through it. Such a
path turns: up through the forwards of stages a to b and down through their backwards, ``sum(F+B) + 2*(b-a)*send``
seconds in which b-a+1 microbatches pass. The turn over a single stage is slowest where one stage is, the turn over
all of them where transfers are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_2bw.schedule.program import GradientCopy

ROUNDING = 1e-12
"""Of times that are equal."""


class Stage(NamedTuple):
    """Seconds of one microbatch on one stage."""

    forward_s: float
    backward_s: float

    @property
    def pair_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages of which only the first and the last may differ from the others."""

    stages: int
    microbatches: int
    first: Stage
    middle: Stage
    last: Stage
    send_s: float = 0
    """From a result to its arrival on the next stage."""
    update_s: float = 0
    """Of every stage."""
    gradients_s: float = 0
    """Sum of a stage's gradients over its replicas."""
    norm_s: float = 0
    """What all stages then sum together."""

    def turn_s(self, first: int, last: int) -> float:
        """Forwards from stage ``first`` up to ``last`` and backwards down again."""
        total_s = (last - first + 1) * self.middle.pair_s + 2 * (last - first) * self.send_s
        if first == 0:
            total_s += self.first.pair_s - self.middle.pair_s
        if last == self.stages - 1 and last > 0:
            total_s += self.last.pair_s - self.middle.pair_s
        return total_s

    @property
    def kinds(self) -> tuple[Stage, ...]:
        """Stages that may differ."""
        return ((self.first,), (self.first, self.last), (self.first, self.middle, self.last))[min(self.stages, 3) - 1]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many stages are of each kind."""
        return ((1,), (1, 1), (1, self.stages - 2, 1))[min(self.stages, 3) - 1]


def gpipe_s(pipeline: Pipeline) -> float:
    """``sum(F) + (m-1)*max(F) + sum(B) + (m-1)*max(B)``, a transfer counting as a stage.

    >>> even = Stage(1, 2)
    >>> gpipe_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even))
    33
    """
    p = pipeline
    hops = p.stages - 1
    channel_s = p.send_s if hops else 0
    turns_s = p.turn_s(0, hops)
    slowest_s = sum(max(channel_s, *(stage[way] for stage in p.kinds)) for way in (0, 1))
    return turns_s + (p.microbatches - 1) * slowest_s + flush_s(p)


def inter_layer_s(pipeline: Pipeline) -> float:
    """``m`` turns over all stages, one after the other.

    >>> even = Stage(1, 2)
    >>> inter_layer_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even))
    96
    """
    return pipeline.microbatches * pipeline.turn_s(0, pipeline.stages - 1) + flush_s(pipeline)


def flush_s(pipeline: Pipeline) -> float:
    """Between the last backward of a batch and the first forward of the next."""
    return pipeline.gradients_s + pipeline.norm_s + pipeline.update_s


def one_f_one_b_s(pipeline: Pipeline) -> float:
    """One turn over all stages for the first microbatch, the slowest turns for the others.

    With even stages ``(m+d-1)*(F+B) + 2*send*(d-1 + m-1 - ceil((m-1)/d))``. Exact where the last stage takes longest
    and the first one as long as the middle ones or longer, as with the loss and the embedding on them.

    >>> even = Stage(1, 2)
    >>> one_f_one_b_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even, send_s=0.5))
    41.0
    """
    return pipeline.turn_s(0, pipeline.stages - 1) + _other_turns_s(pipeline) + flush_s(pipeline)


def uneven_one_f_one_b_s(pipeline: Pipeline) -> float:
    """The same whichever stages are slower: exact, by following the microbatches.

    In step i, stage s runs backward i and then forward ``i + d - s``; what happens depends on the step before alone.
    So once all stages are equally much later than a turn before, that repeats: the slowest turn is over one stage or
    over all of them, with or without the ends, and as many microbatches pass in it.

    >>> lighter, even = Stage(1, 1), Stage(2, 2)
    >>> uneven_one_f_one_b_s(Pipeline(stages=4, microbatches=100, first=lighter, middle=even, last=lighter))
    406
    """
    p, left, later_s = pipeline, pipeline.microbatches, 0
    stages = [stage for stage, count in zip(p.kinds, p.counts, strict=True) for _ in range(count)]
    ends_s = _first_forwards_s(p, stages)
    steps = [ends_s]
    turns = {1, *range(max(p.stages - 2, 1), p.stages + 1)}
    while left:
        after_s, arrival_s = [0] * p.stages, 0
        for stage in range(p.stages - 1, -1, -1):
            after_s[stage] = max(arrival_s, ends_s[stage]) + stages[stage].backward_s
            arrival_s = after_s[stage] + p.send_s
            if p.stages - stage < left:
                input_s = ends_s[stage - 1] + p.send_s if stage else 0
                after_s[stage] = max(after_s[stage], input_s) + stages[stage].forward_s
        ends_s, left = after_s, left - 1
        steps.append(ends_s)
        for period in turns:
            repeats = (left - p.stages) // period
            if repeats > 0 and len(steps) > period:
                shifts_s = [now_s - before_s for now_s, before_s in zip(ends_s, steps[-1 - period], strict=True)]
                if max(shifts_s) - min(shifts_s) <= ROUNDING * max(ends_s):
                    left, later_s = left - repeats * period, later_s + repeats * shifts_s[0]
    return ends_s[0] + later_s + flush_s(p)


def _first_forwards_s(p: Pipeline, stages: list[Stage]) -> list[float]:
    """When each stage has done the forwards that come before its first backward."""
    ends_s: list[float] = []
    arrivals_s: list[float] = [0] * p.microbatches
    for stage, (forward_s, _) in enumerate(stages):
        end_s = 0
        count = min(p.stages - stage, p.microbatches)
        for microbatch in range(count):
            end_s = max(end_s, arrivals_s[microbatch]) + forward_s
            arrivals_s[microbatch] = end_s + p.send_s
        ends_s.append(end_s)
    return ends_s


def _other_turns_s(p: Pipeline, per_boundary: int = 1) -> float:
    """The slowest turns of all microbatches but one: over as many stages as there are, or over the slowest stage.

    They end on the last stage, so one turn is from the slowest to the last stage.
    """
    last, rest = p.stages - 1, p.microbatches - 1
    pair_s = p.turn_s(last, last)
    longest_s = rest * pair_s
    for stage in {0, max(last - 1, 0)}:
        alone = rest - per_boundary * (last - stage) - 1
        if alone >= 0:
            longest_s = max(longest_s, p.turn_s(stage, last) + alone * p.turn_s(stage, stage))
    over_all, left = divmod(rest, per_boundary * last + 1)
    over_all_s = over_all * p.turn_s(0, last)
    if left:
        crossed = (left - 1) // per_boundary
        over_all_s += p.turn_s(last - crossed, last) + (left - 1 - per_boundary * crossed) * pair_s
    return max(longest_s, over_all_s)


def interleaved_s(pipeline: Pipeline, chunks: int) -> float:
    """Megatron's interleaved 1F1B: ``m*(F+B)`` of the slowest rank and ``(d-1)*(F+B)/v`` to fill and drain.

    Stages are the v chunks of a rank together. While the pipeline fills and drains, d microbatches pass the first
    rank at its own pace, and nothing hides the transfers between all of the chunks. Exact for m in groups of d, free
    transfers and a last rank that takes longest; with transfers a few of them too long.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.2.

    >>> even = Stage(1, 2)
    >>> interleaved_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even), 3)
    27.0
    """
    p = pipeline
    slowest_s = p.microbatches * max(stage.pair_s for stage in p.kinds)
    last_s = p.microbatches * p.last.pair_s + p.stages * (p.first.pair_s - p.middle.pair_s)
    fill_s = (p.stages - 1) * p.middle.pair_s / chunks
    return max(slowest_s, last_s) + fill_s + 2 * (p.stages * chunks - 1) * p.send_s + flush_s(p)


def two_bw_s(
    pipeline: Pipeline,
    *,
    extra_in_flight: int = 0,
    delayed: int | None = None,
    copy: GradientCopy = GradientCopy.WHOLE,
) -> float:
    """``m*(F+B)`` of the slowest stage and its update; more only where something cannot be hidden.

    - Transfers: a turn over all stages lets ``(1+x)*(d-1) + 1`` microbatches pass, x more in flight per boundary.
    - Sums of gradients and of the norm, then the update: they have to be done before the first forward that uses it,
      on the first stage. ``(1+x)*(d-1)`` backwards come after the forwards that have to be done by the end of its
      batch, and one for each microbatch that is not delayed.
    - With a shard as copy, the sum over replicas has to be done within the one forward before the next backward,
      whether the slowest stage or the turns set the pace;
      without a copy, the update, for which all stages wait; up to 15% too short where the last stage is the fastest.

    Args:
        pipeline: to run.
        extra_in_flight: x.
        delayed: microbatches of a batch; None for all.
        copy: what is kept of finished gradients.

    >>> even = Stage(1, 2)
    >>> pipeline = Pipeline(stages=4, microbatches=4, first=even, middle=even, last=even, send_s=0.1)
    >>> two_bw_s(pipeline)
    12.6
    """
    p, last, per_boundary = pipeline, pipeline.stages - 1, 1 + extra_in_flight
    ahead = per_boundary * last
    paces = [(stage.pair_s, 1, stage.backward_s) for stage in p.kinds]
    paces.append((p.turn_s(0, last), ahead + 1, max(stage.backward_s for stage in p.kinds)))
    steady_s = max(p.microbatches * time_s / passing for time_s, passing, _ in paces)
    after = ahead + (0 if delayed is None else max(p.microbatches - delayed, 0))
    waits_s = flush_s(p) + _after_update_s(p, after, per_boundary)
    if copy is GradientCopy.SHARD:  # The sum may take the place of one forward.
        with_sum_s = ((p.microbatches - 1) * time_s / passing + backward_s for time_s, passing, backward_s in paces)
        steady_s = max(steady_s, max(with_sum_s) + p.gradients_s)
    if copy is GradientCopy.NONE:
        forwards_s = sum(stage.forward_s * count for stage, count in zip(p.kinds, p.counts, strict=True))
        down_s = p.turn_s(0, last) - last * p.send_s - forwards_s
        waits_s = max(waits_s, flush_s(p) + _other_turns_s(p, per_boundary) + down_s)
    return max(steady_s + p.update_s, waits_s)


def _after_update_s(p: Pipeline, passing: int, per_boundary: int) -> float:
    """The longest path on which so many microbatches pass after an update, from the first stage and back to it.

    In a turn, ``per_boundary`` microbatches pass for every boundary that it crosses, and one more. It turns at least
    once, as often as that takes longest; the others pass at the slowest stage of the turn, or turn over fewer stages.
    """
    longest_s = 0.0
    for turned in {0, 1, p.stages - 2, p.stages - 1}:
        size, turn_s = per_boundary * turned + 1, p.turn_s(0, turned)
        left = passing - size
        if 0 <= turned < p.stages and left >= 0:
            pairs_s = [p.first.pair_s]
            if turned > 0:
                pairs_s += [p.last.pair_s if turned == p.stages - 1 else p.middle.pair_s]
            if turned > 1:
                pairs_s += [p.middle.pair_s]
            turns, rest = divmod(left, size)
            pair_s, crossed = max(pairs_s), max(rest - 1, 0) // per_boundary
            shorter_s = (crossed + 1) * p.middle.pair_s + 2 * crossed * p.send_s
            rest_s = max(rest * pair_s, shorter_s + (rest - per_boundary * crossed - 1) * pair_s) if rest else 0.0
            longest_s = max(longest_s, turn_s + max(left * pair_s, turns * turn_s + rest_s))
    return longest_s
