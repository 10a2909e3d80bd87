"""What cannot work is refused in plain words, with exit code 2, before any process meets another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .case import Case, Fault
from .harness import Ended, launch
from .worker import main, through_launcher

TWO_BW = Case(schedule="2bw", layers=4, stages=2, microbatches=2)
FLUSH = replace(TWO_BW, schedule="1f1b-flush")


def _without_symbol(kind: str, symbol: str) -> Case:
    return replace(TWO_BW, faults=tuple(Fault(kind=kind, rank=rank, text=symbol) for rank in range(TWO_BW.ranks)))


REFUSED: dict[str, tuple[Case, list[str]]] = {
    "unknown schedule": (
        replace(TWO_BW, schedule="3bw"),
        ["--pipeline-schedule", "'3bw'", "'2bw'", "'1f1b-flush'", "'gpipe'", "'megatron'"],
    ),
    "too few microbatches": (
        replace(TWO_BW, stages=4, microbatches=2),
        ["2 microbatches", "--pipeline-model-parallel-size 4", "3 microbatches work"],
    ),
    "too few delayed microbatches": (
        replace(TWO_BW, stages=4, microbatches=8, delayed=2),
        ["--pipeline-delayed-microbatches 2 is less than 3: give 3 or more, or leave the flag out"],
    ),
    "too few delayed microbatches, of too few": (
        replace(TWO_BW, stages=4, microbatches=4, delayed=2, flags=("--pipeline-extra-in-flight", "1")),
        [
            "--pipeline-delayed-microbatches 2 is less than 6",
            "6 microbatches work",
            "lower --pipeline-extra-in-flight 1",
        ],
    ),
    "more delayed microbatches than there are": (
        replace(TWO_BW, stages=4, microbatches=4, delayed=6),
        ["--pipeline-delayed-microbatches 6 is more than the 4 of a batch: give fewer"],
    ),
    "one stage": (replace(TWO_BW, stages=1), ["--pipeline-model-parallel-size", "at least 2"]),
    "virtual stages by layers": (
        replace(TWO_BW, flags=("--num-layers-per-virtual-pipeline-stage", "1")),
        ["--num-layers-per-virtual-pipeline-stage", "2bw", "--pipeline-schedule megatron"],
    ),
    "virtual stages by number": (
        replace(TWO_BW, flags=("--num-virtual-stages-per-pipeline-rank", "2")),
        ["--num-virtual-stages-per-pipeline-rank", "2bw", "--pipeline-schedule megatron"],
    ),
    "CUDA graphs": (
        replace(TWO_BW, flags=("--cuda-graph-impl", "local")),
        ["--cuda-graph-impl", "2bw", "--pipeline-schedule megatron"],
    ),
    "CUDA graphs with a flush": (
        replace(FLUSH, flags=("--cuda-graph-impl", "local")),
        ["--cuda-graph-impl", "1f1b-flush", "--pipeline-schedule megatron"],
    ),
    "fp8": (replace(TWO_BW, flags=("--fp8-format", "hybrid")), ["--fp8-format", "2bw", "1f1b-flush"]),
    "precision-aware optimizer, corrected": (
        replace(TWO_BW, flags=("--use-precision-aware-optimizer", "--delay-correction", "lead")),
        ["--use-precision-aware-optimizer", "--delay-correction", "2bw", "leave one of the two out"],
    ),
    "Megatron-FSDP": (
        replace(TWO_BW, flags=("--use-megatron-fsdp",)),
        ["--use-megatron-fsdp", "2bw", "leave the flag out"],
    ),
    "rerun mode": (
        replace(TWO_BW, flags=("--rerun-mode", "report_stats")),
        ["--rerun-mode", "2bw", "disabled"],
    ),
    "numbers of a pipeline that is Megatron's": (
        replace(TWO_BW, schedule="megatron", flags=("--log-pipeline",)),
        ["--log-pipeline", "--pipeline-schedule 1f1b-flush"],
    ),
    "NCCL without a GPU": (
        replace(TWO_BW, schedule="megatron", flags=("--distributed-backend", "nccl")),
        ["--distributed-backend nccl needs GPUs", "is_available() is false on", "or train on CPUs by", "gloo"],
    ),
    "a file that cannot be": (
        replace(TWO_BW, flags=("--pipeline-trace", "/dev/null/trace.json")),
        ["--pipeline-trace /dev/null/trace.json cannot be written: "],
    ),
    "a folder in place of a file": (
        replace(TWO_BW, flags=("--pipeline-trace", "/")),
        ["--pipeline-trace / cannot be written: Is a directory"],
    ),
    "half of what is chosen together": (
        replace(TWO_BW, schedule="mixpipe", flags=("--mixpipe-k", "auto", "--mixpipe-gamma", "1")),
        ["--mixpipe-gamma is chosen together with --mixpipe-k auto", "leave it out, or give both"],
    ),
    "stages that no microbatches suit": (
        replace(TWO_BW, schedule="chimera", stages=3, layers=3),
        ["--pipeline-schedule chimera cannot run", "--pipeline-model-parallel-size 3", "or use", "1f1b-flush"],
    ),
    "a lead that is none": (
        replace(TWO_BW, flags=("--delay-correction", "lead", "--delay-lead", "0")),
        ["--delay-lead: '0' is no number above 0"],
    ),
    "batches that shrink": (
        replace(TWO_BW, steps=((2, 4), (3, 2))),
        ["--step-batch-size-schedule makes batches smaller after 16 samples", "let them grow only"],
    ),
    "no delay to wait with": (
        replace(TWO_BW, schedule="megatron", flags=("--synchronous-warmup-iters", "3")),
        ["--synchronous-warmup-iters", "--pipeline-schedule 2bw"],
    ),
    "symbol that is gone": (
        _without_symbol("missing symbol", "megatron.training.training.evaluate"),
        ["megatron.training.training.evaluate", "missing", "0.18.2 and 0.19.2"],
    ),
    "symbol that changed": (
        _without_symbol("changed symbol", "megatron.training.training.save_checkpoint_and_time"),
        ["megatron.training.training.save_checkpoint_and_time", "optimizer", "0.18.2 and 0.19.2"],
    ),
}


@pytest.mark.parametrize(("case", "fragments"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_before_training(case: Case, fragments: list[str], tmp_path: Path) -> None:
    ended = launch(through_launcher, case, tmp_path, timeout_s=30.0)
    assert ended.exit_codes == [2] * case.ranks, ended.tails()
    message = _message(ended)
    assert [fragment for fragment in fragments if fragment not in message] == [], message


def test_a_default_in_the_way_is_changed_with_a_notice(tmp_path: Path) -> None:
    ended = launch(main, replace(TWO_BW, batches=2), tmp_path)
    assert ended.exit_codes == [0] * TWO_BW.ranks, ended.tails()
    (notice,) = [line for line in ended.outputs[0].splitlines() if "--rerun-mode" in line]
    assert notice.startswith("megatron_2bw: ")
    assert "disabled" in notice
    assert "--rerun-mode" not in ended.outputs[1]


def _message(ended: Ended) -> str:
    """What the first rank says last, a user's last line of the screen."""
    return ended.outputs[0].strip().splitlines()[-1]
