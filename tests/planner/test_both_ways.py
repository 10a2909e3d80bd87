"""Pipelines in both directions, followed, take as long as the simulator says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from megatron_2bw.planner.pipeline.both_ways import chimera_s, gems_s, least_both_ways_s, ordered_s
from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate
from tests.planner.pipelines import SLOW_SENDS, durations, pipelines

FOLLOWED = {
    "gems": gems_s,
    "chimera": chimera_s,
    "mixpipe": lambda p: ordered_s(build("mixpipe", stages=p.stages, microbatches=p.microbatches), p),
}


def drawn(name: str, count: int) -> Iterator[Pipeline]:
    """Stages and links that all differ."""
    random = Random(3)
    for _ in range(count):
        stages = random.choice((2, 4, 6, 8))
        each = tuple(Stage(random.randint(1, 5), random.randint(1, 9)) for _ in range(stages))
        yield Pipeline(
            stages=stages,
            microbatches={"gems": 1, "chimera": stages, "mixpipe": stages}[name] * random.randint(2, 12),
            first=each[0],
            middle=max(each),
            last=each[-1],
            each=each,
            sends_s=tuple(random.randint(0, 4) for _ in range(stages - 1)),
            update_s=3,
            gradients_s=2,
            norm_s=1,
        )


def simulated_s(name: str, p: Pipeline) -> float:
    times = replace(durations(p), update_s=p.update_s / 2)
    return simulate(build(name, stages=p.stages, microbatches=p.microbatches), times, 1).makespan_s


@pytest.mark.parametrize("name", FOLLOWED)
def test_lighter_and_heavier_ends(name: str):
    sizes = [(stages, units * stages) for stages in (2, 4, 6) for units in (1, 2, 4)]
    for p in pipelines(sizes, sends=(0, *SLOW_SENDS), gradients_s=2, norm_s=1, update_s=4):
        assert FOLLOWED[name](p) == simulated_s(name, p), p


@pytest.mark.parametrize("name", FOLLOWED)
def test_stages_and_links_of_all_kinds(name: str):
    for p in drawn(name, 60):
        assert FOLLOWED[name](p) == simulated_s(name, p), p


@pytest.mark.parametrize("name", ["chimera", "mixpipe"])
def test_the_least_is_nowhere_too_long(name: str):
    shares = [least_both_ways_s(p) / FOLLOWED[name](p) for p in drawn(name, 60)]
    assert max(shares) <= 1
    assert max(shares) > 0.8


@pytest.mark.parametrize(("k", "gamma"), [(2, 0), (2, 1), (4, 0), (4, 2), (6, 1), (8, 0)])
def test_few_forwards_in_flight_take_longer(k: int, gamma: int):
    limited = build("mixpipe", stages=8, microbatches=8, k=k, gamma=gamma)
    for p in (replace(p, microbatches=8) for p in drawn("mixpipe", 30) if p.stages == 8):
        times = replace(durations(p), update_s=p.update_s / 2)
        exact_s = ordered_s(limited, p)
        assert exact_s == simulate(limited, times, 1).makespan_s
        assert least_both_ways_s(p) <= least_both_ways_s(p, in_flight=k + gamma) <= exact_s
    even = replace(p, each=(), sends_s=(), first=Stage(1, 2), middle=Stage(1, 2), last=Stage(1, 2))
    assert least_both_ways_s(even, in_flight=2) > least_both_ways_s(even)


def test_units_that_take_turns():
    """Where every second one takes longer, leaving them out two by two changes nothing."""
    each = tuple(Stage(*pair) for pair in ((1, 4), (1, 1), (3, 1), (1, 3), (3, 2), (1, 1)))
    p = Pipeline(stages=6, microbatches=6, first=each[0], middle=each[4], last=each[-1], each=each, send_s=1)
    for units in range(1, 14):
        several = replace(p, microbatches=6 * units)
        assert chimera_s(several) == simulated_s("chimera", several)
    times_s = [chimera_s(replace(p, microbatches=6 * units)) for units in (10, 11, 12)]
    assert [after_s - before_s for before_s, after_s in pairwise(times_s)] == [34, 33]
