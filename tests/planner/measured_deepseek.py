"""Megatron's own test cases of a model like DeepSeek-V3 with 14 layers, as the planner's types.

The rows leave out what the test cases' ``model_config.yaml`` says (NVIDIA/Megatron-LM, core_v0.19.0,
tests/functional_tests/test_cases/mixtral): all other sizes are those of DeepSeek-V3, and the tokenizer has 256,000
words.
Nothing says how many GPUs there were: with any other number than these, weights, moments and gradients would be at
least a fifth less than what lasts from batch to batch. Tokens get to their experts by HybridEP.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_2bw.planner.specs.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.specs.layout import Dispatcher, Layout
from megatron_2bw.planner.specs.models import MODELS
from tests.planner.measured import DATA, Row, read
from tests.planner.measured_fp8 import GB200

GPUS = {"GB200": 32, "H100": 64}
_NVL72 = Cluster(name="gb200-nvl72", gpu=GB200, gpus_per_node=32, nodes=1, intra_node_gb_s=900, inter_node_gb_s=3200)
"""A part of it."""
_CLUSTERS = {"GB200": _NVL72, "H100": replace(CLUSTERS["dgx-h100"], nodes=8)}


def _rows(folder: Path) -> list[dict[str, str]]:
    rows = read("megatron_core_v0.19_golden_values.csv", folder)
    return [row for row in rows if row["test_case"].startswith("deepseekv3_proxy")]


def lasting_bytes(folder: Path = DATA) -> list[float]:
    """What the last stages had allocated between batches."""
    return [float(row["mem_allocated_bytes_max"]) for row in _rows(folder)]


def times(folder: Path = DATA) -> list[Row]:
    """Seconds per batch."""
    return [_of(row, "iter_time_median_s_second_half") for row in _rows(folder)]


def memory(folder: Path = DATA) -> list[Row]:
    """Bytes of the last stages, which log."""
    return [_of(row, "mem_max_allocated_bytes_max") for row in _rows(folder)]


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
        data=GPUS[row["device"]] // (tensor * pipeline),
        tensor=tensor,
        expert=int(row["expert-model-parallel-size"]),
        expert_tensor=int(row["expert-tensor-parallel-size"]),
        microbatch=int(row["micro-batch-size"]),
        global_batch=int(row["global-batch-size"]),
        sequence_parallel=True,
        distributed_optimizer=True,
        overlap_gradients=True,
        overlap_parameters=True,
        dispatcher=Dispatcher.HYBRIDEP,
        pipeline_layout=row["pipeline-model-parallel-layout"],
    )
    return Row(
        name=f"deepseekv3_proxy, {row['device']}",
        group="DeepSeek",
        model=model,
        layout=layout,
        cluster=_CLUSTERS[row["device"]],
        measured=float(row[measured]),
        stage=pipeline - 1,
    )
