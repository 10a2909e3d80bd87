"""Seconds per batch of a pipeline in closed form: what ``schedule.simulate.steady_state`` finds by simulation.

A schedule is a graph of forwards and backwards, and a batch takes as long as the longest path through it. Such a
path turns: up through the forwards of stages a to b and down through their backwards, ``sum(F+B) + 2*(b-a)*send``
seconds in which b-a+1 microbatches pass. The turn over a single stage is slowest where one stage is, the turn over
all of them where transfers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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

    @classmethod
    def sum(cls, chunks: Iterable[Stage]) -> Stage:
        """Of several ``chunks``."""
        return cls(*map(sum, zip(*chunks, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages of which only the first and the last may differ from the others, or others in ``each``."""

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
    each: tuple[Stage, ...] = ()
    """Every chunk of every stage in the order of the model, where there are several of a stage or more of them differ.
    These are then simulated or followed, and ``middle`` is the slowest stage between the ends."""
    sends_s: tuple[float, ...] = ()
    """Of these, from each to the next, where transfers differ."""
    late_receives: bool = False
    """Whether no transfer begins before its receive is posted, when by the schedule its tensor is sent. What prices a
    ``batch`` knows of it; the closed forms here do not."""

    def turn_s(self, first: int, last: int) -> float:
        """Forwards from stage ``first`` up to ``last`` and backwards down again."""
        if self.each:
            return sum(stage.pair_s for stage in self.kinds[first : last + 1]) + 2 * sum(self.links_s[first:last])
        total_s = (last - first + 1) * self.middle.pair_s + 2 * (last - first) * self.send_s
        if first == 0:
            total_s += self.first.pair_s - self.middle.pair_s
        if last == self.stages - 1 and last > 0:
            total_s += self.last.pair_s - self.middle.pair_s
        return total_s

    @property
    def kinds(self) -> tuple[Stage, ...]:
        """Stages that may differ."""
        if self.each:
            chunks = (self.each[rank :: self.stages] for rank in range(self.stages))
            return tuple(Stage.sum(of_rank) for of_rank in chunks)
        return ((self.first,), (self.first, self.last), (self.first, self.middle, self.last))[min(self.stages, 3) - 1]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many stages are of each kind."""
        return (1,) * self.stages if self.each else ((1,), (1, 1), (1, self.stages - 2, 1))[min(self.stages, 3) - 1]

    @property
    def in_order(self) -> list[Stage]:
        """Every stage, from the first to the last."""
        return [stage for stage, count in zip(self.kinds, self.counts, strict=True) for _ in range(count)]

    @property
    def widths(self) -> list[int]:
        """Over how many stages the slowest turn may go: one, or all with or without the ends if only those differ."""
        return sorted({1, *range(1 if self.each else max(self.stages - 2, 1), self.stages + 1)})

    @property
    def links_s(self) -> tuple[float, ...]:
        """Transfers from every chunk to the next."""
        return self.sends_s or (self.send_s,) * (max(len(self.each), self.stages) - 1)


def gpipe_s(pipeline: Pipeline) -> float:
    """``sum(F) + (m-1)*max(F) + sum(B) + (m-1)*max(B)``, a transfer counting as a stage.

    >>> even = Stage(1, 2)
    >>> gpipe_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even))
    33
    """
    p = pipeline
    hops = p.stages - 1
    channel_s = max(p.links_s, default=0)
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


def one_f_one_b_is_exact(pipeline: Pipeline) -> bool:
    """Whether ``one_f_one_b_s`` is exact, not only the least.

    Not where stages between the ends differ or take longer than these, as with layers of another kind; nor where the
    first stage's forward takes longer than all of the last stage, or with fewer microbatches than stages all of it.
    """
    p = pipeline
    ends = (p.first, p.last) if p.stages > 2 else ()
    has_lighter_ends = any(end[way] < p.middle[way] for end in ends for way in (0, 1))
    first_s = p.first.pair_s if p.microbatches < p.stages else p.first.forward_s
    return not (p.each or has_lighter_ends or (p.stages > 1 and first_s > p.last.pair_s))


def one_f_one_b_s(pipeline: Pipeline) -> float:
    """One turn over all stages for the first microbatch, the slowest turns for the others.

    With even stages ``(m+d-1)*(F+B) + 2*send*(d-1 + m-1 - ceil((m-1)/d))``; nowhere too long.

    >>> even = Stage(1, 2)
    >>> one_f_one_b_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even, send_s=0.5))
    41.0
    """
    return pipeline.turn_s(0, pipeline.stages - 1) + _other_turns_s(pipeline) + flush_s(pipeline)


def least_uneven_s(pipeline: Pipeline) -> float:
    """What ``followed.uneven_one_f_one_b_s`` and ``megatron.one_f_one_b_s`` find, without waits: nowhere too long.

    The first microbatch passes the stages before any one of them, which all microbatches then pass.
    """
    p, way_s, longest_s = pipeline, 0.0, 0.0
    for stage, link_s in zip(p.kinds, (*p.links_s, 0), strict=True):
        longest_s = max(longest_s, way_s + p.microbatches * stage.pair_s)
        way_s += stage.pair_s + 2 * link_s
    return max(longest_s, way_s) + flush_s(p)


def _other_turns_s(p: Pipeline) -> float:
    """The slowest turns of all microbatches but one: over as many stages as there are, or over the slowest stage.

    They end on the last stage, so one turn is from the slowest to the last stage; what comes before a turn over all
    stages may be anywhere. Or the slowest stage has nothing but forwards left at first, or backwards in the end, or
    all of its work to do one after the other; or a link is slower than stages.
    """
    last, rest = p.stages - 1, p.microbatches - 1
    all_s = p.turn_s(0, last)
    longest_s = rest * max(p.turn_s(last, last), p.send_s if last else 0)
    for stage in {0, max(last - 1, 0)}:
        pair_s, after = p.turn_s(stage, stage), min(rest, last - stage)
        longest_s = max(longest_s, p.turn_s(0, stage) + rest * pair_s - all_s)
        longest_s = max(longest_s, (rest - after) * pair_s + after * max(p.middle if stage else p.first))
        if rest > after:
            longest_s = max(longest_s, p.turn_s(stage, last) + (rest - after - 1) * pair_s)
    if rest >= p.stages:
        return max(longest_s, all_s + _Paths(p).longest_within_s(rest - p.stages, 0, last))
    return max(longest_s, p.turn_s(p.stages - rest, last)) if rest else longest_s


@dataclass(frozen=True, slots=True)
class _Paths:
    """The longest paths through an endless pipeline by how many microbatches pass in them.

    A path goes up to some stage and turns, down to another one and turns, and so on. However it does, it is as long,
    and lets as many microbatches pass, as turns that each go over some neighbours and back to where they began. Of
    those, it is enough to look at turns over a single stage, over all stages but the ends, and at one over what is
    left: with equal stages between the ends, time is linear in the width of a turn.
    """

    p: Pipeline
    per_boundary: int = 1
    """Microbatches more in flight for each boundary between stages."""
    _turns_s: dict[tuple[int, int, int], float] = field(default_factory=dict, init=False, compare=False)
    """What ``turn_s`` has found, which is asked for again and again."""

    def size(self, width: int) -> int:
        """How many microbatches pass in a turn over so many stages."""
        return self.per_boundary * (width - 1) + 1

    def pace_s(self) -> float:
        """Most seconds per microbatch of any path."""
        last = self.p.stages - 1
        turns_s = [self.alone_s(0, last)]
        for first, end in {(0, last), (0, last - 1), (1, last), (1, last - 1)}:
            if 0 <= first < end:
                turns_s.append(self.p.turn_s(first, end) / self.size(end - first + 1))
        return max(turns_s)

    def alone_s(self, first: int, last: int) -> float:
        """A microbatch on the slowest of these stages; or on a link, which takes one after the other as well."""
        p = self.p
        middle_s = p.middle.pair_s if last - first > 1 else 0
        return max(p.turn_s(first, first), p.turn_s(last, last), middle_s, p.send_s if last > first else 0)

    def turn_s(self, width: int, first: int, last: int) -> float:
        """The longest turn over so many of these stages: at one end, at the other or between them."""
        key = width, first, last
        if key not in self._turns_s:
            starts = {first, last - width + 1, min(first + 1, last - width + 1)}
            self._turns_s[key] = max(self.p.turn_s(start, start + width - 1) for start in starts)
        return self._turns_s[key]

    def longest_within_s(self, passing: int, first: int, last: int) -> float:
        """The longest turns that a path over all of these stages can take on its way."""
        alone_s, stages = self.alone_s(first, last), last - first + 1
        longest_s = passing * alone_s
        for width in range(max(stages - 2, 2), stages + 1):
            turns, rest = divmod(passing, self.size(width))
            turns_s = turns * self.turn_s(width, first, last) + rest * alone_s
            if rest:
                widest = min((rest - 1) // self.per_boundary + 1, stages)
                alone = rest - self.size(widest)
                rest_s = turns_s - (rest - alone) * alone_s + self.turn_s(widest, first, last)
                turns_s = max(turns_s, rest_s)
            longest_s = max(longest_s, turns_s, self._mixed_s(passing, width, first, last))
        return longest_s

    def _mixed_s(self, passing: int, width: int, first: int, last: int) -> float:
        """Turns over so many stages and over one stage less, with as few of the one or of the other as there can be."""
        wide, narrow = self.size(width), self.size(width - 1)
        turns_s = [self.turn_s(size, first, last) for size in (width, width - 1)]
        narrower = -(-(-passing % wide) // self.per_boundary)
        wider = passing % narrow // self.per_boundary
        longest_s = 0.0
        for counts in (((passing - narrower * narrow) // wide, narrower), (wider, (passing - wider * wide) // narrow)):
            alone = passing - counts[0] * wide - counts[1] * narrow
            if min(counts) >= 0:
                mixed_s = counts[0] * turns_s[0] + counts[1] * turns_s[1] + alone * self.alone_s(first, last)
                longest_s = max(longest_s, mixed_s)
        return longest_s

    def longest_s(self, passing: int, through: int = 0) -> float:
        """The longest path through this stage and back, which gets no further than its widest turn."""
        longest_s, stages = 0.0, self.p.stages
        fitting = min(stages, (passing - 1) // self.per_boundary + 1)
        for width in {1, 2, stages - 2, stages - 1, stages, fitting}:
            for first in {max(through - width + 1, 0), min(through, stages - width)} if 0 < width <= fitting else ():
                last, rest = first + width - 1, passing - self.size(width)
                longest_s = max(longest_s, self.p.turn_s(first, last) + self.longest_within_s(rest, first, last))
        return longest_s

    def longest_anywhere_s(self, passing: int) -> float:
        """The longest path from any stage and back."""
        last = self.p.stages - 1
        return max(self.longest_s(passing, stage) for stage in {0, min(1, last), last})

    def longest_over_all_s(self, passing: int) -> float:
        """What a path down from the last stage to the first can take on its way."""
        return self.longest_within_s(passing, 0, self.p.stages - 1)


def least_interleaved_s(pipeline: Pipeline, *, waits: bool = True) -> float:
    """What ``megatron.interleaved_s`` finds, without what waits in the middle of a batch: nowhere too long.

    Until the first microbatch has come to the last chunk of a rank, and after the last one has gone back from there,
    this rank has d microbatches of its other chunks to compute, and in between all of the rest.

    Args:
        pipeline: with chunks in the order of the model.
        waits: whether what forwards send is part of what their rank has to do.
    """
    p, way_s, ranks_s = pipeline, 0.0, []
    links_s = (*p.links_s, 0.0)
    pairs_s = [chunk.pair_s + waits * link_s for chunk, link_s in zip(p.each, links_s, strict=True)]
    for index, (chunk_s, link_s) in enumerate(zip(pairs_s, links_s, strict=True)):
        rank = index - (len(p.each) - p.stages)
        if rank >= 0:
            rank_s = sum(pairs_s[rank :: p.stages])
            ranks_s.append(way_s + p.microbatches * rank_s - p.stages * (rank_s - chunk_s))
        way_s += chunk_s + (2 - waits) * link_s
    return max(ranks_s) + flush_s(p)


class Delay(NamedTuple):
    """What 2bw keeps while its updates are delayed."""

    extra_in_flight: int = 0
    """x, microbatches more in flight for each boundary between stages."""
    delayed: int | None = None
    """Microbatches of a batch; None for all."""
    copy: GradientCopy = GradientCopy.WHOLE
    """Of finished gradients."""


def two_bw_is_exact(pipeline: Pipeline, delay: Delay) -> bool:
    """Whether ``two_bw_s`` is exact, not only the least.

    Where more than the ends differ, paths turn in more ways than it knows. One path may take the updates of several
    stages where a transfer there and back takes longer than a stage's forward and backward, or any time where no more
    microbatches are delayed than the first stage runs ahead; and the sums of several where a shard is kept and its sum
    takes longer than the one forward that hides it.
    """
    p, last, kinds = pipeline, pipeline.stages - 1, pipeline.kinds
    extra_in_flight, delayed, copy = delay
    has_slow_links = 2 * p.send_s > min(stage.pair_s for stage in kinds)
    has_fewest = p.send_s > 0 and min(delayed or p.microbatches, p.microbatches) == (1 + extra_in_flight) * last
    takes_updates = last > 0 and p.update_s > 0 and (has_slow_links or has_fewest)
    has_long_sums = copy is GradientCopy.SHARD and p.gradients_s > min(stage.forward_s for stage in kinds)
    return not (p.each or takes_updates or has_long_sums)


def two_bw_s(pipeline: Pipeline, delay: Delay) -> float:
    """``m*(F+B)`` of the slowest stage and its update, and more only where something cannot be hidden; never too long.

    - Transfers: a turn over all stages lets ``(1+x)*(d-1) + 1`` microbatches pass, x more in flight per boundary. Then
      stages wait, and an update may take place meanwhile.
    - Sums of gradients and of the norm, then the update: they have to be done before the first forward that uses it,
      on the first stage. ``(1+x)*(d-1)`` backwards come after the forwards that have to be done by the end of its
      batch, and one for each microbatch that is not delayed.
    - With a shard as copy, what the sum over replicas takes longer than one forward.
    - Without a copy, the update, for which all stages wait.

    Each of them comes back to where it was a batch later, or several.

    >>> even = Stage(1, 2)
    >>> pipeline = Pipeline(stages=4, microbatches=4, first=even, middle=even, last=even, send_s=0.1)
    >>> two_bw_s(pipeline, Delay())
    12.6
    """
    extra_in_flight, delayed, copy = delay
    p, m, last, paths = pipeline, pipeline.microbatches, pipeline.stages - 1, _Paths(pipeline, 1 + extra_in_flight)
    ahead, not_delayed = (1 + extra_in_flight) * last, 0 if delayed is None else max(m - delayed, 0)
    cycles = [
        _Cycle(p.update_s, 0, paths.longest_anywhere_s),
        _Cycle(flush_s(p), ahead + not_delayed - m, paths.longest_s),
    ]
    sum_s = p.gradients_s if copy is GradientCopy.SHARD else 0
    alone_s = max(m * stage.pair_s + max(sum_s - stage.forward_s, 0) for stage in p.kinds) + p.update_s
    if copy is GradientCopy.NONE:
        backwards_s = sum(stage.backward_s * count for stage, count in zip(p.kinds, p.counts, strict=True))
        down_s = backwards_s + sum(p.links_s)
        cycles.append(_Cycle(flush_s(p) + down_s, -1, paths.longest_over_all_s))
        if m == ahead and not not_delayed:  # The first stage updates before a forward, and at its turn the last one.
            cycles.append(_Cycle(flush_s(p) + p.turn_s(0, last) + p.update_s, -m - 1, paths.longest_over_all_s))
    return _slowest_s(cycles, alone_s, paths)


class _Cycle(NamedTuple):
    """What comes back to where it was, one or more batches later."""

    fixed_s: float
    """However many batches later that is."""
    passing: int
    """How many microbatches pass in the rest of it, beyond those of the batches; negative for fewer."""
    longest_s: Callable[[int], float]
    """The rest, by how many microbatches pass."""


def _slowest_s(cycles: list[_Cycle], alone_s: float, paths: _Paths) -> float:
    """Seconds per batch of the slowest of these, each over as many batches as take longest, or of a stage alone.

    After as many as microbatches pass in a turn over all stages, what is over of whole turns repeats.
    """
    p, pace_s = paths.p, paths.pace_s()
    m, turn = p.microbatches, paths.size(p.stages)
    slowest_s = max(m * pace_s, alone_s)
    for fixed_s, more, longest_s in cycles:
        for batches in range(1, turn + 1):
            passing = more + batches * m
            if passing < 0:
                continue
            most_s = fixed_s + passing * pace_s  # What is slower over more batches is so by less.
            if most_s <= slowest_s * batches * (1 + ROUNDING):
                break
            slowest_s = max(slowest_s, (fixed_s + longest_s(passing)) / batches)
    return slowest_s
