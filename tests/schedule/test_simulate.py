"""Simulated times, bubbles and memory are those of the papers, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_2bw.schedule.action import Action, ActionType, Reduction
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.engine import Model, run
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import lower, with_gradient_copy
from megatron_2bw.schedule.program import GradientCopy, Schedule
from megatron_2bw.schedule.registry import SCHEDULES, build
from megatron_2bw.schedule.simulate import simulate, steady_state
from megatron_2bw.schedule.timeline import Event, Timeline
from megatron_2bw.schedule.validation.feasible import works

from . import others

ONE_TWO = Durations(forward_s=1, backward_s=2)
SIZES = [(d, m) for d in range(1, 9) for m in (*range(1, 10), 16)]


@pytest.mark.parametrize(("forward_s", "backward_s"), [(1, 2), (1, 1), (3, 2), (Fraction(2, 3), Fraction(5, 7))])
def test_formulas(forward_s: Fraction, backward_s: Fraction):
    """Spans, bubbles and activations of schedules with F, B alone; T batches of m microbatches on d stages."""
    durations = Durations(forward_s=forward_s, backward_s=backward_s)
    pair_s, batches = Fraction(forward_s) + backward_s, 3
    for d, m in SIZES:
        for name in ("1f1b-flush", "gpipe"):
            timeline = simulate(build(name, stages=d, microbatches=m), durations, batches)
            assert timeline.makespan_s == batches * (m + d - 1) * pair_s
            assert timeline.bubble_ratio == Fraction(d - 1, m + d - 1)
            most = [min(d - s, m) if name == "1f1b-flush" else m for s in range(d)]
            assert timeline.peak_in_flight == tuple(most)
            assert timeline.peak_versions == (1,) * d
        if m >= d - 1:
            timeline = simulate(build("2bw", stages=d, microbatches=m), durations, batches)
            assert timeline.makespan_s == (batches * m + d - 1) * pair_s
            assert timeline.bubble_ratio == Fraction(d - 1, batches * m + d - 1)
            # One batch more than fits is never in flight; the last stage updates when its batch is done.
            assert timeline.peak_in_flight == tuple(min(d - s, batches * m) for s in range(d))
            assert timeline.peak_versions == (*[2] * (d - 1), 1)


@pytest.mark.parametrize("name", others.PIPELINED)
def test_endless_runs(name: str):
    for d, m in SIZES:
        if name == "2bw" and m < d - 1:
            continue
        steady = steady_state(build(name, stages=d, microbatches=m), ONE_TWO)
        idle = 0 if name == "2bw" else d - 1
        assert steady == (3 * (m + idle), Fraction(idle, m + idle)), f"{name}, d={d}, m={m}"


@pytest.mark.parametrize(
    ("stages", "microbatches", "at_batch_end", "before_backward", "before_use"),
    [(2, 2, 1.12, 1.28, 1.48), (4, 4, 1.16, 1.23, 1.72), (8, 8, 1.18, 1.21, 1.83), (8, 16, 1.11, 1.13, 1.42)],
)
def test_when_an_update_waits(
    stages: int, microbatches: int, at_batch_end: float, before_backward: float, before_use: float
):
    """Speed over 1F1B with a flush, 40 batches: an update that blocks costs most of what 2BW gains."""

    def span_s(schedule: Schedule) -> int:
        return simulate(schedule, ONE_TWO, 40).makespan_s

    flush_s = span_s(build("1f1b-flush", stages=stages, microbatches=microbatches))
    assert round(flush_s / span_s(others.two_bw_update_at_batch_end(stages, microbatches)), 2) == at_batch_end
    two_bw = build("2bw", stages=stages, microbatches=microbatches)
    assert round(flush_s / span_s(with_gradient_copy(two_bw, GradientCopy.NONE)), 2) == before_backward
    assert round(flush_s / span_s(two_bw), 2) == before_use


def test_latency_of_reductions_hides_in_the_slack():
    """Half a forward for the whole chain costs nothing from m = d on, where stage 0 has slack."""
    durations = Durations(forward_s=1, backward_s=2, gradients_s=Fraction(1, 4), norm_s=Fraction(1, 4))
    for stages, cost in ((2, Fraction(1, 6)), (4, Fraction(1, 18))):
        for microbatches, expected in ((stages - 1, cost), (stages, 0), (stages + 1, 0)):
            period_s = steady_state(build("2bw", stages=stages, microbatches=microbatches), durations).period_s
            assert period_s / (3 * microbatches) - 1 == expected


def test_an_update_that_is_needed_by_the_batch_after_it():
    """Hidden by one delayed microbatch more than the first stage runs ahead; without it, all of it shows."""
    half_s = Fraction(1, 2)
    durations = Durations(forward_s=1, backward_s=2, gradients_s=half_s, norm_s=half_s, update_s=half_s)
    for stages in (2, 4):
        whole = steady_state(build("2bw", stages=stages, microbatches=8), durations).period_s
        for delayed, more in ((stages - 1, 1), (stages, 0), (stages + 1, 0)):
            schedule = build("2bw", stages=stages, microbatches=8, delayed_microbatches=delayed)
            assert steady_state(schedule, durations).period_s == whole + more, delayed


def test_latency_of_transfers():
    """d - s activations in flight leave the latency of each hop exposed."""
    durations = Durations(forward_s=1, backward_s=2, send_s=Fraction(1, 10))
    assert steady_state(build("2bw", stages=4, microbatches=4), durations).period_s / 12 == Fraction(21, 20)
    flush = simulate(build("gpipe", stages=4, microbatches=4), durations, 1)
    assert flush.makespan_s == 21 + 6 * Fraction(1, 10)


@pytest.mark.parametrize("number", [Fraction, float])
def test_turns_that_do_not_fit_into_a_batch(number: type):
    """Where transfers are slow, ``(1+x)*(d-1) + 1`` microbatches pass in a turn over all stages, of several batches."""
    send_s = 2
    for stages, microbatches, extra in [(3, 2, 0), (3, 4, 0), (3, 5, 0), (4, 5, 0), (3, 4, 1), (4, 6, 1), (5, 9, 1)]:
        schedule = build("2bw", stages=stages, microbatches=microbatches, extra_in_flight=extra)
        durations = Durations(forward_s=number(1), backward_s=number(2), send_s=number(send_s))
        turn_s, passing = 3 * stages + 2 * send_s * (stages - 1), (1 + extra) * (stages - 1) + 1
        expected_s = max(Fraction(microbatches * turn_s, passing), 3 * microbatches)
        found_s = steady_state(schedule, durations).period_s
        assert found_s == (expected_s if number is Fraction else pytest.approx(float(expected_s), rel=1e-11))


@pytest.mark.parametrize("longer_s", [(0, 1), (0, Fraction(1, 100), 1), (0.0, 0.1, 1.0)])
def test_stages_that_are_nearly_equally_slow(longer_s: tuple[Fraction, ...]):
    """The first ones run ahead for hundreds of batches, and then as fast as the last one."""
    durations = Durations(forward_s=tuple(1000 + one_s for one_s in longer_s), backward_s=2000)
    schedule = build("2bw", stages=len(longer_s), microbatches=8, extra_in_flight=3)
    steady = steady_state(schedule, durations)
    assert steady.period_s == pytest.approx(8 * 3001, rel=1e-11)
    assert 0 < steady.bubble_ratio < 1e-3


def test_every_reduction_has_its_own_duration():
    durations = Durations(forward_s=1, backward_s=2, gradients_s=10, embedding_s=200, norm_s=4000)
    schedule = build("gpipe", stages=2, microbatches=1)
    for reductions, expected_s in ([], 0), ([Reduction.GRADIENTS, Reduction.NORM], 4010), (Reduction, 4210):
        assert steady_state(lower(schedule, reductions), durations).period_s == 6 + expected_s


def test_one_more_activation_per_boundary_hides_transfers():
    """Up to F + B split over the hops of a round trip: 2(d-1) of them, with d-1 microbatches more on the way."""
    for send_s in (Fraction(1, 10), Fraction(3, 2)):
        durations = Durations(forward_s=1, backward_s=2, send_s=send_s)
        schedule = build("2bw", stages=4, microbatches=6, extra_in_flight=1)
        assert steady_state(schedule, durations).period_s == 3 * 6
        assert simulate(schedule, durations, 8).peak_in_flight == (7, 5, 3, 1)


def test_a_channel_carries_one_tensor_at_a_time():
    timeline = simulate(build("gpipe", stages=2, microbatches=3), Durations(forward_s=1, backward_s=1, send_s=5), 1)
    starts = [event.start_s for event in timeline.events[1] if event.action.type is ActionType.FORWARD]
    assert starts == [6, 11, 16]


def test_uneven_stages_and_updates():
    durations = Durations(forward_s=(1, 2), backward_s=(2, 4), update_s=(3, 1))
    timeline = simulate(build("gpipe", stages=2, microbatches=1), durations, 1)
    assert [[(str(e.action), e.start_s, e.end_s) for e in events] for events in timeline.events] == [
        [("0F0v0", 0, 1), ("0B0v0", 7, 9), ("0UPDATE", 9, 12)],
        [("1F0v0", 1, 3), ("1B0v0", 3, 7), ("1UPDATE", 9, 10)],
    ]
    assert timeline.bubble_ratio == Fraction(6 + 5, 24)


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_in_one_hardware_queue_cost_nothing(name: str):
    """The order of posted receives never holds up a computation, even where all actions share a queue."""
    for d, m in [(d, m) for d, m in SIZES if works(name, stages=d, microbatches=m)]:
        schedule = lower(build(name, stages=d, microbatches=m), [Reduction.GRADIENTS])
        queued, host = (run(schedule, [3, 1], ONE_TWO, model=model) for model in (Model.IN_ORDER_QUEUE, Model.HOST))
        assert not queued.blocked
        assert queued.timed == host.timed


def moved(schedule: Schedule, rank: int, action: str) -> set[str]:
    """Actions that start or end at another time when ``action`` takes very long."""
    as_planned = simulate(schedule, ONE_TWO, 8)
    delayed = simulate(schedule, ONE_TWO, 8, delays={(rank, Action.parse(action)): 1000})
    pairs = zip(as_planned.events, delayed.events, strict=True)
    return {str(a.action) for before, after in pairs for a, b in zip(before, after, strict=True) if a != b}


def test_no_stage_waits_for_another_at_a_batch_boundary():
    """With its last forward of batch 4 late on stage 3, stage 0 starts batch 5 as far as inputs allow."""
    two_bw = moved(build("2bw", stages=4, microbatches=4), 3, "3F3@4v3")
    assert {"3F3@4v3", "3B3@4v3", "0B3@4v3", "0UPDATE@4"} <= two_bw
    assert not {"0F0@5v4", "0F1@5v4", "0F2@5v4", "1F1@5v4", "2F0@5v4", "0B2@4v3", "0UPDATE@3"} & two_bw
    blocking = moved(others.two_bw_update_at_batch_end(4, 4), 3, "3F3@4v3")
    assert "0F3@5v4" in blocking
    flush = moved(build("1f1b-flush", stages=4, microbatches=4), 3, "3F3@4v4")
    assert {"0F0@5v5", "2F0@5v5"} <= flush


def test_after_the_last_backward_of_one_stage_others_go_on():
    """A late update on stage 1 moves no other stage until its own next forward is missing."""
    late = moved(build("2bw", stages=4, microbatches=4), 1, "1UPDATE@3")
    blocking = moved(others.two_bw_update_at_batch_end(4, 4), 1, "1UPDATE@3")
    independent = {"0F1@5v4", "1B1@4v3", "2B2@4v3", "3B3@4v3"}
    assert "1F0@5v4" in late
    assert not (independent | {"0UPDATE@3", "2UPDATE@3", "3UPDATE@3"}) & late
    assert independent <= blocking


def test_delaying_what_does_not_happen_is_refused():
    with pytest.raises(ScheduleError, match="cannot delay 0F0 on rank 0"):
        simulate(build("gpipe", stages=2, microbatches=1), ONE_TWO, 1, delays={(0, Action.parse("0F0")): 1})


def test_a_schedule_that_gets_stuck_says_where():
    with pytest.raises(ScheduleError, match="2bw gets stuck: rank 0 in call 0 at 0REDUCE_WAIT:grads"):
        simulate(build("2bw", stages=4, microbatches=2), ONE_TWO, 3)


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({"forward_s": -1, "backward_s": 2}, "forward_s = -1; give 0 or more"),
        ({"forward_s": (1, 1, 1), "backward_s": 2}, "forward_s has 3 values for 2 stages"),
    ],
)
def test_bad_durations(durations: dict, message: str):
    with pytest.raises(ValueError, match=message):
        simulate(build("gpipe", stages=2, microbatches=1), Durations(**durations), 1)


def test_no_batches():
    with pytest.raises(ValueError, match="batches = 0"):
        simulate(build("gpipe", stages=2, microbatches=1), ONE_TWO, 0)


def test_integers_stay_exact():
    timeline = simulate(build("2bw", stages=3, microbatches=5), ONE_TWO, 4)
    assert all(type(event.end_s) is int for events in timeline.events for event in events)


def test_measured_events():
    """A Timeline needs no schedule: events of a real run give the same numbers."""
    simulated = simulate(build("2bw", stages=3, microbatches=4), ONE_TWO, 5)
    measured = Timeline(
        events=tuple(
            tuple(Event(e.action, 100.0 + e.start_s / 8, 100.0 + e.end_s / 8) for e in events)
            for events in simulated.events
        )
    )
    assert measured.makespan_s == simulated.makespan_s / 8
    assert measured.bubble_ratio == pytest.approx(simulated.bubble_ratio)
    assert measured.peak_in_flight == simulated.peak_in_flight
    assert measured.peak_versions == simulated.peak_versions


def test_three_versions_are_counted():
    timeline = simulate(others.delayed(3, 4, delay=2, weight_versions=3), ONE_TWO, 6)
    assert timeline.peak_versions == (3, 3, 2)


def test_nothing_happened():
    empty = Timeline(events=((), ()))
    assert (empty.makespan_s, empty.bubble_ratio, empty.peak_in_flight, empty.peak_versions) == (0, 0, (0, 0), (0, 0))
