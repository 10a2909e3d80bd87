"""examples/custom_loop.py, as a user starts it."""

from __future__ import annotations

import json


def test_it_learns(run_on_two, tmp_path):
    losses = tmp_path / "losses.json"
    done = run_on_two("examples/custom_loop.py", "--schedule", "2bw", "--batches", "12", "--losses", str(losses))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2bw: loss 5.4" in done.stdout
    means = json.loads(losses.read_text())
    assert len(means) == 12
    assert means[-1] < means[0] - 0.3
