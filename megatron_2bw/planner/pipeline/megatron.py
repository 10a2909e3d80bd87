"""Seconds per batch of Megatron's own schedules, whose ranks wait for one another's transfers; exact.

A transfer begins when both of its ranks have come to it: tensors are larger than what NCCL would take in advance. What
happens in a step depends on the step before, or on the ones since the same chunks took turns. So once everything is
equally much later than then, that repeats, and the rest is not followed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron_2bw.planner.pipeline.followed import shift_of
from megatron_2bw.planner.pipeline.periods import Pipeline, flush_s


def one_f_one_b_s(pipeline: Pipeline) -> float:
    """1F1B, in which neighbours exchange an output for a gradient and both wait for it.

    In step k, stage s runs forward ``k + d-1-s``, exchanges it with the next stage for gradient k, and runs backward k,
    if there are such. After every exchange the host waits for the GPU, too (``batch_p2p_sync``), and launches of small
    kernels are no longer ahead of it; that has no price.

    Source: ``forward_backward_pipelining_without_interleaving`` in ``megatron/core/pipeline_parallel/schedules.py``.

    >>> from megatron_2bw.planner.pipeline.periods import Stage
    >>> even = Stage(1, 2)
    >>> one_f_one_b_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even, send_s=0.5))
    42.5
    """
    p, links_s, widths, last = pipeline, pipeline.links_s, pipeline.widths, pipeline.stages - 1
    stages = p.in_order
    ends_s: list[float] = [0] * p.stages
    steps: list[list[float]] = []  # Of those in which every stage runs both.
    step, later_s = -last, 0
    while step < p.microbatches:
        for stage in range(last, -1, -1):
            forward_s, backward_s = stages[stage]
            sends = 0 <= step + last - stage < p.microbatches
            if sends:
                ends_s[stage] += forward_s
            if stage < last and (sends or step >= 0):
                ends_s[stage] = ends_s[stage + 1] = max(ends_s[stage], ends_s[stage + 1]) + links_s[stage]
            if step >= 0:
                ends_s[stage] += backward_s
        step += 1
        if 0 < step <= p.microbatches - last:
            steps.append(ends_s[:])
        for period in widths if steps else ():
            repeats = (p.microbatches - last - step) // period
            shift_s = shift_of(steps[-1 - period], steps[-1]) if repeats > 0 and len(steps) > period else None
            if shift_s is not None:
                step, later_s = step + repeats * period, later_s + repeats * shift_s
    return max(ends_s) + later_s + flush_s(p)


def interleaved_s(pipeline: Pipeline, *, overlaps: bool = True, waits: bool = True) -> float:
    """Interleaved 1F1B, with all v chunks of each of the d ranks in ``each``.

    In step i, rank r runs forward ``i - r`` and then backward ``i - (d*v-1) - (d-1-r)``, counted in the order of
    ``interleaving.order``. What they need was sent in the step before. After each of them, or after both without
    overlap, a rank sends it and posts the receive of its next one.

    Args:
        pipeline: with chunks in the order of the model.
        overlaps: whether transfers of a rank that runs both ways take place beside its computations; not with
            ``--no-overlap-p2p-communication``, nor before June 2023.
        waits: whether it waits for what forwards send nevertheless, as from megatron-core 0.18 on.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.2; ``forward_backward_pipelining_with_interleaving`` in
    ``megatron/core/pipeline_parallel/schedules.py``.

    >>> from megatron_2bw.planner.pipeline.periods import Stage
    >>> even = Stage(1, 2)
    >>> interleaved_s(Pipeline(stages=4, microbatches=8, first=even, middle=even, last=even, each=(even,) * 12))
    81
    """
    p, last, step, later_s = pipeline, pipeline.stages - 1, 0, 0
    ranks = _Ranks(p, overlaps=overlaps, waits=waits)
    turn, count = ranks.turn, ranks.count
    earlier = deque[list[float]](maxlen=p.stages)
    while step < count + turn - 1 + last:
        ranks.run(step)
        step += 1
        repeats = (count - step) // turn
        if repeats > 0 and step >= turn + last and (step - last) % turn == 0:
            earlier.appendleft(ranks.moving_s())
            for turns, before_s in enumerate(itertools.islice(earlier, 1, 1 + repeats), 1):
                shift_s = shift_of(before_s, earlier[0])
                if shift_s is not None:
                    step, later_s = step + repeats // turns * turns * turn, later_s + repeats // turns * shift_s
                    break
    return max(ranks.ends_s) + later_s + flush_s(p)


class _Chunk(NamedTuple):
    """Forward or backward of one chunk, of any microbatch."""

    takes_s: float
    source: int
    """Rank that what it needs comes from; ``stages`` for none."""
    send_s: float | None
    """Of what it sends, if anything."""


class _Way:
    """Forwards or backwards of all ranks."""

    def __init__(self, p: Pipeline, first_steps: Sequence[int], ahead: int, waited: list[range]) -> None:
        self.ahead = ahead
        """From a rank to the one that it sends to: 1 or -1."""
        self.sent_s: list[float] = [0] * (p.stages + 1)
        """When what each rank sent last has arrived."""
        count, links_s = len(p.each), p.links_s

        def chunk(stage: int) -> _Chunk:
            source = (stage - ahead) % p.stages if 0 <= stage - ahead < count else p.stages
            send_s = links_s[min(stage, stage + ahead)] if 0 <= stage + ahead < count else None
            return _Chunk(p.each[stage][ahead < 0], source, send_s)

        def chunks(rank: int) -> list[_Chunk]:
            return [one for stage in range(rank, count, p.stages)[::ahead] for one in [chunk(stage)] * p.stages]

        self.of_ranks = list(zip(first_steps, map(chunks, range(p.stages)), waited, strict=True))
        """Of each rank the step of its first one, the chunks until they take turns again, and those whose transfer it
        waits for before it goes on."""


class _Ranks:
    """All ranks of an interleaved batch, step by step."""

    def __init__(self, p: Pipeline, *, overlaps: bool, waits: bool) -> None:
        self.overlaps, last = overlaps, p.stages - 1
        self.turn = len(p.each)
        """As many forwards of a rank, after which the same chunks take turns."""
        self.count = count = p.microbatches * self.turn // p.stages
        """Of the forwards of a rank."""
        self.alone = [min(2 * (last - rank) + self.turn - p.stages, count) for rank in range(p.stages)]
        """Forwards of each rank before its first backward, and backwards after its last forward."""
        self.ends_s: list[float] = [0] * p.stages
        """When each rank can go on."""
        outputs = [range(count if waits or not overlaps else alone) for alone in self.alone]
        gradients = [range(count - alone if overlaps else 0, count) for alone in self.alone]
        self.forwards = _Way(p, range(p.stages), 1, outputs)
        self.backwards = _Way(p, range(self.turn - 1 + last, self.turn - 2, -1), -1, gradients)

    def moving_s(self) -> list[float]:
        """What every step makes later."""
        return [*self.ends_s, *self.forwards.sent_s[:-1], *self.backwards.sent_s[:-1]]

    def run(self, step: int) -> None:
        """Forwards and backwards of a step, and what ranks then send and wait for."""
        if self.overlaps:
            self._run_overlapped(step)
        else:
            self._run_in_turns(step)

    def _run_overlapped(self, step: int) -> None:
        """A rank sends its output before it runs its backward."""
        ends_s, inputs_s = self.ends_s, self.forwards.sent_s
        self._send(self.forwards, self._compute(self.forwards, step), ends_s[:])
        backwards = self._compute(self.backwards, step)
        posted_s = ends_s[:]
        if len(backwards) < len(ends_s):
            for rank in {*range(1, len(ends_s))} - {rank for rank, *_ in backwards}:
                # What it waits for comes before it posts the receive of its first gradient.
                posted_s[rank] = max(posted_s[rank], inputs_s[rank - 1])
        self._send(self.backwards, backwards, posted_s)

    def _run_in_turns(self, step: int) -> None:
        """A rank has all that both need before it runs them, and sends both at once."""
        ends_s = self.ends_s
        for rank, (first_step, chunks, _) in enumerate(self.backwards.of_ranks):
            if first_step <= step < first_step + self.count:
                source = chunks[(step - first_step) % self.turn].source
                ends_s[rank] = max(ends_s[rank], self.backwards.sent_s[source])
        forwards, backwards = (self._compute(way, step) for way in (self.forwards, self.backwards))
        posted_s = ends_s[:]
        self._send(self.forwards, forwards, posted_s)
        for rank, alone in enumerate(self.alone):
            if alone == self.count:  # It posts the receive of its first gradient when its last output is there.
                posted_s[rank] = max(posted_s[rank], self.forwards.sent_s[rank])
        self._send(self.backwards, backwards, posted_s)

    def _compute(self, way: _Way, step: int) -> list[tuple[int, float | None, bool]]:
        """Every rank that runs, with what it then sends, and whether it waits for that."""
        ends_s, sent_s, turn, count, runs = self.ends_s, way.sent_s, self.turn, self.count, []
        for rank, (first_step, chunks, waited) in enumerate(way.of_ranks):
            index = step - first_step
            if 0 <= index < count:
                takes_s, source, send_s = chunks[index % turn]
                ends_s[rank] = max(ends_s[rank], sent_s[source]) + takes_s
                runs.append((rank, send_s, index in waited))
        return runs

    def _beside(self, way: _Way) -> list[float]:
        """When what else the same two ranks exchange arrives: where transfers overlap, one at a time.

        NCCL gives every two ranks of a group a stream for both directions; Megatron gives two ranks that are all of a
        pipeline one per direction (``_p2p_ops`` in ``megatron/core/pipeline_parallel/p2p_communication.py``).
        """
        if not self.overlaps:
            return [0] * len(way.sent_s)
        return (self.backwards if way is self.forwards else self.forwards).sent_s

    def _send(self, way: _Way, runs: list[tuple[int, float | None, bool]], posted_s: list[float]) -> None:
        """From when both ranks have posted it, and what they exchange besides is through.

        A rank waits for that, or for what it sent before.
        """
        stages, sent_s, ends_s, ahead = len(posted_s), way.sent_s, self.ends_s, way.ahead
        beside_s = self._beside(way)
        for rank, send_s, is_waited in runs:
            waited_s, to = sent_s[rank], (rank + ahead) % stages
            if send_s is not None:
                free_s = max(waited_s, beside_s[to if stages > 2 else rank])
                sent_s[rank] = max(posted_s[rank], posted_s[to], free_s) + send_s
            if is_waited:
                waited_s = sent_s[rank]
            if waited_s > ends_s[rank]:
                ends_s[rank] = waited_s
