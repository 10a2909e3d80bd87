"""Closed forms of the time per batch against the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest

from megatron_2bw.planner.followed import uneven_one_f_one_b_s
from megatron_2bw.planner.periods import (
    Pipeline,
    Stage,
    gpipe_s,
    inter_layer_s,
    interleaved_s,
    one_f_one_b_s,
    two_bw_s,
)
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.lowering import with_gradient_copy
from megatron_2bw.schedule.program import GradientCopy
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate, steady_state

from .interleaved import interleaved

EVEN = (0, 0), (0, 0)
MORE_ON_FIRST_AND_LAST = [EVEN, ((0, 0), (1, 2)), ((1, 1), (3, 3)), ((0, 2), (5, 0))]
"""Forward and backward of embedding and loss, beyond the layers."""
MORE_ON_FIRST = [((1, 1), (0, 0)), ((0, 2), (1, 0)), ((2, 0), (0, 1))]
"""With a small vocabulary the embedding, for which a sum is sent, takes longer than the loss."""
SENDS = (0, Fraction(1, 4), Fraction(1, 2))
SLOW_SENDS = (Fraction(1, 4), 2, 7)
"""From shorter than a forward to longer than a forward and a backward."""
REDUCTIONS = [(0, 0), (1, 1), (8, 8), (1, 8), (8, 1)]
"""Of gradients and of the norm: from less than a forward to more than a batch."""


def pipelines(
    sizes: list[tuple[int, int]],
    chunks: int = 1,
    ends: Sequence[tuple[tuple[int, int], ...]] = MORE_ON_FIRST_AND_LAST,
    sends: Sequence[int | Fraction] = SENDS,
    **more: int,
) -> Iterator[Pipeline]:
    """Small pipelines of all kinds; times are integers and fractions, so that results are exact."""
    for (stages, microbatches), (f, b), (first, last), send_s in itertools.product(
        sizes, [(1, 2), (3, 1)], ends, sends
    ):
        f, b = chunks * f, chunks * b
        yield Pipeline(
            stages=stages,
            microbatches=microbatches,
            first=Stage(f + first[0], b + first[1]),
            middle=Stage(f, b),
            last=Stage(f + last[0], b + last[1]),
            send_s=send_s,
            **more,
        )


def durations(p: Pipeline) -> Durations:
    stages = [stage for stage, count in zip(p.kinds, p.counts, strict=True) for _ in range(count)]
    return Durations(
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        update_s=p.update_s,
        send_s=p.send_s,
        gradients_s=p.gradients_s,
        norm_s=p.norm_s,
    )


@pytest.mark.parametrize(
    ("name", "closed_form_s"),
    [("gpipe", gpipe_s), ("1f1b-flush", one_f_one_b_s), ("inter-layer", inter_layer_s)],
)
def test_with_a_flush(name, closed_form_s):
    sizes = [(d, m) for d in range(1, 6) for m in (1, 2, 3, 7)]
    for p in pipelines(sizes, update_s=2, gradients_s=1, norm_s=1):
        simulated_s = simulate(build(name, stages=p.stages, microbatches=p.microbatches), durations(p), 1).makespan_s
        assert closed_form_s(p) == simulated_s, p


@pytest.mark.parametrize("closed_form_s", [one_f_one_b_s, uneven_one_f_one_b_s])
def test_1f1b_with_a_longer_first_stage_or_slow_links(closed_form_s):
    """The slowest stage is the first, and a link takes one tensor after the other."""
    sizes = [(d, m) for d in range(1, 6) for m in (1, d, 2 * d + 1)]
    for p in pipelines(sizes, ends=[*MORE_ON_FIRST, *MORE_ON_FIRST_AND_LAST], sends=SLOW_SENDS):
        simulated_s = simulate(build("1f1b-flush", stages=p.stages, microbatches=p.microbatches), durations(p), 1)
        assert closed_form_s(p) == simulated_s.makespan_s, p


def uneven(
    sizes: list[tuple[int, int]], ends: tuple[int, ...], sends: Sequence[int | Fraction] = SENDS, **more: int
) -> Iterator[Pipeline]:
    """Pipelines whose first and last stages have layers of their own, and the others 8."""
    for (stages, microbatches), first, last, send_s in itertools.product(sizes, ends, ends, sends):
        first, middle, last = (Stage(layers, 2 * layers) for layers in (first, 8, last))
        yield Pipeline(
            stages=stages, microbatches=microbatches, first=first, middle=middle, last=last, send_s=send_s, **more
        )


def test_uneven_stages_with_a_flush():
    """Few enough microbatches to follow all of them, and so many that they repeat."""
    sizes = [(d, m) for d in range(1, 6) for m in (1, 3, 4, 9, 40)]
    for p in uneven(sizes, (4, 7, 8, 10), (0, Fraction(1, 2), 30), update_s=2, gradients_s=1, norm_s=1):
        program = build("1f1b-flush", stages=p.stages, microbatches=p.microbatches)
        assert uneven_one_f_one_b_s(p) == simulate(program, durations(p), 1).makespan_s, p
        assert one_f_one_b_s(p) <= uneven_one_f_one_b_s(p), p


@pytest.mark.parametrize("copy", [GradientCopy.WHOLE, GradientCopy.NONE])
def test_uneven_stages_of_2bw(copy: GradientCopy):
    """With shorter ends, as a search spreads them."""
    sizes = [(d, m) for d in (2, 3, 4) for m in (max(d - 1, 1), d, 2 * d + 1)]
    for p in uneven(sizes, (6, 8), (0, Fraction(1, 2), 5), update_s=2, gradients_s=1, norm_s=1):
        assert two_bw_s(p, copy=copy) == pytest.approx(simulated_two_bw_s(p, copy=copy), rel=1e-12), p


@pytest.mark.parametrize(
    ("microbatches", "stages", "send_s"),
    [
        (11, [(9, 10), (6, 11), (6, 11), (1, 12)], 4),
        (10, [(2, 13), (5, 11), (2, 5)], 5),
    ],
)
def test_turns_of_two_widths(microbatches: int, stages: list[tuple[int, int]], send_s: int):
    """The slowest path turns over all stages here and over all but one there."""
    first, middle, last = (Stage(*stages[index]) for index in (0, 1, -1))
    p = Pipeline(
        stages=len(stages), microbatches=microbatches, first=first, middle=middle, last=last, send_s=send_s, update_s=1
    )
    for copy in (GradientCopy.WHOLE, GradientCopy.NONE):
        assert two_bw_s(p, copy=copy) == pytest.approx(simulated_two_bw_s(p, copy=copy), rel=1e-12)


def test_even_stages_have_one_formula():
    for d, m in itertools.product(range(1, 7), range(1, 12)):
        p = Pipeline(
            stages=d, microbatches=m, first=Stage(1, 2), middle=Stage(1, 2), last=Stage(1, 2), send_s=Fraction(1, 8)
        )
        hops = d - 1 + m - 1 - -(-(m - 1) // d) if d > 1 else 0
        assert one_f_one_b_s(p) == (m + d - 1) * 3 + Fraction(2, 8) * hops


def test_interleaved():
    sizes = [(2, 2), (2, 6), (3, 3), (3, 6), (4, 8)]
    for chunks in (2, 3):
        for p in pipelines(sizes, chunks):
            extra_s = interleaved_s(p, chunks) - simulated_interleaved_s(p, chunks)
            assert extra_s == 0 if p.send_s == 0 else 0 <= extra_s <= 2 * p.stages * p.send_s, (p, chunks)


def simulated_interleaved_s(p: Pipeline, chunks: int) -> Fraction:
    forward_s, backward_s = ([way // chunks] * (p.stages * chunks) for way in p.middle)
    for end, stage in ((0, p.first), (-1, p.last)):
        forward_s[end] += stage.forward_s - p.middle.forward_s
        backward_s[end] += stage.backward_s - p.middle.backward_s
    times = Durations(forward_s=tuple(forward_s), backward_s=tuple(backward_s), send_s=p.send_s)
    return simulate(interleaved(p.stages, p.microbatches, chunks), times, 1).makespan_s


def simulated_two_bw_s(
    p: Pipeline, extra: int = 0, copy: GradientCopy = GradientCopy.WHOLE, delayed: int | None = None
) -> Fraction:
    options = {"extra_in_flight": extra, "delayed_microbatches": delayed}
    schedule = build("2bw", stages=p.stages, microbatches=p.microbatches, **options)
    return steady_state(with_gradient_copy(schedule, copy), durations(p)).period_s


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize(("gradients_s", "norm_s"), REDUCTIONS)
def test_2bw_without_transfers(copy: GradientCopy, gradients_s: int, norm_s: int):
    """Whatever is kept of gradients, however long their sums take."""
    sizes = [(d, m) for d in (1, 2, 3, 4) for m in range(max(d - 1, 1), d + 2)]
    for p in pipelines(sizes, update_s=1, gradients_s=gradients_s, norm_s=norm_s):
        if p.send_s == 0:
            assert two_bw_s(p, copy=copy) == simulated_two_bw_s(p, copy=copy), p


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("gradients_s", "norm_s"), [(0, 0), (2, 2), (1, 5), (5, 1)])
def test_2bw_with_transfers(copy: GradientCopy, extra: int, gradients_s: int, norm_s: int):
    """However an update and the turns over all stages fall together."""
    sizes = [(2, 1 + extra), (2, 3), (3, 2 + 2 * extra), (3, 5)]
    ends = [EVEN, ((0, 1), (1, 2)), ((1, 1), (0, 0))]
    for p in pipelines(sizes, ends=ends, sends=SLOW_SENDS, update_s=3, gradients_s=gradients_s, norm_s=norm_s):
        found_s, exact_s = two_bw_s(p, extra_in_flight=extra, copy=copy), simulated_two_bw_s(p, extra, copy)
        # Sums of two stages may be on one path, and not every path takes both a sum and the update.
        error = 0.05 if copy is GradientCopy.SHARD and gradients_s > 2 else 1e-12
        assert found_s == pytest.approx(exact_s, rel=error), p


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize(("gradients_s", "norm_s"), REDUCTIONS)
def test_2bw_with_some_delayed_microbatches(copy: GradientCopy, gradients_s: int, norm_s: int):
    """An update that is needed sooner: from where nothing hides it to where the whole batch does."""
    sizes = [(1, 3), (2, 4), (3, 5), (4, 7)]
    for p in pipelines(sizes, update_s=1, gradients_s=gradients_s, norm_s=norm_s):
        for delayed in range(max(p.stages - 1, 1), p.microbatches + 1):
            if p.send_s == 0:
                assert two_bw_s(p, copy=copy, delayed=delayed) == simulated_two_bw_s(p, 0, copy, delayed), (p, delayed)


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("gradients_s", "norm_s"), [(1, 1), (16, 16), (1, 16), (16, 1)])
def test_2bw_with_transfers_and_all_that_may_wait(copy: GradientCopy, extra: int, gradients_s: int, norm_s: int):
    """With a shard never too little; a little too much where no path takes both its sum and the update."""
    all_kinds = pipelines([(2, 4), (3, 7), (4, 8)], update_s=1, gradients_s=gradients_s, norm_s=norm_s)
    for p in itertools.islice(all_kinds, 0, None, 7):
        ahead = (1 + extra) * (p.stages - 1)
        for delayed in {ahead, ahead + 1, (ahead + p.microbatches) // 2, p.microbatches}:
            exact_s = simulated_two_bw_s(p, extra, copy, delayed)
            found_s = two_bw_s(p, extra_in_flight=extra, delayed=delayed, copy=copy)
            most_s = exact_s * (1.03 if copy is GradientCopy.SHARD else 1 + 1e-12)
            assert exact_s * (1 - 1e-12) <= found_s <= most_s, (p, delayed)


def test_a_first_stage_that_is_lighter_with_few_microbatches():
    """In closed form: the slowest stage has all of its work to do one after the other."""
    pipeline = Pipeline(stages=3, microbatches=2, first=Stage(4, 1), middle=Stage(2, 9), last=Stage(1, 2), send_s=2)
    durations = Durations(forward_s=(4, 2, 1), backward_s=(1, 9, 2), send_s=2)
    assert one_f_one_b_s(pipeline) == steady_state(build("1f1b-flush", stages=3, microbatches=2), durations).period_s
