"""Closed forms of the time per batch against the simulator."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import pytest

from megatron_2bw.planner.pipeline.batch import batch_s
from megatron_2bw.planner.pipeline.followed import uneven_one_f_one_b_s
from megatron_2bw.planner.pipeline.periods import (
    Pipeline,
    Stage,
    gpipe_s,
    inter_layer_s,
    least_uneven_s,
    one_f_one_b_s,
)
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate, steady_state

from .pipelines import MORE_ON_FIRST, MORE_ON_FIRST_AND_LAST, SLOW_SENDS, durations, pipelines, uneven


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


def test_uneven_stages_with_a_flush():
    """Few enough microbatches to follow all of them, and so many that they repeat."""
    sizes = [(d, m) for d in range(1, 6) for m in (1, 3, 4, 9, 40)]
    for p in uneven(sizes, (4, 7, 8, 10), (0, Fraction(1, 2), 30), update_s=2, gradients_s=1, norm_s=1):
        program = build("1f1b-flush", stages=p.stages, microbatches=p.microbatches)
        assert uneven_one_f_one_b_s(p) == simulate(program, durations(p), 1).makespan_s, p
        least_s = least_uneven_s(dataclasses.replace(p, each=tuple(p.in_order)))
        assert max(one_f_one_b_s(p), least_s) <= uneven_one_f_one_b_s(p), p
        if p.first == p.middle == p.last and not p.send_s:
            assert least_s == uneven_one_f_one_b_s(p), p


def test_1f1b_with_a_much_longer_first_stage_and_few_microbatches():
    """Its closed form is too short then; what is planned is not."""
    for stages, microbatches in itertools.product(range(2, 6), range(1, 6)):
        for first, send_s in itertools.product((Stage(6, 9), Stage(3, 2), Stage(1, 8)), SLOW_SENDS):
            last = Stage(2, 2)
            p = Pipeline(
                stages=stages,
                microbatches=microbatches,
                first=first,
                middle=Stage(1, 1) if stages > 2 else last,
                last=last,
                send_s=send_s,
            )
            asked = Layout(schedule="1f1b-flush", pipeline=stages, data=1, global_batch=microbatches)
            simulated_s = simulate(build("1f1b-flush", stages=stages, microbatches=microbatches), durations(p), 1)
            assert one_f_one_b_s(p) <= batch_s(asked, p) == simulated_s.makespan_s, p


def test_even_stages_have_one_formula():
    for d, m in itertools.product(range(1, 7), range(1, 12)):
        p = Pipeline(
            stages=d, microbatches=m, first=Stage(1, 2), middle=Stage(1, 2), last=Stage(1, 2), send_s=Fraction(1, 8)
        )
        hops = d - 1 + m - 1 - -(-(m - 1) // d) if d > 1 else 0
        assert one_f_one_b_s(p) == (m + d - 1) * 3 + Fraction(2, 8) * hops


def test_a_first_stage_that_is_lighter_with_few_microbatches():
    """In closed form: the slowest stage has all of its work to do one after the other."""
    pipeline = Pipeline(stages=3, microbatches=2, first=Stage(4, 1), middle=Stage(2, 9), last=Stage(1, 2), send_s=2)
    durations = Durations(forward_s=(4, 2, 1), backward_s=(1, 9, 2), send_s=2)
    assert one_f_one_b_s(pipeline) == steady_state(build("1f1b-flush", stages=3, microbatches=2), durations).period_s
