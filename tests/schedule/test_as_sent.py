"""Calls in which any action may wait for all that its rank has posted: a job's first ones, or all."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import pytest
from receives import report

from megatron_2bw.schedule import as_sent as module
from megatron_2bw.schedule import lowering
from megatron_2bw.schedule.action import RECEIVES, TRANSFERS, Action, Reduction
from megatron_2bw.schedule.as_sent import FIRST_CALLS, as_sent, followed
from megatron_2bw.schedule.calls import lowered
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.engine import Model, run
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.registry import SCHEDULES, build
from megatron_2bw.schedule.validation.validate import validate

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
Order = Callable[[tuple[Action, ...], dict, int], Iterable[Action]]
MOST_EXTRA = 3
COUNTS = {
    "2bw": 51,
    "1f1b-flush": 24,
    "gpipe": 24,
    "inter-layer": 24,
    "pipedream": 3,
    "gems": 16,
    "chimera": 6,
    "mixpipe": 7,
}
"""Of sizes that are sound."""


@functools.cache
def schedules(name: str) -> tuple[Schedule, ...]:
    """Those that are sound in all but their first calls."""
    found = []
    for stages, microbatches in itertools.product((2, 3, 4), range(1, 9)):
        for extra in range(MOST_EXTRA + 1) if name == "2bw" else [0]:
            try:
                options = {"extra_in_flight": extra} if extra else {}
                schedule = lower(build(name, stages=stages, microbatches=microbatches, **options), tuple(Reduction))
                with mock.patch.object(module, "_in_order", lambda call, *_: call):
                    problem = broken(schedule)
            except ScheduleError:
                continue
            if problem is None or Model.FIRST_USE in problem:
                found.append(schedule)
    assert len(found) == COUNTS[name]
    return tuple(found)


def broken(schedule: Schedule) -> str | None:
    as_sent.cache_clear()
    try:
        validate(schedule)
    except ScheduleError as error:
        return error.message
    finally:
        as_sent.cache_clear()
    return None


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ranks_get_through(name: str) -> None:
    assert [problem for problem in map(broken, schedules(name)) if problem] == []


def _as_later(call: tuple[Action, ...], ends: dict, now: int) -> Iterable[Action]:
    """As in the calls after them."""
    return call


def _second_as_later(call: tuple[Action, ...], ends: dict, now: int) -> Iterable[Action]:
    return IN_ORDER(call, ends, now) if now == 0 else call


def _before_computations_only(call: tuple[Action, ...], ends: dict, now: int) -> Iterable[Action]:
    """Not before ranks meet."""
    receives = deque(module.in_order_of_sends((action for action in call if action.type in RECEIVES), ends))
    for action in call:
        if action.microbatch is not None and action.type not in TRANSFERS:
            start = ends[action[:4]] - module.SLOTS.get(action.type, 0)
            while receives and receives[0][0] <= start:
                yield receives.popleft()[1]
        if action.type not in RECEIVES:
            yield action
    yield from (receive for _, receive in receives)


def _by_slots(slots: int) -> Order:
    def order(call: tuple[Action, ...], ends: dict, now: int) -> Iterable[Action]:
        sends = module.in_order_of_sends
        with mock.patch.object(
            module, "in_order_of_sends", lambda *args: [(at + slots, of) for at, of in sends(*args)]
        ):
            return [*IN_ORDER(call, ends, now)]

    return order


def _not_sorted(call: tuple[Action, ...], ends: dict, now: int) -> Iterable[Action]:
    sends = module.in_order_of_sends
    with mock.patch.object(
        module, "in_order_of_sends", lambda receives, ends: [sends([of], ends)[0] for of in receives]
    ):
        return [*IN_ORDER(call, ends, now)]


IN_ORDER = module._in_order
WRONG: dict[str, tuple[Order, set[str]]] = {
    "as later": (_as_later, {*SCHEDULES} - {"gems"}),
    "second as later": (_second_as_later, {*SCHEDULES} - {"gems"}),
    "before computations only": (_before_computations_only, {"2bw"}),
    "a slot early": (_by_slots(-1), {"2bw", "chimera", "mixpipe"}),
    "a slot late": (_by_slots(1), {*SCHEDULES}),
    "not sorted": (_not_sorted, {"2bw"}),
}


@pytest.mark.parametrize(
    ("order", "name"), [(order, name) for order, (_, names) in WRONG.items() for name in sorted(names)]
)
def test_another_order_is_found_out(order: str, name: str) -> None:
    with mock.patch.object(module, "_in_order", WRONG[order][0]):
        assert any(map(broken, schedules(name)))


def test_what_waits_for_what_it_brings_about_itself_is_named() -> None:
    """A receive that is posted before the forward whose output it is the gradient of."""
    schedule = build("gpipe", stages=2, microbatches=1)
    with mock.patch.object(module, "_in_order", lambda call, *_: sorted(call, key=lambda a: a.type not in RECEIVES)):
        message = broken(schedule)
    assert message.startswith(f"gpipe (d=2, m=1): deadlock: with {Model.FIRST_USE}: all wait for each other: rank 0")
    assert message.endswith("rank 0 in steady of call 0 at 0F0v0, rank 1 in steady of call 0 at 1F0v0")


def test_later_calls_are_not_held_to_it() -> None:
    """There receives are posted early, so that transfers overlap with computations."""
    schedule = lowered(build("1f1b-flush", stages=2, microbatches=4))
    outcome = run(schedule, [FIRST_CALLS + 2], Durations(forward_s=1, backward_s=2), model=Model.FIRST_USE)
    assert not outcome.blocked


def late(schedule: Schedule) -> Schedule:
    return dataclasses.replace(schedule, late_receives=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ranks_get_through_all_calls(name: str) -> None:
    assert [problem for problem in map(broken, map(late, schedules(name))) if problem] == []


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"gems"}))
def test_a_later_call_in_another_order_is_found_out(name: str) -> None:
    """The third one, and those after it: what a job without late receives does."""

    def order(call: tuple[Action, ...], ends: dict, now: int) -> Iterable[Action]:
        return call if now > 0 else IN_ORDER(call, ends, now)

    with mock.patch.object(module, "_in_order", order):
        assert any(map(broken, map(late, schedules(name))))


@pytest.mark.parametrize("name", SCHEDULES)
def test_calls_far_from_the_end_are_as_the_second_one(name: str) -> None:
    for schedule in schedules(name):
        ends = [*range(max(schedule.ahead, 1) - 1, -1, -1)]
        for end in (ends[:known] for known in range(len(ends) + 1)):
            short, long = (as_sent(schedule, (*[None] * calls, *end)) for calls in (2, 6))
            assert short == long


def test_a_run_comes_to_its_end_in_as_few_orders_as_there_are() -> None:
    schedule = lowered(build("pipedream", stages=3, microbatches=1))
    assert schedule.ahead == 2
    lefts, seen = (), []
    for left in range(8, -1, -1):
        lefts = followed(lefts, left, schedule.ahead)
        seen.append(lefts)
    assert seen == [(None,), *[(None, None)] * 6, (None, None, 1), (None, None, 1, 0)]


@pytest.mark.parametrize("left", [None, 0])
def test_calls_do_what_later_ones_do(left: int | None) -> None:
    schedule = lowered(build("2bw", stages=3, microbatches=4))
    for rank, program in enumerate(schedule.programs):
        first, second = (as_sent(schedule, lefts)[rank] for lefts in ((None,), (None, left)))
        assert sorted(map(str, first)) == sorted(map(str, (*program.fill(), *program.steady)))
        call = program.call(left)
        assert sorted(map(str, second)) == sorted(map(str, call))
        assert [a for a in second if a.type not in RECEIVES] == [a for a in call if a.type not in RECEIVES]


def test_a_transfer_begins_when_its_receive_is_posted() -> None:
    """Right before its use, it would otherwise be there; a computation earlier, it is."""
    durations = Durations(forward_s=(1, 2, 1, 1), backward_s=(2, 4, 2, 2), send_s=1)
    early = lower(build("2bw", stages=4, microbatches=4), (Reduction.GRADIENTS,))
    buffered, posted, late_s = (
        max(timed[-1].end_s for timed in run(schedule, [6], durations, model=model).timed)
        for schedule, model in ((early, Model.HOST), (early, Model.POSTED), (late(early), Model.POSTED))
    )
    assert buffered == posted < late_s


@pytest.mark.slow
def test_the_committed_report_is_current() -> None:
    """Made by ``python scripts/bench/receives.py --output scripts/bench/results/receives.txt``."""
    assert [*report()] == (BENCH / "results" / "receives.txt").read_text().splitlines()[3:]


def test_in_one_queue_the_last_stage_receives_what_the_first_one_has_to_send_before_they_meet() -> None:
    """Over the tied embedding; with more in flight, it would be two tensors that nobody receives."""
    schedule = build("2bw", stages=2, microbatches=4, extra_in_flight=2)
    validate(lower(schedule, tuple(Reduction)))
    meetings = lowering._meetings
    with mock.patch.object(lowering, "_meetings", lambda call: meetings(call) | {Reduction.EMBEDDING: len(call)}):
        spoiled = lower(schedule, tuple(Reduction))
    with pytest.raises(ScheduleError, match=r"deadlock: with one in-order.*rank 1 .* at 1REDUCE_START:embedding"):
        validate(spoiled)
