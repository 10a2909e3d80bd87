"""2bw and pipedream on a toy model equal delayed training in one process, to the last bit."""

from unittest.mock import MagicMock

import pytest
import torch

from megatron_2bw.runtime.executor import Executor
from megatron_2bw.schedule.registry import build
from tests.runtime.toy import expected, train

pytestmark = pytest.mark.usefixtures("one_thread")


def _assert_equal(actual, wanted):
    assert actual[0] == wanted[0]
    assert len(actual[1]) == len(wanted[1])
    for have, want in zip(actual[1], wanted[1], strict=True):
        assert torch.equal(have, want)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(2, 4), (4, 3), *(pytest.param(d, m, marks=SLOW) for d, m in ((2, 1), (2, 2), (3, 2), (4, 4), (4, 8)))],
)
def test_equals_the_loop(stages, microbatches):
    _assert_equal(train(stages, microbatches, 12), expected(stages, microbatches, 12))


@pytest.mark.parametrize(
    ("stages", "microbatches", "delayed"),
    [(2, 4, 1), (3, 6, 3), *(pytest.param(d, m, n, marks=SLOW) for d, m, n in ((2, 4, 2), (4, 8, 3), (4, 8, 7)))],
)
def test_some_microbatches_without_a_delay(stages, microbatches, delayed):
    wanted = expected(stages, microbatches, 12, delayed=delayed)
    assert wanted[0] != expected(stages, microbatches, 12)[0]
    _assert_equal(train(stages, microbatches, 12, delayed=delayed, drains=(3,), jitter_s=0.002), wanted)


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(4, 3), *(pytest.param(d, m, marks=SLOW) for d, m in ((2, 1), (2, 2), (4, 4)))]
)
def test_many_batches_with_random_waits(stages, microbatches):
    """A wrong rule hangs or differs only now and then: hundreds of boundaries with ranks out of step."""
    wanted = expected(stages, microbatches, 150)
    _assert_equal(train(stages, microbatches, 150, jitter_s=0.002), wanted)


def test_a_drain_between_batches_changes_nothing():
    _assert_equal(train(2, 2, 10, drains=(0, 4, 5)), expected(2, 2, 10))


def test_pipedream_equals_a_loop_with_a_delay_of_each_stage():
    """Forwards run up to three batches ahead; runs of one and of two batches are shorter than that."""
    _assert_equal(train(4, 1, 12, "pipedream", drains=(0, 2)), expected(4, 1, 12, "pipedream"))


@pytest.mark.parametrize(("schedule", "ahead"), [("1f1b-flush", False), ("gpipe", False), ("2bw", True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_whether_forwards_have_run_ahead(schedule, ahead, rank):
    """Of any rank: all have to agree, and the last stage's own never do."""
    executor = Executor(build(schedule, stages=2, microbatches=2), rank, MagicMock(), MagicMock())
    executor.run(0, left=None)
    assert executor.is_ahead is ahead
    executor.run(1, left=0)
    assert not executor.is_ahead
