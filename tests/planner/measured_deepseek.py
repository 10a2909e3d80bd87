"""Megatron's own test case of a model like DeepSeek-V3 with 14 layers, as the planner's types.

The row leaves out what the test case's ``model_config.yaml`` says (NVIDIA/Megatron-LM, core_v0.19.0,
tests/functional_tests/test_cases/mixtral): all other sizes are those of DeepSeek-V3, and the tokenizer has 256,000
words.
Nothing says how many GPUs there were: with any other number than 32, weights, moments and gradients would be at least a
fifth less than what lasts from batch to batch. Tokens get to their experts by kernels of their own (HybridEP), and are
priced as by an all-to-all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_2bw.planner.cluster import Cluster
from megatron_2bw.planner.layout import Layout
from megatron_2bw.planner.models import MODELS
from tests.planner.measured import DATA, Row, read
from tests.planner.measured_fp8 import GB300

GPUS = 32
GB200 = replace(GB300, name="gb200", memory_gb=186)
"""Of the same source, with the same rates."""


def _row(folder: Path) -> dict[str, str]:
    (row,) = (
        row
        for row in read("megatron_core_v0.19_golden_values.csv", folder)
        if row["test_case"].startswith("deepseekv3_proxy") and row["device"] == "GB200"
    )
    return row


def lasting_bytes(folder: Path = DATA) -> float:
    """What the last stage had allocated between batches."""
    return float(_row(folder)["mem_allocated_bytes_max"])


def time(folder: Path = DATA) -> Row:
    """Seconds per batch, on GPUs of one NVLink."""
    return _of(_row(folder), "iter_time_median_s_second_half")


def memory(folder: Path = DATA) -> Row:
    """Bytes of the last stage, which logs."""
    return _of(_row(folder), "mem_max_allocated_bytes_max")


def _of(row: dict[str, str], measured: str) -> Row:
    tensor, pipeline = int(row["tensor-model-parallel-size"]), int(row["pipeline-model-parallel-size"])
    model = replace(
        MODELS["deepseek-v3"],
        name="",
        num_layers=int(row["num-layers"]),
        num_experts=int(row["num-experts"]),
        vocab_size=256000,
        make_vocab_size_divisible_by=int(row["make-vocab-size-divisible-by"]),
    )
    layout = Layout(
        schedule="megatron",
        pipeline=pipeline,
        data=GPUS // (tensor * pipeline),
        tensor=tensor,
        expert=int(row["expert-model-parallel-size"]),
        expert_tensor=int(row["expert-tensor-parallel-size"]),
        microbatch=int(row["micro-batch-size"]),
        global_batch=int(row["global-batch-size"]),
        sequence_parallel=True,
        distributed_optimizer=True,
        overlap_gradients=True,
        overlap_parameters=True,
    )
    cluster = Cluster(
        name="gb200-nvl72", gpu=GB200, gpus_per_node=GPUS, nodes=1, intra_node_gb_s=900, inter_node_gb_s=3200
    )
    return Row(
        name="deepseekv3_proxy, GB200",
        group="DeepSeek",
        model=model,
        layout=layout,
        cluster=cluster,
        measured=float(row[measured]),
        stage=pipeline - 1,
    )
