"""Runs with matrix products in 8 bits that NVIDIA published, as the planner's types.

The tables give sizes, not all flags; those are from the recipes that they ran: NVIDIA/NeMo-Framework-Launcher at
26e42fa9 (``launcher_scripts/conf/training``, ``examples/training/*/h100``: nothing recomputed; gradients in bf16;
sequence parallelism; sums, gathers and collectives of tensor-parallel ranks overlapped) and
NVIDIA-NeMo/Megatron-Bridge at 067f987 (``src/megatron/bridge/perf_recipes/llama``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_2bw.planner.specs.cluster import CLUSTERS, Cluster, Gpu
from megatron_2bw.planner.specs.layout import Fp8, Layout
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from tests.planner.measured import DATA, Row, read

_GPT3 = {"seq_length": 2048, "vocab_size": 50257}
NEMO_MODELS = {
    "GPT3-5B": Model(num_layers=24, hidden_size=4096, num_attention_heads=32, **_GPT3),
    "GPT3-20B": Model(num_layers=44, hidden_size=6144, num_attention_heads=48, **_GPT3),
    "GPT3-175B": Model(num_layers=96, hidden_size=12288, num_attention_heads=96, **_GPT3),
    "Nemotron-340B": Model(
        num_layers=96,
        hidden_size=18432,
        num_attention_heads=96,
        num_query_groups=8,
        seq_length=4096,
        vocab_size=256000,
        bias=False,
        learned_positions=False,
        dropout=False,
        tied=False,
    ),
    "LLAMA3-70B": MODELS["llama3-70b"],
}
"""Squared ReLU is priced as GELU is: both are one kernel."""

_NEMO = {"gradients_in_bf16": True}

GB300 = Gpu(
    name="gb300",
    memory_gb=279,
    peak_tflops=2500,
    hbm_gb_s=8000,
    nvlink_gb_s=900,
    fp8_tflops=5000,
    has_mxfp8=True,
)
"""stas00/ml-engineering at 744d01e, compute/accelerator; memory as printed on the box."""
GB200 = replace(GB300, name="gb200", memory_gb=186)
"""Of the same source, with the same rates."""
RACK = Cluster(name="gb300-nvl72", gpu=GB300, gpus_per_node=72, nodes=1, intra_node_gb_s=900, inter_node_gb_s=7200)
"""72 GPUs on one NVLink, and 800 Gbit/s each beyond."""


def nemo(folder: Path = DATA) -> Iterator[Row]:
    """Pretraining on H100s, NeMo 24.07: the newest table."""
    for row in read("nemo_2407_h100_perf.csv", folder):
        if row["section"] == "Pretraining" and row["is_latest_doc"] == "yes":
            model = NEMO_MODELS[row["model"]]
            yield row_of(f"{row['model']}, {row['gpus']} GPUs", model, row, CLUSTERS["dgx-h100"], Fp8.DELAYED, **_NEMO)


def long_sequences(folder: Path = DATA) -> Iterator[Row]:
    """Llama 2 7B on H100s, with sequences of 4 to 1,024 thousand tokens, whose length is the raw row's first number."""
    for row in read("nemo_2407_h100_perf.csv", folder):
        if row["section"].startswith("Long"):
            length = 1024 * int(row["raw"].split("|")[0])
            model = replace(MODELS["llama2-7b"], seq_length=length)
            sizes = {**row, "seq_len": str(length)}
            yield row_of(
                f"{length:,} tokens, {row['gpus']} GPUs", model, sizes, CLUSTERS["dgx-h100"], Fp8.DELAYED, **_NEMO
            )


_PRECISIONS = {
    "FP8": [Fp8.TENSORWISE],
    "FP8-CS": [Fp8.TENSORWISE],
    "MXFP8": [Fp8.MXFP8],
    "FP8-CS (FP8-MX)": [Fp8.TENSORWISE, Fp8.MXFP8],
}
"""As the recipes call them: current scaling, and blocks of 32."""
_BRIDGE = {"fp8_parameters": True, "gradients_in_bf16": True, "fused_loss": True}
"""``_perf_precision``, ``_benchmark_common``."""
SYSTEMS = {
    "DGX-H100": CLUSTERS["dgx-h100"],
    "DGX-B200": CLUSTERS["dgx-b200"],
    "DGX-GB200": replace(RACK, name="gb200-nvl72", gpu=GB200, gpus_per_node=64, inter_node_gb_s=3200),
    "DGX-GB300": RACK,
}
"""Of a rack of GB200s, 64 of the 72, as many as a pipeline of 16 x 4; 400 Gbit/s each beyond."""
_BRIDGE_MODELS = {
    "LLAMA3_8B": MODELS["llama3-8b"],
    "LLAMA3_70B": MODELS["llama3-70b"],
    "LLAMA3.1_405B": MODELS["llama3-405b"],
}
_LAYOUTS = {
    ("LLAMA3_70B", 8, 5): "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL",
    ("LLAMA3.1_405B", 16, 4): "Et|(tt|)*62tL",
    ("LLAMA3.1_405B", 16, 8): "E|(t|)*126L",
}
"""By stages and chunks: of the recipe for H100, and what embedding and loss counted as layers each come to."""


def bridge(folder: Path = DATA) -> Iterator[Row]:
    """Pretraining with Megatron-Bridge 25.11 and 26.04.01, as far as nothing is sharded, offloaded or in 4 bits."""
    for row in read("megatron_bridge_perf_summary.csv", folder):
        recipes = _PRECISIONS.get(row["precision"])
        of_version = row["container"].startswith(("25.11", "26.04.01"))
        if not (recipes and of_version and row["model"] in _BRIDGE_MODELS and row["section"].startswith("Pre")):
            continue
        if row["fsdp"] not in ("", "0"):
            continue
        for recipe, rate in zip(recipes, row["tokens_per_s_per_gpu"].replace(")", "").split(" ("), strict=True):
            name = f"{row['model']}, {row['gpus']} x {row['system'][4:]}, {recipe}, B={row['gbs']}"
            cluster = SYSTEMS[row["system"]]
            sizes = {**row, "tokens_per_s_per_gpu": rate}
            free = _LAYOUTS.get((row["model"], int(row["pp"]), int(row["vp"]) if row["vp"].isdigit() else 1), "")
            yield row_of(name, _BRIDGE_MODELS[row["model"]], sizes, cluster, recipe, pipeline_layout=free, **_BRIDGE)


def row_of(name: str, model: Model, row: dict[str, str], node: Cluster, recipe: Fp8, **more: Any) -> Row:
    """A row of NVIDIA's tables: sizes and tokens per second and GPU."""
    gpus, tensor, pipeline, context = (int(row[key]) for key in ("gpus", "tp", "pp", "cp"))
    chunks = int(row["vp"]) if row["vp"].isdigit() else 1
    layout = Layout(
        schedule="megatron",
        pipeline=pipeline,
        data=gpus // (tensor * pipeline * context),
        tensor=tensor,
        context=context,
        microbatch=int(row["mbs"]),
        global_batch=int(row["gbs"]),
        chunks=chunks,
        waits_for_sends=False,
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
        overlap_gradients=True,
        overlap_parameters=True,
        fp8=recipe,
        overlap_tensor=tensor > 1,
        **more,
    )
    per_node = min(gpus, node.gpus_per_node)
    cluster = replace(node, gpus_per_node=per_node, nodes=gpus // per_node)
    tokens_per_s = gpus * float(row["tokens_per_s_per_gpu"])
    return Row(
        name=name,
        group=name,
        model=model,
        layout=layout,
        cluster=cluster,
        measured=layout.global_batch * model.seq_length / tokens_per_s,
    )
