"""Step times of models with 128 or 256 experts, as the planner's types.

NVIDIA publishes them with releases of Megatron-Bridge, and yanring/Megatron-MoE-ModelZoo with its recipes (commits and
files are in the data). How tokens get to their experts and what is computed again is in ``scripts/performance`` of
Megatron-Bridge's branches r0.1.0 (25.09), r0.2.0 (25.11), r0.3.0 (26.02) and r0.4.0 (26.04), and in the recipes; some
runs compute meanwhile (``moe_a2a_overlap``). Of GPT-OSS with 25.11 there is no recipe. Between two releases, the same
model on the same GPUs became up to three times as fast. Biases of GPT-OSS are not priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.inputs import modules_of
from megatron_2bw.planner.specs.layout import Dispatcher, Fp8, Layout, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from tests.planner.measured import DATA, Row, read

_QWEN3_235B = replace(
    MODELS["llama3-8b"],
    num_layers=94,
    num_attention_heads=64,
    num_query_groups=4,
    kv_channels=128,
    ffn_hidden_size=1536,
    num_experts=128,
    moe_router_topk=8,
    seq_length=4096,
    vocab_size=151936,
    qk_layernorm=True,
)
_MODELS: dict[str, Model] = {
    "qwen3-235b": _QWEN3_235B,
    "qwen3-30b": replace(_QWEN3_235B, num_layers=48, hidden_size=2048, num_attention_heads=32, ffn_hidden_size=768),
    "gpt-oss-120b": replace(
        _QWEN3_235B,
        num_layers=36,
        hidden_size=2880,
        num_query_groups=8,
        kv_channels=64,
        ffn_hidden_size=2880,
        moe_router_topk=4,
        vocab_size=201088,
        qk_layernorm=False,
    ),
    "deepseek-v3": MODELS["deepseek-v3"],
}


def many_experts(folder: Path = DATA) -> Iterator[Row]:
    """Rows of one group differ in what NVIDIA changed from release to release, and in batches."""
    for row in read("many_experts.csv", folder):
        gpus, tensor, pipeline = (int(row[key]) for key in ("gpus", "tp", "pp"))
        recipe, node = Fp8(row["fp8"]), CLUSTERS[row["system"]]
        layout = Layout(
            schedule="megatron",
            pipeline=pipeline,
            tensor=tensor,
            data=gpus // (tensor * pipeline),
            expert=int(row["ep"]),
            expert_tensor=1,
            microbatch=int(row["mbs"]),
            global_batch=int(row["gbs"]),
            chunks=int(row["vp"]),
            waits_for_sends=False,
            pipeline_layout=row["pipeline_layout"],
            sequence_parallel=tensor > 1,
            distributed_optimizer=True,
            overlap_gradients=True,
            overlap_parameters=True,
            gradients_in_bf16=row["sums_in"] == "bf16",
            fp8=recipe,
            dispatcher=Dispatcher(row["dispatcher"]),
            overlap_exchanges=row["overlaps"] == "1",
            recompute=Recompute.SELECTIVE if row["recompute"] else Recompute.NONE,
            recompute_modules=modules_of(row["recompute"].split(), "recompute"),
        )
        group = f"{row['model']}, {node.gpu.name}, {recipe}"
        yield Row(
            name=f"{group}, {gpus} GPUs, B={layout.global_batch}",
            group=group,
            model=_MODELS[row["model"]],
            layout=layout,
            cluster=replace(node, nodes=gpus // node.gpus_per_node),
            measured=float(row["step_s"]),
        )
