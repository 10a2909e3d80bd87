"""A process ends well though gloo's threads still hold tensors."""

from __future__ import annotations

import subprocess
import sys

START = """
import datetime, os, sys, threading, weakref
import torch
import torch.distributed as dist
from megatron_2bw.runtime import gloo_workers
"""
LAST_TENSORS = """
import atexit
atexit.register(gloo_workers.finish)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(100)  # A thread that waits for the interpreter does not ask for it.
while True:
    tensor = torch.ones(8)
    held = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    sum(range(10**5))
    if held() is not None:  # By a thread, and nobody else.
        break
"""
WITHOUT_A_PEER = """
store, groups = dist.HashStore(), {}
def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(hours=1))
threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
work = groups[0].allreduce([torch.ones(8)])
gloo_workers._GIVE_UP_AFTER_S = 3600.0
gloo_workers.finish()
print(work.is_completed(), len(gloo_workers._states()))
sys.stdout.flush()
os._exit(0)
"""


def test_their_last_tensors_are_let_go_of_before_the_interpreter_ends() -> None:
    ended = _run(LAST_TENSORS)
    assert ended.returncode == 0, ended.stderr


def test_nothing_waits_for_another_rank() -> None:
    ended = _run(WITHOUT_A_PEER)
    assert ended.stdout == "False 4\n", ended.stderr


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, timeout=120, check=False
    )
