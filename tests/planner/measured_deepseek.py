"""Megatron's own test case of a model like DeepSeek-V3 with 14 layers, as the planner's types.

The row leaves out what the test case's ``model_config.yaml`` says (NVIDIA/Megatron-LM, core_v0.19.0,
tests/functional_tests/test_cases/mixtral): sizes of latent attention, 8 of 64 experts, a tokenizer of 256,000 words.
Nothing says how many GPUs there were: with any other number than 32, weights, moments and gradients would be at least a
fifth less than what lasts from batch to batch. Tokens get to their experts by kernels of their own (HybridEP), and are
priced as by an all-to-all.
"""

from __future__ import annotations

from pathlib import Path

from megatron_2bw.planner.cluster import Cluster, Gpu
from megatron_2bw.planner.layout import Layout
from megatron_2bw.planner.model import Model
from tests.planner.measured import DATA, Row, read

GPUS = 32
GB200 = Gpu(
    name="gb200",
    memory_gb=186,
    peak_tflops=2500,
    hbm_gb_s=8000,
    nvlink_gb_s=900,
    fp8_tflops=5000,
    has_mxfp8=True,
)
"""stas00/ml-engineering at 744d01e, compute/accelerator; memory as printed on the box."""


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
    model = Model(
        num_layers=int(row["num-layers"]),
        hidden_size=int(row["hidden-size"]),
        num_attention_heads=int(row["num-attention-heads"]),
        seq_length=int(row["seq-length"]),
        vocab_size=256000,
        make_vocab_size_divisible_by=int(row["make-vocab-size-divisible-by"]),
        dense_layers=3,
        dense_ffn_hidden_size=int(row["ffn-hidden-size"]),
        ffn_hidden_size=int(row["moe-ffn-hidden-size"]),
        num_experts=int(row["num-experts"]),
        moe_router_topk=8,
        moe_shared_expert_intermediate_size=int(row["moe-shared-expert-intermediate-size"]),
        mtp_num_layers=int(row["mtp-num-layers"]),
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        qk_layernorm=True,
        swiglu=True,
        bias=False,
        rmsnorm=True,
        learned_positions=False,
        dropout=False,
        tied=False,
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
