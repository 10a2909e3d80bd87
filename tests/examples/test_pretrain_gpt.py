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


def test_sequences_are_divided_among_ranks(run_on_two):
    """Two ranks with half of each sequence train as two with half of the sequences do."""
    # A table of positions would begin with other numbers: Megatron draws some before, as many as a rank has tokens.
    more = "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --num-workers 0".split()
    more += ["--pipeline-model-parallel-size", "1"]
    whole = run_on_two("examples/pretrain_gpt.py", *FLAGS, *more)
    parts = run_on_two("tests/examples/context_parallel_gpt.py", *FLAGS, *more, "--context-parallel-size", "2")
    of_whole, of_parts = (
        [float(loss) for loss in re.findall(r"lm loss(?: value)?: (\S+)", done.stdout)] for done in (whole, parts)
    )
    assert len(of_whole) == 4 + 3, whole.stderr[-4000:]
    assert of_parts == pytest.approx(of_whole, rel=1e-5), parts.stderr[-4000:]


def test_what_only_megatrons_own_script_reads_is_refused(run_on_two):
    done = run_on_two("examples/pretrain_gpt.py", *FLAGS, "--spec", "no.such module")
    assert "--spec: this example does not read it; leave it out, or start Megatron-LM's own" in done.stderr


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush", "chimera"])
def test_a_run_whose_loader_handles_signals_ends(run_on_two, schedule: str):
    """Python waits for the loader's workers, which end when nothing can read from them any more."""
    more = f"--num-workers 1 --exit-signal-handler --pipeline-schedule {schedule}".split()
    done = run_on_two("examples/pretrain_gpt.py", *FLAGS, *more)
    assert done.returncode == 0, done.stderr[-4000:]
