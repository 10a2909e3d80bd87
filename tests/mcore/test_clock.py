"""Ranks of other machines are put on the first stage's clock."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from .case import Case
from .harness import launch

MACHINES = ("a", "a", "b", "c")
AHEAD_S = {"a": 0.0, "b": 1000.0, "c": -500.0}
"""By how much the clock of a machine is ahead."""


def test_clocks_of_other_machines(tmp_path: Path) -> None:
    ended = launch(_rank, Case(stages=len(MACHINES)), tmp_path)
    assert ended.exit_codes == [0] * len(MACHINES), ended.tails()
    off_s = [float((tmp_path / f"off{rank}").read_text()) for rank in range(len(MACHINES))]
    assert off_s[:2] == pytest.approx([0.0, 0.0], abs=1e-6), "on one machine nothing is changed"
    assert off_s == pytest.approx([0.0] * len(MACHINES), abs=0.02)


def _rank(case: Case, rank: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    from megatron_2bw.mcore.groups import TransferGroups
    from megatron_2bw.mcore.monitoring import clock
    from megatron_2bw.runtime.links import LANES

    machine = MACHINES[rank]
    boot_id = folder / f"boot{rank}"
    boot_id.write_text(machine)
    clock._BOOT_ID = boot_id
    clock.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + AHEAD_S[machine])
    ranks = list(range(case.ranks))
    shared = clock.SharedClock(TransferGroups(ranks=ranks, lanes={lane: dist.new_group(ranks) for lane in LANES}))
    now_s = time.perf_counter()
    to_first = shared.conversion()
    (folder / f"off{rank}").write_text(repr(to_first(now_s + AHEAD_S[machine]) - now_s))
    dist.barrier()
    dist.destroy_process_group()
