"""What a profile counts where ranks share processors."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from .case import Case
from .harness import launch
from .worker import set_environment

RANKS, PROCESSOR_S = 2, 0.25


def _repeat(case: Case, rank: int, port: int, folder: Path, *, processors: int, waits: bool) -> None:
    """One rank takes a second of the clock, the other two; both compute for as long."""
    set_environment(rank, case.ranks, port)
    from megatron_2bw import install

    install()
    from megatron_2bw.mcore import timing

    dist.init_process_group("gloo")
    timing.processors = lambda: processors
    (found_s,) = timing.repeated(lambda: (timing.Took(1.0 + rank, PROCESSOR_S),), waits=waits)
    print(f"found {found_s}")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("processors", "waits", "expected_s"),
    [
        pytest.param(0, False, 1.5, id="each rank has a GPU"),
        pytest.param(2, False, 1.5, id="each rank has a processor"),
        pytest.param(1, False, RANKS * PROCESSOR_S, id="two ranks share one"),
        pytest.param(1, True, 1.5, id="they wait for each other"),
    ],
)
def test_who_had_to_wait_for_a_processor_does_not_count(
    processors: int, waits: bool, expected_s: float, tmp_path: Path
) -> None:
    run = partial(_repeat, processors=processors, waits=waits)
    ended = launch(run, Case(schedule=None, stages=RANKS), tmp_path)
    assert ended.exit_codes == [0] * RANKS, ended.tails()
    assert {float(output.split("found ")[1].split()[0]) for output in ended.outputs} == {expected_s}


def _confined(case: Case, rank: int, port: int, folder: Path) -> None:
    """Both ranks may run on the same processor only."""
    set_environment(rank, case.ranks, port)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from megatron_2bw.mcore import timing

    dist.init_process_group("gloo")
    print(f"found {timing.processors()}")
    dist.destroy_process_group()


def test_only_processors_that_ranks_may_run_on_count(tmp_path: Path) -> None:
    ended = launch(_confined, Case(schedule=None, stages=RANKS), tmp_path)
    assert ended.exit_codes == [0] * RANKS, ended.tails()
    assert [output.split("found ")[1].split()[0] for output in ended.outputs] == ["1"] * RANKS
