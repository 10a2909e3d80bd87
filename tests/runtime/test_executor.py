"""Schedules on a toy model equal a loop in one process, delayed or not, to the last bit."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import starmap
from unittest.mock import MagicMock

import pytest
import torch

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.schedule.registry import build
from tests.runtime.toy import Size, expected, train


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the stages have it: with more, some sums of the loop are taken in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def two_bw(stages: int, microbatches: int, delayed: int | None = None, **rest: object) -> Size:
    return Size("2bw", stages, microbatches, (("delayed_microbatches", delayed),) if delayed else (), **rest)


SIZES = [
    two_bw(2, 4),
    two_bw(4, 3),
    # Of the others some microbatches have no delay.
    two_bw(2, 4, 1, drains=(3,), jitter_s=0.002),
    two_bw(3, 6, 3, drains=(3,), jitter_s=0.002),
    # A wrong rule hangs or differs only now and then: hundreds of boundaries with ranks out of step.
    two_bw(4, 3, batches=150, jitter_s=0.002),
    two_bw(2, 2, batches=10, drains=(0, 4, 5)),
    # Forwards run up to three batches ahead; runs of one and of two batches are shorter than that.
    Size("pipedream", 4, 1, drains=(0, 2)),
    Size("gems", 2, 4),
    Size("chimera", 2, 2),
    Size("gems", 4, 4),
    Size("chimera", 4, 4),
    Size("chimera", 4, 8),
    Size("mixpipe", 4, 4),
    Size("mixpipe", 4, 4, (("k", 2),)),
    Size("mixpipe", 4, 8),
    Size("mixpipe", 4, 4, (("k", 2), ("gamma", 1)), batches=60, jitter_s=0.002),
    two_bw(4, 3, batches=30, drains=(0, 9), jitter_s=0.002, late_receives=True),
    Size("pipedream", 4, 1, drains=(0, 2), late_receives=True),
    Size("chimera", 4, 8, late_receives=True),
]
MORE = [
    *(two_bw(d, m) for d, m in ((2, 1), (2, 2), (3, 2), (4, 4), (4, 8))),
    *(two_bw(d, m, n, drains=(3,), jitter_s=0.002) for d, m, n in ((2, 4, 2), (4, 8, 3), (4, 8, 7))),
    *(two_bw(d, m, batches=150, jitter_s=0.002) for d, m in ((2, 1), (2, 2), (4, 4))),
]


@pytest.mark.parametrize("size", [*SIZES, *(pytest.param(size, marks=pytest.mark.slow) for size in MORE)], ids=str)
def test_equals_the_loop(size: Size, one_thread: None):
    found, wanted = train(size), expected(size)
    assert found.losses == wanted.losses
    assert found.weights.keys() == wanted.weights.keys()
    for stage, weights in wanted.weights.items():
        assert len(weights) > 0
        assert all(starmap(torch.equal, zip(found.weights[stage], weights, strict=True))), f"stage {stage}"
    assert found.in_flight == wanted.in_flight


def test_some_microbatches_without_a_delay_make_a_difference(one_thread: None):
    assert expected(two_bw(2, 4, 1)).losses != expected(two_bw(2, 4)).losses


@pytest.mark.parametrize(("schedule", "ahead"), [("1f1b-flush", False), ("gpipe", False), ("2bw", True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_whether_forwards_have_run_ahead(schedule, ahead, rank):
    """Of any rank: all have to agree, and the last stage's own never do."""
    executor = Executor(build(schedule, stages=2, microbatches=2), rank, MagicMock(), MagicMock())
    executor.run(0, left=None)
    assert executor.is_ahead is ahead
    executor.run(1, left=0)
    assert not executor.is_ahead


@pytest.mark.parametrize(
    ("lefts", "message"),
    [
        ((None, 0), "left 0: forwards ran 2 batches ahead, into one that would not come; give 1, and count down"),
        ((5, 0), "left 0: forwards ran 2 batches ahead"),
        ((None, 1, 1), "left 1: the batch before this one was announced with 1 after it; give 0"),
        ((1, None), "left None: the batch before this one was announced with 1 after it; give 0"),
        ((None, 2, 1, 0, 1, 0, None, None, 7, 1, 0), ""),
    ],
    ids=str,
)
def test_batches_that_forwards_ran_into_come(lefts, message):
    """A batch that was computed in part and left out would be taken for part of the next one."""
    executor = Executor(build("pipedream", stages=3, microbatches=1), 0, MagicMock(), MagicMock())
    *announced, last = enumerate(lefts)
    for batch, left in announced:
        executor.run(batch, left=left)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        executor.run(last[0], left=last[1])
