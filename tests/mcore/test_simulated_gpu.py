"""On GPUs, nothing would touch memory too early, and no ranks would wait for each other for ever."""

from __future__ import annotations

import functools
import pickle
import re
from dataclasses import replace

import pytest

from .case import Case
from .features import BIASED, EXACT
from .harness import collect
from .simulated_gpu.order import Access, Line, Memory
from .simulated_gpu.progress import Meeting, Step, stuck
from .simulated_gpu.watch import Watched, watch

LATE, EARLY = ("--pipeline-receives", "late"), ("--pipeline-receives", "early")
"""The first is the default where there is a GPU."""
CASE = Case(schedule="2bw", stages=2, microbatches=2, batches=4, clip=1.0, flags=LATE)
SCALED = replace(CASE, precision="fp16")
SHARDED = replace(SCALED, replicas=2, distributed_optimizer=True)
SETTINGS = {
    "distributed optimizer, fp16": SHARDED,
    "one gradient buffer, half delayed, early receives": replace(
        SHARDED, precision="bf16", microbatches=4, delayed=2, flags=("--pipeline-gradient-buffers", "1", *EARLY)
    ),
    "experts with biases, full recompute": replace(CASE, replicas=2, model=BIASED, recompute="full", tied=False),
    "everything recorded, evaluated": replace(
        CASE,
        tensor_parallel=2,
        flags=(*"--log-pipeline --timing-log-level 2 --eval-interval 2 --eval-iters 2".split(), *LATE),
        record_actions=True,
    ),
    "pipedream": replace(CASE, schedule="pipedream", stages=4, microbatches=1, batches=8, tied=False, clip=0.0),
    "mixpipe": replace(CASE, schedule="mixpipe", stages=4, microbatches=4, flags=EARLY),
}
SLOW = {
    **EXACT,
    "two more in flight": replace(CASE, microbatches=4, flags=("--pipeline-extra-in-flight", "2", *EARLY)),
    "gems": replace(CASE, schedule="gems", microbatches=4),
    "chimera": replace(CASE, schedule="chimera", stages=4, microbatches=4),
    "1f1b-flush": replace(SHARDED, schedule="1f1b-flush"),
    "Megatron's own overlap": replace(
        SHARDED, schedule="megatron", flags=("--overlap-grad-reduce", "--overlap-param-gather")
    ),
}


def watched(case: Case, flaw: str | None = None) -> list[Watched]:
    """What was found on each rank."""
    return [pickle.loads(found) for found in collect(functools.partial(watch, flaw=flaw), case)]


def problems(found: list[Watched]) -> list[str]:
    """All of it, under any number of hardware queues."""
    steps = [rank.steps for rank in found]
    races = [race for rank in found for race in rank.races]
    return races + stuck(steps, one_queue=False) + stuck(steps, one_queue=True)


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS)
def test_a_run_has_no_problem(case: Case) -> None:
    assert problems(watched(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW)
def test_no_other_run_has_one(case: Case) -> None:
    assert problems(watched(replace(case, batches=6, record_gradients=False))) == []


NO_WAITS = {
    "training.py (train)",  # Reads the loss scale, which is on the host.
    "optimizer.py (step_with_ready_grads)",  # Torch's Adam reads how many steps it has made, on the host, too.
    "random.py (fork)",  # The state of the host's random numbers.
}
PACE, LOSS = "pace.py (computed)", {"session.py (skipped_iterations)", "training.py (training_log)"}


def test_the_host_waits_for_the_device_only_to_keep_pace() -> None:
    """And on the last stage for the loss, which the log shows, and leaves out of its mean if it is no number."""
    case = replace(SHARDED, flags=(*LATE, "--log-interval", "1"))
    fewer, more = (watched(replace(case, batches=batches)) for batches in (4, 6))
    assert not any(rank.races for rank in (*fewer, *more))
    waits = [later.waits - earlier.waits for earlier, later in zip(fewer, more, strict=True)]
    found = [{re.sub(r":\d+", "", where) for where in of_rank} - NO_WAITS for of_rank in waits]
    assert found == [{PACE}, {PACE}, {PACE, *LOSS}, {PACE, *LOSS}]


@pytest.mark.parametrize(
    ("flaw", "case"),
    [
        ("a stream does not wait for another", SCALED),
        ("a stream does not wait for an event", SCALED),
        ("the host does not wait for an event", SCALED),
        ("a stream does not wait for a transfer", SCALED),
        ("a batch does not wait for the sum of gradients", SHARDED),
    ],
)
def test_a_missing_wait_is_found(flaw: str, case: Case) -> None:
    found = watched(case, flaw)
    assert all(rank.races for rank in found)


@pytest.mark.parametrize("flaw", ["one group for both ways", "timers wait for the device"])
def test_ranks_that_wait_for_each_other_are_found(flaw: str) -> None:
    case = replace(CASE, flags=("--timing-log-level", "2", *EARLY))
    found = watched(case, flaw)
    assert stuck([rank.steps for rank in found], one_queue=False)


@pytest.mark.parametrize("late", [False, True])
def test_ranks_get_through_computations_that_wait_for_the_device_where_receives_are_late(late: bool) -> None:
    case = replace(CASE, batches=6, flags=LATE if late else EARLY)
    found = watched(case, "computations wait for the device")
    steps = [rank.steps for rank in found]
    ends = [stuck(steps, one_queue=one_queue) == [] for one_queue in (False, True)]
    assert ends == [late, late]


@pytest.mark.parametrize("schedule", ["mixpipe", pytest.param("chimera", marks=pytest.mark.slow)])
def test_gradients_of_the_other_copy_hold_up_no_computation(schedule: str) -> None:
    case = replace(CASE, schedule=schedule, stages=4, microbatches=4)
    assert problems(watched(case, "computations wait for the device")) == []


def test_receives_of_a_model_with_experts_are_late() -> None:
    """Its kernels depend on the tokens: one may be used for the first time at any time."""
    case = replace(CASE, replicas=2, model=BIASED, tied=False, batches=6, flags=())
    found = watched(case, "computations wait for the device")
    assert stuck([rank.steps for rank in found], one_queue=False) == []


def access(line: Line, *, first: int = 0, last: int = 8, writes: bool = True) -> Access:
    return Access(line=line, step=line.step(), first=first, last=last, writes=writes, where="a test")


def test_two_accesses_are_in_order_if_one_line_has_seen_the_other() -> None:
    here, there = Line("here"), Line("there")
    memory = Memory(here)
    assert memory.use(written := access(here)) == []
    assert memory.use(access(there, writes=False)) == [written]
    there.after(here.seen())
    assert memory.use(access(there)) == []


def test_two_reads_need_no_order_and_other_bytes_do_not_either() -> None:
    here, there = Line("here"), Line("there")
    memory = Memory(here)
    assert memory.use(access(here, writes=False)) == []
    assert memory.use(access(there, writes=False)) == []
    assert memory.use(access(here, first=8, last=16)) == []
    assert memory.use(access(there, first=16, last=24)) == []
    assert len(memory.use(access(there, first=4, last=12))) == 2


def test_a_line_knows_what_the_one_it_waited_for_had_waited_for() -> None:
    first, second, third = (Line(name) for name in ("first", "second", "third"))
    memory = Memory(first)
    memory.use(access(first))
    second.after(first.seen())
    third.after(second.seen())
    assert memory.use(access(third)) == []


def test_a_read_between_two_writes_is_not_forgotten() -> None:
    here, there = Line("here"), Line("there")
    memory = Memory(here)
    memory.use(access(here))
    there.after(here.seen())
    memory.use(read := access(there, writes=False))
    assert memory.use(access(here)) == [read]


def test_memory_is_given_back_when_all_are_through_with_it() -> None:
    owner, other = Line("owner"), Line("other")
    memory = Memory(owner)
    memory.use(access(owner))
    other.after(owner.seen())
    assert not memory.is_shared
    memory.use(read := access(other, writes=False))
    assert memory.is_shared
    assert memory.under_way() == [read]
    owner.after(other.seen())
    assert memory.under_way() == []


def step(line: str, number: int, meeting: Meeting | None = None, **after: int) -> Step:
    return Step(line, number, {line: number - 1, **after}, meeting, line == "host", "a step")


def transfer(source: int, destination: int, number: int = 0) -> Meeting:
    return Meeting("a group", (source, destination), number)


@pytest.mark.parametrize("one_queue", [False, True])
def test_a_send_is_done_when_it_is_received(one_queue: bool) -> None:
    sends = [step("link", 1, transfer(0, 1)), step("stream", 1, link=1)]
    assert stuck([sends, [step("link", 1, transfer(0, 1))]], one_queue=one_queue) == []
    assert stuck([sends, []], one_queue=one_queue) == [
        "rank 0: a step on link never ends",
        "rank 0: a step on stream never begins",
    ]


def test_two_that_send_before_they_receive_wait_for_ever() -> None:
    here, there = transfer(0, 1), transfer(1, 0)
    ranks = [[step("link", 1, here), step("link", 2, there)], [step("link", 1, there), step("link", 2, here)]]
    assert len(stuck(ranks, one_queue=False)) == 4
    ranks[1] = [step("link", 1, here), step("link", 2, there)]
    assert stuck(ranks, one_queue=False) == []


def test_in_one_queue_what_waits_holds_up_what_comes_after_it() -> None:
    """Of another stream, too; not what the host does."""
    waits = [step("link", 1, transfer(1, 0)), step("stream", 1, link=1)]
    answers = [step("link", 1, transfer(0, 1)), step("link", 2, transfer(1, 0))]
    assert stuck([[*waits, step("other link", 1, transfer(0, 1))], answers], one_queue=False) == []
    assert len(stuck([[*waits, step("other link", 1, transfer(0, 1))], answers], one_queue=True)) == 5
    assert stuck([[*waits, step("host", 1, transfer(0, 1))], answers], one_queue=True) == []
