"""The validator accepts what works, refuses the rest, and says why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_2bw.schedule.action import Action, ActionType, Reduction
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import lower, with_gradient_copy
from megatron_2bw.schedule.program import GradientCopy, Program, Schedule
from megatron_2bw.schedule.registry import SCHEDULES, build
from megatron_2bw.schedule.systems.two_bw import MOST_EXTRA_IN_FLIGHT
from megatron_2bw.schedule.validation.feasible import works
from megatron_2bw.schedule.validation.listing import MARK
from megatron_2bw.schedule.validation.rules import Rule
from megatron_2bw.schedule.validation.validate import validate

from . import others
from .interpreter import is_right
from .mutations import CHAINS, with_actions


def is_valid(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


WITH_COPIES = [(name, GradientCopy.WHOLE) for name in SCHEDULES]
WITH_COPIES += [("2bw", GradientCopy.SHARD), ("2bw", GradientCopy.NONE)]
WORKS = {
    "2bw": lambda d, m: m >= d - 1,
    "pipedream": lambda _d, m: m == 1,
    "gems": lambda d, _m: d % 2 == 0,
    "chimera": lambda d, m: d % 2 == 0 and m % d == 0,
    "mixpipe": lambda d, m: d % 2 == 0 and m % 2 == 0 and m >= d,
}
"""For which stages and microbatches; the others, for all."""


@pytest.mark.parametrize(("name", "copy"), WITH_COPIES)
@pytest.mark.parametrize(
    "depths", [range(1, 6), pytest.param(range(6, 9), marks=pytest.mark.slow)], ids=["to 5", "to 8"]
)
def test_all_stages_up_to_8_and_microbatches_up_to_16(name: str, copy: GradientCopy, depths: range):
    """2BW needs m >= d-1, which no line of the code says, whatever it keeps of finished gradients."""
    for stages in depths:
        for microbatches in range(1, 17):
            try:
                schedule = with_gradient_copy(build(name, stages=stages, microbatches=microbatches), copy)
                valid = is_valid(lower(schedule, tuple(Reduction)))
            except ScheduleError:
                valid = False
            expected = WORKS.get(name, lambda _d, _m: True)(stages, microbatches)
            assert valid == expected, f"{name}, d={stages}, m={microbatches}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_gradient_is_received_before_the_send_that_brings_it_about(name: str):
    """A rank that waits for all that it has posted, before that forward, would wait for itself."""
    received = 0
    for stages, microbatches in itertools.product((2, 3, 4), range(1, 9)):
        try:
            schedule = lower(build(name, stages=stages, microbatches=microbatches), tuple(Reduction))
        except ScheduleError:
            continue
        for program in schedule.programs:
            calls = [program.fill(None), program.call(None), [action.shifted(1) for action in program.call(None)]]
            at = {action: i for i, action in enumerate(itertools.chain(*calls))}
            for receive in [action for action in at if action.type is ActionType.RECV_BACKWARD]:
                send = receive._replace(type=ActionType.SEND_FORWARD)
                assert at.get(send, -1) < at[receive], f"{name}, d={stages}, m={microbatches}: {receive}"
                received += 1
    assert received


@pytest.mark.parametrize("extra", [*range(2, MOST_EXTRA_IN_FLIGHT + 1), pytest.param(1, marks=pytest.mark.slow)])
def test_more_in_flight_needs_more_microbatches(extra: int):
    for stages in range(1, 7):
        for microbatches in range(1, 17):
            enough = microbatches >= (1 + extra) * (stages - 1)
            found = works("2bw", stages=stages, microbatches=microbatches, extra_in_flight=extra)
            assert found == enough, f"d={stages}, m={microbatches}"


@pytest.mark.parametrize(
    "copy",
    [
        GradientCopy.SHARD,
        *(pytest.param(copy, marks=pytest.mark.slow) for copy in (GradientCopy.WHOLE, GradientCopy.NONE)),
    ],
)
@pytest.mark.parametrize("depths", [range(1, 5), pytest.param((5,), marks=pytest.mark.slow)], ids=["to 4", "5"])
def test_as_many_delayed_as_the_first_stage_runs_ahead(copy: GradientCopy, depths: Sequence[int]):
    """As with 2BW's m >= d-1, no line of the code says so."""
    for stages, microbatches, extra in itertools.product(depths, range(1, 11), (0, 1)):
        ahead = (1 + extra) * (stages - 1)
        for delayed in range(1, microbatches + 2):
            options = {"extra_in_flight": extra, "delayed_microbatches": delayed}
            schedule = with_gradient_copy(build("2bw", stages=stages, microbatches=microbatches, **options), copy)
            try:
                valid = is_valid(lower(schedule, tuple(Reduction)))
            except ScheduleError:
                valid = False
            assert valid == (ahead <= min(delayed, microbatches)), f"d={stages}, m={microbatches}, {options}"


def test_a_declared_number_of_delayed_microbatches_that_is_not_the_programs():
    schedule = build("2bw", stages=3, microbatches=6, delayed_microbatches=3)
    for other in (None, 2, 4):
        with pytest.raises(ScheduleError, match=Rule.VERSION):
            validate(replace(schedule, delayed_microbatches=other))


@pytest.mark.parametrize("copy", [GradientCopy.SHARD, GradientCopy.NONE])
def test_gradients_that_stay_in_place_must_not_be_added_to(copy: GradientCopy):
    for stages, microbatches in ((1, 1), (2, 2), (4, 4)):
        lowered = lower(build("2bw", stages=stages, microbatches=microbatches))
        with pytest.raises(ScheduleError, match=Rule.UNSAVED):
            validate(replace(lowered, gradient_copy=copy))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("chain", [(Reduction.NORM,), *CHAINS], ids=lambda chain: "+".join(chain))
def test_any_part_of_the_chain_of_reductions(name: str, chain: tuple[Reduction, ...]):
    for stages, microbatches in ((1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (4, 3), (4, 4), (4, 8)):
        if works(name, stages=stages, microbatches=microbatches):
            validate(lower(build(name, stages=stages, microbatches=microbatches), chain))


def test_without_reductions_only_a_flush_leaves_gradients_alone():
    validate(lower(build("1f1b-flush", stages=3, microbatches=3), ()))
    assert not is_valid(lower(build("2bw", stages=3, microbatches=3), ()))


def test_bounds_are_tight():
    for name in SCHEDULES:
        schedule = build(name, stages=4, microbatches=1 if name == "pipedream" else 8)
        for rank in range(4):
            for field in ("in_flight", "weight_versions"):
                bounds = getattr(schedule, field)
                less = tuple(bound - (index == rank) for index, bound in enumerate(bounds))
                assert not is_valid(replace(schedule, **{field: less})), f"{name}, {field} = {less}"


@pytest.mark.parametrize("delay", [2, 9])
def test_room_for_more_versions(delay: int):
    validate(others.delayed(3, 4, delay=delay, weight_versions=delay + 1))
    with pytest.raises(ScheduleError, match=Rule.OVERWRITTEN):
        validate(others.delayed(3, 4, delay=delay, weight_versions=delay))


def test_room_for_two_stages_on_a_rank():
    validate(others.two_stages_per_rank(4, 3))
    with pytest.raises(ScheduleError, match=Rule.IN_FLIGHT):
        validate(others.two_stages_per_rank(4, 3, in_flight=5))


def test_one_tensor_per_boundary_at_the_end_of_a_call():
    with pytest.raises(ScheduleError, match=Rule.BOUNDARY) as caught:
        validate(others.further_ahead(2, 3))
    assert "rank 1, steady of call 0, 1RECV_F1@1: 2 tensors are between stages 0 and 1" in caught.value.message


def test_a_run_may_end_with_forwards_several_batches_ahead():
    validate(others.two_batches_ahead())


@pytest.mark.parametrize(
    ("forgotten", "detail"),
    [
        (ActionType.UPDATE, "rank 0, drain of call 1: stage 0 has no update for batch 1"),
        (ActionType.SEND_BACKWARD, "rank 1, drain of call 1: no 1SEND_B0@1, 1SEND_B1@1"),
    ],
)
def test_a_drain_that_forgets_something(monkeypatch: pytest.MonkeyPatch, forgotten: ActionType, detail: str):
    schedule = lower(build("gpipe", stages=2, microbatches=2))
    whole = Program.call

    def call(self: Program, left: int | None = None) -> tuple[Action, ...]:
        return tuple(action for action in whole(self, left) if left != 0 or action.type != forgotten)

    monkeypatch.setattr(Program, "call", call)
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert f"{Rule.LEFT_OVER}: {detail}" in caught.value.message


def test_reductions_may_start_in_the_next_call():
    """After a drain, which has done them all, the next run's first call must not start them again."""
    schedule = lower(build("2bw", stages=2, microbatches=2), tuple(Reduction))
    starts = [action for action in schedule.programs[0].steady if action.type is ActionType.REDUCE_START]
    rest = [action for action in schedule.programs[0].steady if action not in starts]
    late = with_actions(schedule, 0, [*(start._replace(batch=-1) for start in starts), *rest])
    assert is_right(late, (3, 1, 2))
    validate(late)


def test_where_an_update_may_be():
    validate(others.two_bw_update_at_batch_end(4, 4))
    validate(with_gradient_copy(build("2bw", stages=4, microbatches=4), GradientCopy.NONE))


def edited(name: str, edits: dict[str, list[str] | str]) -> Schedule:
    """A lowered schedule of 2 stages and 2 microbatches with actions replaced, moved or removed.

    ``{"A": []}`` drops A, ``{"A": ["A", "A"]}`` repeats it, and ``{"A": "before B"}`` or ``"after B"`` moves it.
    """
    schedule = lower(build(name, stages=2, microbatches=2), tuple(Reduction))
    for word, edit in edits.items():
        rank = int(word[0])
        words = str(schedule.programs[rank]).split()
        index = words.index(word)
        if isinstance(edit, str):
            where, other = edit.split()
            words.remove(word)
            words.insert(words.index(other) + (where == "after"), word)
        else:
            words[index : index + 1] = edit
        schedule = with_actions(schedule, rank, Program.parse(" ".join(words)).steady)
    return schedule


NAMED: dict[str, tuple[str, dict[str, list[str] | str], Rule, str]] = {
    "forward dropped": ("2bw", {"1F0v-1": []}, Rule.MISSING, "no rank has 1F0"),
    "backward dropped": ("gpipe", {"1B1v0": []}, Rule.MISSING, "1B1 has to be where 1F1 is"),
    "update dropped": ("gpipe", {"1UPDATE": []}, Rule.MISSING, "rank 1 lacks 1UPDATE"),
    "send dropped": ("gpipe", {"1SEND_B0": []}, Rule.MISSING, "rank 1 lacks 1SEND_B0"),
    "receive dropped": ("2bw", {"1RECV_F1": []}, Rule.MISSING, "rank 1 lacks 1RECV_F1"),
    "wait dropped": ("2bw", {"1REDUCE_WAIT:norm@-1": []}, Rule.MISSING, "lacks 1REDUCE_WAIT:norm"),
    "reduction dropped": (
        "2bw",
        {"1REDUCE_WAIT:norm@-1": [], "1REDUCE_START:norm": []},
        Rule.MISSING,
        "REDUCE_START:norm, 1REDUCE_WAIT:norm",
    ),
    "forward twice": ("2bw", {"1F0v-1": ["1F0v-1", "1F0v-1"]}, Rule.DUPLICATE, "rank 1, 1F0v-1: rank 1 has 1F0 twice"),
    "update twice": ("2bw", {"1UPDATE@-1": ["1UPDATE@-1", "1UPDATE"]}, Rule.DUPLICATE, "1UPDATE twice"),
    "forward on two ranks": ("gpipe", {"1F0v0": ["0F0v0", "1F0v0"]}, Rule.DUPLICATE, "another rank does 0F0 too"),
    "receive from nowhere": ("gpipe", {"1F0v0": ["1RECV_B0", "1F0v0"]}, Rule.FOREIGN, "has no use for 1RECV_B0"),
    "stage 2 of 2": ("gpipe", {"1F0v0": ["2F0v0"]}, Rule.FOREIGN, "stages are 0 to 1"),
    "microbatch 2 of 2": ("gpipe", {"1F0v0": ["1F2v0"]}, Rule.FOREIGN, "microbatches are 0 to 1"),
    "newer weights": ("2bw", {"1F0v-1": ["1F0v0"]}, Rule.VERSION, "version is v0, the declared delay asks for v-1"),
    "two versions": ("2bw", {"1B1v-1": ["1B1v0"]}, Rule.VERSION, "rank 1, 1B1v0: version is v0"),
    "no version": ("2bw", {"1B1v-1": ["1B1"]}, Rule.VERSION, "version is none"),
    "last batch's backward": ("gpipe", {"1B0v0": ["1B0@-1v-1"]}, Rule.BATCH, "first call would run batch -1"),
    "last batch's transfer": ("gpipe", {"1SEND_B0": ["1SEND_B0@-1"]}, Rule.BATCH, "1SEND_B0@-1: batch -1 comes before"),
    "forward a batch ahead": (
        "gpipe",
        {"1F0v0": ["1F0@1v1"]},
        Rule.NO_INPUT,
        "1F0@1v1: 0F0v0 makes it in a later call",
    ),
    "forward two batches behind": (
        "gpipe",
        {"0F0v0": ["0F0@2v2"]},
        Rule.BOUNDARY,
        "1F0v0: 0F0@2v2 makes its input 2 calls before",
    ),
    "backward first": ("2bw", {"1B0v-1": "before 1F0v-1"}, Rule.NO_FORWARD, "microbatch 0 of batch 0 has no forward"),
    "receive after its use": ("2bw", {"1RECV_F1": "after 1F1v-1"}, Rule.NO_INPUT, "1RECV_F1 of batch 0 is not posted"),
    "send before its backward": ("2bw", {"1SEND_B1": "before 1B1v-1"}, Rule.NOTHING_TO_SEND, "is not there"),
    "sent after its own backward": (
        "gpipe",
        {"0SEND_F0": "after 0B0v0"},
        Rule.NOTHING_TO_SEND,
        "rank 0, steady of call 0, 0B0v0: 0SEND_F0 comes after this backward, which frees its tensor",
    ),
    "update a batch early": ("2bw", {"1UPDATE@-1": ["1UPDATE"]}, Rule.WAIT_LATE, "of batch 0 have to come before it"),
    "update before the last backward": ("gpipe", {"1UPDATE": "before 1B1v0"}, Rule.UPDATE_EARLY, "on stage 1: 1"),
    "update after first use": ("2bw", {"1UPDATE@-1": "after 1REDUCE_START:grads"}, Rule.CAPTURE, "batch 0"),
    "update two batches late": ("gpipe", {"1UPDATE": ["1UPDATE@-1"]}, Rule.NOT_CREATED, "it needs W(1), the newest is"),
    "started before the last backward": ("2bw", {"1REDUCE_START:grads": "before 1B1v-1"}, Rule.START_EARLY, ": 1"),
    "started in another order": (
        "2bw",
        {"1REDUCE_START:embedding": "after 1REDUCE_START:norm"},
        Rule.CHAIN,
        "embedding of batch 0 has to start first; the chain is grads, embedding, norm",
    ),
    "waited too early": (
        "gpipe",
        {"1REDUCE_WAIT:norm": "before 1REDUCE_START:norm"},
        Rule.WAIT_EARLY,
        "norm of batch 0 has not been started",
    ),
    "waited too late": ("gpipe", {"1REDUCE_WAIT:grads": "after 1UPDATE"}, Rule.WAIT_LATE, "waits for grads of batch 0"),
    "receives in another order": (
        "gpipe",
        {"1RECV_F1": "before 1RECV_F0"},
        Rule.TRANSFER_ORDER,
        "rank 0 sends 0SEND_F0 in call 0 where rank 1 expects 1RECV_F1 in call 0",
    ),
    "sent after the peer needs it": (
        "gpipe",
        {"0SEND_F1": "after 0B0v0"},
        Rule.DEADLOCK,
        "with buffered sends: all wait for each other: "
        "rank 0 in steady of call 0 at 0B0v0, rank 1 in steady of call 0 at 1F1v0",
    ),
    "two receives posted before a send": (
        "gpipe",
        {"0RECV_B1": "after 0RECV_B0"},
        Rule.DEADLOCK,
        "with one in-order hardware queue: all wait for each other: "
        "rank 0 in steady of call 0 at 0RECV_B1, rank 1 in steady of call 0 at 1F1v0",
    ),
    "captured after the next backward": (
        "2bw",
        {f"0REDUCE_START:{kind}": [f"0REDUCE_START:{kind}@-1"] for kind in Reduction},
        Rule.START_LATE,
        "rank 0, steady of call 1, 0B0v-1: gradients of batch 0 must be captured",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_named(case: str):
    name, edits, rule, detail = NAMED[case]
    with pytest.raises(ScheduleError) as caught:
        validate(edited(name, edits))
    message, grid = caught.value.message, caught.value.grid
    assert f"{name} (d=2, m=2): {rule}: " in message
    assert detail in message
    assert "\n" not in message
    assert MARK in grid


def test_the_marked_action_is_the_one_named():
    with pytest.raises(ScheduleError) as caught:
        validate(edited("gpipe", {"1UPDATE": "before 1B1v0"}))
    assert "rank 1, steady of call 0, 1UPDATE:" in caught.value.message
    (marked,) = (line for line in caught.value.grid.splitlines() if MARK in line)
    assert f"1UPDATE{MARK}" in marked


def test_declared_bounds_must_fit_the_programs():
    schedule = build("2bw", stages=2, microbatches=2)
    for change, detail in (
        ({"delay": (1,)}, "delay = (1,); it takes 2 numbers, one per stage, from 0 up"),
        ({"delay": (1, -1)}, "delay = (1, -1); it takes 2 numbers, one per stage, from 0 up"),
        ({"weight_versions": (2, 0)}, "weight_versions = (2, 0); it takes 2 numbers, one per rank, from 1 up"),
        ({"per_boundary": 0}, "per_boundary = 0; at least 1 crosses each boundary"),
        ({"in_flight": (2, 1, 1)}, "in_flight = (2, 1, 1); it takes 2 numbers, one per rank, from 1 up"),
    ):
        with pytest.raises(ScheduleError) as caught:
            validate(replace(schedule, **change))
        assert f"{Rule.DECLARATION}: {detail}" in caught.value.message


def test_ranks_that_share_a_stage_share_all():
    programs = ("0F0v0 1F1v0 0B0v0 1B1v0 0UPDATE 1UPDATE", "1F0v0 1B0v0 1UPDATE", "0F1v0 0B1v0 0UPDATE")
    schedule = Schedule(
        name="three",
        stages=2,
        microbatches=2,
        programs=tuple(map(Program.parse, programs)),
        delay=(0, 0),
        weight_versions=(1, 1, 1),
        in_flight=(2, 1, 1),
    )
    with pytest.raises(ScheduleError, match=Rule.DECLARATION) as caught:
        validate(schedule)
    assert "rank 0: it has stages [0, 1] and another rank [1]" in caught.value.message


def test_a_norm_is_behind_what_is_issued_before_the_wait_for_it():
    """In one hardware queue; with more in flight, a second gradient can be sent before the norm is there."""
    schedule = lower(build("2bw", stages=2, microbatches=2, extra_in_flight=1))
    validate(schedule)
    actions = list(schedule.programs[0].steady)
    receive, update = Action.parse("0RECV_B0"), Action.parse("0UPDATE@-1")
    assert actions.index(receive) < actions.index(Action.parse("0REDUCE_WAIT:norm@-1"))
    actions.remove(receive)
    actions.insert(actions.index(update) + 1, receive)
    with pytest.raises(ScheduleError) as caught:
        validate(with_actions(schedule, 0, actions))
    assert f"{Rule.DEADLOCK}: with one in-order hardware queue" in caught.value.message
    assert "rank 0 in steady of call 1 at 0REDUCE_WAIT:norm@-1, rank 1 in steady of call 1 at 1SEND_B1" in (
        caught.value.message
    )


def test_two_stages_of_a_rank_may_wait_for_norms_of_other_batches():
    """One waits for that of this batch before the other does for that of the batch before."""
    text = (
        "0F{i}v0 1F{i}v-1 1B{i}v-1 0B{i}v0 1UPDATE@-1 0REDUCE_START:grads 0REDUCE_START:norm 0REDUCE_WAIT:grads "
        "0REDUCE_WAIT:norm 0UPDATE 1REDUCE_WAIT:grads@-1 1REDUCE_WAIT:norm@-1"
    )
    programs = [Program(steady=tuple(map(Action.parse, text.format(i=rank).split()))) for rank in (0, 1)]
    validate(
        Schedule(
            name="two delays",
            stages=2,
            microbatches=2,
            programs=tuple(programs),
            delay=(0, 1),
            weight_versions=(2, 2),
            in_flight=(2, 2),
        )
    )
