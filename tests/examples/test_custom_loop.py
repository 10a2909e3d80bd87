"""examples/custom_loop.py, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_it_learns(root, tmp_path):
    losses = tmp_path / "losses.json"
    environment = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(root / "examples/custom_loop.py"), "--schedule", "2bw", "--batches", "12", "--losses", str(losses)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2bw: loss 5.4" in done.stdout
    means = json.loads(losses.read_text())
    assert len(means) == 12
    assert means[-1] < means[0] - 0.3
