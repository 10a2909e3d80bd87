"""Transfers that are under way when torch's profiler ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANK = """
import sys
import torch
import torch.distributed as dist
from megatron_2bw.runtime.links import LANES, Boundary, Links
from megatron_2bw.schedule.action import Action

rank, store, calls, ends = int(sys.argv[1]), sys.argv[2], 12, 5
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
links = Links(groups={lane: dist.new_group([0, 1]) for lane in LANES}, ranks=[0, 1], device=torch.device("cpu"))
boundary = Boundary(shape=(4,), dtype=torch.float32, device=torch.device("cpu"))
schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=lambda trace: trace.key_averages())
profiler.start()
sums = []
for call in range(calls):
    profiler.step()
    if rank == 0:
        links.send(Action.parse(f"0SEND_F{call}"), 1, torch.full((4,), float(call)))
    else:
        if call == 0:
            links.post_receive(Action.parse("1RECV_F0"), 0, boundary)
        sums.append(links.take(Action.parse(f"1RECV_F{call}")).sum().item())
        if call + 1 < calls:
            links.post_receive(Action.parse(f"1RECV_F{call + 1}"), 0, boundary)
    for _ in range(20):
        torch.randn(50, 50) @ torch.randn(50, 50)
    if call == ends:
        profiler.stop()
    dist.barrier()
links.flush()
assert rank == 0 or sums == [4.0 * call for call in range(calls)], sums
"""


def test_the_process_ends_well(tmp_path: Path) -> None:
    """Gloo would note the end of such a transfer in memory of the profiler that is given back: a crash at the end."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "".join(said)
