"""The time of a batch of 2BW, in closed form and followed, against the simulator of the Programs that run."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any

import pytest

from megatron_2bw.planner.pipeline import endless, periods
from megatron_2bw.planner.pipeline.periods import Delay, Pipeline, Stage
from megatron_2bw.schedule.lowering import with_gradient_copy
from megatron_2bw.schedule.program import GradientCopy
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import steady_state

from .pipelines import EVEN, SLOW_SENDS, durations, of_each, pipelines, uneven

REDUCTIONS = [(0, 0), (1, 1), (8, 8), (1, 8), (8, 1)]
"""Of gradients and of the norm: from less than a forward to more than a batch."""


def simulated_s(p: Pipeline, *, copy: GradientCopy, **options: Any) -> Fraction:
    programs = build(
        "2bw",
        stages=p.stages,
        microbatches=p.microbatches,
        extra_in_flight=options.get("extra_in_flight", 0),
        delayed_microbatches=options.get("delayed"),
    )
    return steady_state(with_gradient_copy(programs, copy), durations(p)).period_s


def check(p: Pipeline, **options: Any) -> None:
    """What is followed is the simulator's time, and so is the closed form where it says so; else it is not longer."""
    delay = Delay(**options)
    found_s, exact_s = periods.two_bw_s(p, delay), simulated_s(p, **options)
    assert endless.two_bw_s(p, delay) == pytest.approx(exact_s, rel=1e-12), (p, options)
    if periods.two_bw_is_exact(p, delay):
        assert found_s == pytest.approx(exact_s, rel=1e-12), (p, options)
    assert found_s <= exact_s * (1 + 1e-12), (p, options)


@pytest.mark.parametrize("copy", GradientCopy)
def test_uneven_stages(copy: GradientCopy):
    """With shorter ends, as a search spreads them."""
    sizes = [(d, m) for d in (2, 3, 4) for m in (max(d - 1, 1), d, 2 * d + 1)]
    for p in uneven(sizes, (6, 8), (0, Fraction(1, 2), 5), update_s=2, gradients_s=1, norm_s=1):
        check(p, copy=copy)


@pytest.mark.parametrize(
    ("microbatches", "stages", "send_s"),
    [
        (11, [(9, 10), (6, 11), (6, 11), (1, 12)], 4),
        (10, [(2, 13), (5, 11), (2, 5)], 5),
    ],
)
@pytest.mark.parametrize("copy", GradientCopy)
def test_turns_of_two_widths(microbatches: int, stages: list[tuple[int, int]], send_s: int, copy: GradientCopy):
    """The slowest path turns over all stages here and over all but one there."""
    first, middle, last = (Stage(*stages[index]) for index in (0, 1, -1))
    p = Pipeline(
        stages=len(stages), microbatches=microbatches, first=first, middle=middle, last=last, send_s=send_s, update_s=1
    )
    check(p, copy=copy)


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize(("gradients_s", "norm_s"), REDUCTIONS)
def test_some_delayed_microbatches(copy: GradientCopy, gradients_s: int, norm_s: int):
    """An update that is needed sooner: from where nothing hides it to where the whole batch does."""
    sizes = [(1, 3), (2, 4), (3, 5), (4, 7)]
    for p in pipelines(sizes, sends=(0,), update_s=1, gradients_s=gradients_s, norm_s=norm_s):
        for delayed in range(max(p.stages - 1, 1), p.microbatches + 1):
            check(p, copy=copy, delayed=delayed)


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("gradients_s", "norm_s"), [(0, 0), (2, 2), (1, 5), (5, 1)])
def test_transfers(copy: GradientCopy, extra: int, gradients_s: int, norm_s: int):
    """However an update and the turns over all stages fall together."""
    sizes = [(2, 1 + extra), (2, 3), (3, 2 + 2 * extra), (3, 5)]
    ends = [EVEN, ((0, 1), (1, 2)), ((1, 1), (0, 0))]
    for p in pipelines(sizes, ends=ends, sends=SLOW_SENDS, update_s=3, gradients_s=gradients_s, norm_s=norm_s):
        check(p, extra_in_flight=extra, copy=copy)


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("gradients_s", "norm_s"), [(1, 1), (16, 16), (1, 16), (16, 1)])
def test_transfers_and_all_that_may_wait(copy: GradientCopy, extra: int, gradients_s: int, norm_s: int):
    all_kinds = pipelines([(2, 4), (3, 7), (4, 8)], update_s=1, gradients_s=gradients_s, norm_s=norm_s)
    for p in itertools.islice(all_kinds, 0, None, 7):
        ahead = (1 + extra) * (p.stages - 1)
        for delayed in {ahead, ahead + 1, (ahead + p.microbatches) // 2, p.microbatches}:
            check(p, extra_in_flight=extra, delayed=delayed, copy=copy)


@pytest.mark.parametrize("copy", GradientCopy)
@pytest.mark.parametrize("seed", range(4))
def test_stages_and_links_that_all_differ(copy: GradientCopy, seed: int):
    """A layout spreads layers as it likes."""
    rng = random.Random(seed)
    for _ in range(25):
        stages, extra = rng.randint(2, 5), rng.choice((0, 0, 1, 2))
        ahead = (1 + extra) * (stages - 1)
        microbatches = ahead + rng.choice((0, 1, 2, 7, 30))
        each = tuple(Stage(rng.randint(1, 9), rng.randint(1, 16)) for _ in range(stages))
        sends_s = tuple(Fraction(rng.randint(0, 40), 4) for _ in each[1:])
        more = {"update_s": rng.randint(0, 30), "gradients_s": rng.randint(0, 40), "norm_s": rng.randint(0, 9)}
        p = of_each(each, sends_s, microbatches, **more)
        delayed = rng.choice((None, rng.randint(ahead, microbatches)))
        check(p, extra_in_flight=extra, delayed=delayed, copy=copy)


@pytest.mark.parametrize("copy", GradientCopy)
def test_no_more_delayed_than_the_first_stage_runs_ahead(copy: GradientCopy):
    """With forwards that take most of the time, one path may take the updates of several stages."""
    for (stages, microbatches), forward_s, send_s, update_s in itertools.product(
        [(2, 1), (2, 3), (3, 4), (3, 5), (4, 5)], (4, 8), (Fraction(1, 2), Fraction(9, 4), Fraction(15, 4)), (5, 9)
    ):
        even = Stage(forward_s, 1)
        p = Pipeline(
            stages=stages,
            microbatches=microbatches,
            first=even,
            middle=even,
            last=even,
            send_s=send_s,
            update_s=update_s,
            gradients_s=1,
        )
        for delayed in {stages - 1, microbatches}:
            check(p, delayed=delayed, copy=copy)


def test_what_two_updates_on_one_path_take():
    """Over slow links; the closed form counts one."""
    slower, faster = Stage(7, 8), Stage(8, 4)
    p = Pipeline(
        stages=2, microbatches=16, first=faster, middle=slower, last=slower, send_s=20, update_s=30, gradients_s=20
    )
    options = {"extra_in_flight": 2, "copy": GradientCopy.WHOLE}
    check(p, **options)
    assert periods.two_bw_s(p, Delay(**options)) < endless.two_bw_s(p, Delay(**options))


LONG = {
    "long sums": {"last": Stage(1.5, 3.0), "gradients_s": 70.0},
    "slow links": {"last": Stage(1.5, 3.0), "send_s": 2.5},
    "stages that differ": {"each": (*[Stage(1.0, 2.0)] * 3, Stage(1.25, 2.5), *[Stage(1.0, 2.0)] * 4)},
}


@pytest.mark.parametrize("kind", LONG)
def test_long_batches_are_not_followed_to_their_end(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Nor many of them."""
    steps = []
    step = endless._Run._step
    monkeypatch.setattr(endless._Run, "_step", lambda self, index: (steps.append(index), step(self, index)))
    even, copy = Stage(1.0, 2.0), GradientCopy.SHARD
    more = {"last": even, "update_s": 1.0} | LONG[kind]
    found_s = []
    for microbatches in (1000, 10**6):
        p = Pipeline(stages=8, microbatches=microbatches, first=even, middle=even, **more)
        assert not periods.two_bw_is_exact(p, Delay(copy=copy))
        found_s.append(endless.two_bw_s(p, Delay(copy=copy)))
        assert len(steps) < 250
        steps.clear()
    per_microbatch_s = {"long sums": 4.5, "slow links": (8 * 3 + 1.5 + 14 * 2.5) / 8, "stages that differ": 3.75}[kind]
    assert found_s[1] - found_s[0] == pytest.approx(999_000 * per_microbatch_s, rel=1e-9)


def test_a_slowest_stage_with_which_others_never_catch_up_in_time():
    """For thousands of batches they would; none takes longer meanwhile."""
    even = Stage(1.0, 2.0)
    p = Pipeline(
        stages=4, microbatches=8, first=even, middle=even, last=Stage(1.0, 2.000001), gradients_s=5.0, update_s=1.0
    )
    assert endless.two_bw_s(p, Delay(copy=GradientCopy.SHARD)) == pytest.approx(8 * 3.000001 + 1 + 4, rel=1e-12)


def test_links_that_take_nearly_as_long_as_stages():
    """It takes very long until everything repeats; the exact time is the slowest cycle of the graph of all actions."""
    even = Stage(0.5591959804035296, 1.0772588729981258)
    p = Pipeline(
        stages=32,
        microbatches=33,
        first=even,
        middle=even,
        last=Stage(0.5349404660449538, 0.9840618007717357),
        send_s=0.8182269892397609,
        update_s=0.013942957043800087,
        gradients_s=0.5591962717204153,
    )
    options = {"delayed": 32, "copy": GradientCopy.WHOLE}
    assert not periods.two_bw_is_exact(p, Delay(**options))
    assert endless.two_bw_s(p, Delay(**options)) == pytest.approx(106.26440957038432, rel=1e-10)
