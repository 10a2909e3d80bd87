"""Ranks of other machines are put on the first stage's clock."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

MACHINES = ("a", "a", "b", "c")
AHEAD_S = {"a": 0.0, "b": 1000.0, "c": -500.0}
"""By how much the clock of a machine is ahead."""


def test_clocks_of_other_machines(tmp_path: Path) -> None:
    mp.start_processes(_rank, (str(tmp_path),), nprocs=len(MACHINES), start_method="forkserver")
    off_s = [float((tmp_path / f"off{rank}").read_text()) for rank in range(len(MACHINES))]
    assert off_s[:2] == pytest.approx([0.0, 0.0], abs=1e-6), "on one machine nothing is changed"
    assert off_s == pytest.approx([0.0] * len(MACHINES), abs=0.02)


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(MACHINES))
    from megatron_2bw.mcore.groups import TransferGroups
    from megatron_2bw.mcore.monitoring import clock
    from megatron_2bw.runtime.links import LANES

    machine = MACHINES[rank]
    boot_id = Path(folder) / f"boot{rank}"
    boot_id.write_text(machine)
    clock._BOOT_ID = boot_id
    clock.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + AHEAD_S[machine])
    ranks = list(range(len(MACHINES)))
    shared = clock.SharedClock(TransferGroups(ranks=ranks, lanes={lane: dist.new_group(ranks) for lane in LANES}))
    now_s = time.perf_counter()
    to_first = shared.conversion()
    (Path(folder) / f"off{rank}").write_text(repr(to_first(now_s + AHEAD_S[machine]) - now_s))
    dist.barrier()
    dist.destroy_process_group()
