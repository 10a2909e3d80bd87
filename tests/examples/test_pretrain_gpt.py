"""examples/pretrain_gpt.py with what plans print beside sizes."""

from __future__ import annotations

import re

import pytest

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 4 "
    "--log-interval 1 --eval-interval 4 --eval-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 127"
).split()


def test_further_tokens_are_predicted(run_on_two):
    more = "--num-workers 0 --position-embedding-type rope --mtp-num-layers 1 --pipeline-schedule 2bw".split()
    done = run_on_two("examples/pretrain_gpt.py", *FLAGS, *more)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = re.findall(r"iteration +\d+/.*lm loss: (\S+) \| mtp_1 loss: (\S+)", done.stdout)
    assert len(lines) == 4
    assert [float(loss) for loss in lines[0]] == pytest.approx([4.85, 4.85], abs=0.1), "about log(vocabulary)"


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush", "chimera"])
def test_a_run_whose_loader_handles_signals_ends(run_on_two, schedule: str):
    """Python waits for the loader's workers, which end when nothing can read from them any more."""
    more = f"--num-workers 1 --exit-signal-handler --pipeline-schedule {schedule}".split()
    done = run_on_two("examples/pretrain_gpt.py", *FLAGS, *more)
    assert done.returncode == 0, done.stderr[-4000:]
