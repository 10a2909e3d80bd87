"""Actions and Programs as text, and what is derived from a steady call."""

from __future__ import annotations

import random

import pytest

from megatron_2bw.schedule.action import COMPUTE, TRANSFERS, Action, ActionType, Reduction
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.program import Program
from megatron_2bw.schedule.registry import ALIASES, SCHEDULES, build

from .mutations import CHAINS, with_actions


def random_action(rng: random.Random) -> Action:
    type_ = rng.choice(list(ActionType))
    reduces = type_ in (ActionType.REDUCE_START, ActionType.REDUCE_WAIT)
    return Action(
        type_,
        stage=rng.randrange(100),
        microbatch=rng.randrange(1000) if type_ in COMPUTE | TRANSFERS else None,
        batch=rng.randint(-3, 3),
        version=rng.randint(-12, 12) if type_ in COMPUTE and rng.random() < 0.8 else None,
        reduction=rng.choice(list(Reduction)) if reduces else None,
    )


def test_every_action_survives_its_text_form():
    rng = random.Random(0)
    for _ in range(2000):
        action = random_action(rng)
        assert Action.parse(str(action)) == action


def test_every_program_survives_its_text_form():
    for name in SCHEDULES:
        for chain in CHAINS:
            for program in lower(build(name, stages=4, microbatches=1 if name == "pipedream" else 8), chain).programs:
                assert Program.parse(str(program)) == program


def test_shifting_there_and_back():
    rng = random.Random(1)
    for _ in range(200):
        action, by = random_action(rng), rng.randint(-5, 5)
        shifted = action.shifted(by)
        assert shifted.batch - action.batch == by
        assert shifted.shifted(-by) == action


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no action"),
        ("F0", "is no action"),
        ("0X1", "is no action"),
        ("0F1 ,", "is no action"),
        ("0F", "name a microbatch"),
        ("0UPDATE3", "name a microbatch"),
        ("0REDUCE_START", "name a reduction"),
        ("0F1:norm", "name a reduction"),
        ("0REDUCE_WAIT:sum", "reductions are grads, embedding, norm"),
        ("0SEND_F1v2", "only F and B name a weight version"),
    ],
)
def test_bad_text(text: str, message: str):
    with pytest.raises(ScheduleError, match=message):
        Action.parse(text)


def test_fill_and_drain_follow_from_the_steady_call():
    program = Program.parse("0UPDATE@-1 0F1v-1 0B0v-1 0F0@1v0 0B1v-1")
    assert " ".join(map(str, program.fill())) == "0F0v-1"
    assert " ".join(map(str, program.call(left=0))) == "0UPDATE@-1 0F1v-1 0B0v-1 0B1v-1 0UPDATE"


def test_a_flush_has_nothing_to_fill():
    for name in ("1f1b-flush", "gpipe"):
        for program in lower(build(name, stages=3, microbatches=4)).programs:
            assert program.fill() == ()
            assert program.call(left=0) == program.call() == program.steady


def test_forwards_far_ahead_end_one_batch_after_the_other():
    program = Program.parse("0F0@2v0 0B0v-2 0UPDATE")
    assert " ".join(map(str, program.fill())) == "0F0v-2 0F0@1v-1"
    assert " ".join(map(str, program.fill(left=0))) == "0F0v-2"
    assert program.call(left=2) == program.steady
    for left in (1, 0):
        assert " ".join(map(str, program.call(left))) == "0B0v-2 0UPDATE"


def test_names():
    with pytest.raises(ScheduleError) as caught:
        build("1f1b-flushed", stages=2, microbatches=2)
    assert all(name in caught.value.message for name in (*SCHEDULES, *ALIASES))
    assert build("pipedream-flush", stages=2, microbatches=2) == build("dapple", stages=2, microbatches=2)
    for bad in ({"stages": 0, "microbatches": 1}, {"stages": 1, "microbatches": 0}):
        with pytest.raises(ScheduleError, match="at least 1"):
            build("2bw", **bad)


def test_lowering_refuses_a_receive_that_nothing_near_uses():
    schedule = build("gpipe", stages=2, microbatches=1)
    far = Program.parse("1F0@3v3 1B0@3v3 1UPDATE@3")
    with pytest.raises(ScheduleError, match="0RECV_B0@3 is received in a call"):
        lower(with_actions(schedule, 1, far.steady))
