"""Measured times and memory, as the planner's types; every row of ``data`` names its source."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.specs.cluster import CLUSTERS, GPUS, Cluster
from megatron_2bw.planner.specs.layout import Layout, Precision, Recompute, RecomputeModule
from megatron_2bw.planner.specs.model import Model

DATA = Path(__file__).parent / "data"

OLD_MEGATRON = {
    "precision": Precision.FP16,
    "fused_attention": False,
    "split_transfers": True,
    "overlap_transfers": False,
}
"""Megatron-LM before Core, and Megatron-DeepSpeed: fp16, scores stored, transfers split over tensor-parallel ranks and
not beside computations."""
LIKE_LLAMA = {"swiglu": True, "bias": False, "rmsnorm": True, "learned_positions": False, "dropout": False}
LLAMA = "Llama2-7B"
SELENE_GBIT_S = 1600
"""Of a node: 8 x 200 Gbit/s; Narayanan et al., arXiv 2104.04473, section 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layout and what was measured of it."""

    name: str
    group: str
    """Layouts of one group do the same work on the same machine."""
    model: Model
    layout: Layout
    cluster: Cluster | None = None
    measured: float
    """Seconds per batch, or bytes."""
    stage: int | None = None
    """Of which memory was measured; None: of the one that needs most."""


def read(file: str, folder: Path = DATA) -> list[dict[str, str]]:
    """The rows of one file."""
    with (folder / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def a100s(gpus: int, node_gbit_s: float) -> Cluster:
    """Nodes of eight A100-80GB, or one that is smaller."""
    per_node = min(gpus, 8)
    return Cluster(
        name=f"{gpus} x a100",
        gpu=GPUS["a100-80gb"],
        gpus_per_node=per_node,
        nodes=-(-gpus // per_node),
        intra_node_gb_s=GPUS["a100-80gb"].nvlink_gb_s,
        inter_node_gb_s=node_gbit_s / 8,
    )


def vtrain(which: str, folder: Path = DATA) -> list[Row]:
    """``multi_node`` or ``single_node`` rows: full recomputation, 1F1B, gradients summed after the last backward."""
    return [_vtrain_row(row) for row in read("vtrain_a100_measured.csv", folder) if row["set"] == which]


def _vtrain_row(row: dict[str, str]) -> Row:
    layout = _recomputed(row)
    return Row(
        name=_degrees(layout),
        group=f"{row['params_b'] or 'h=' + row['hidden']}, {row['gpus']} GPUs, B={row['gbs']}",
        model=gpt(row),
        layout=layout,
        cluster=a100s(int(row["gpus"]), float(row["inter_node_bw_gbps"])),
        measured=float(row["iteration_time_ms"]) / 1e3,
    )


def bigscience(folder: Path = DATA) -> list[Row]:
    """Runs before BLOOM's, on nodes with 4 x 100 Gbit/s: full recomputation, 1F1B, sharded optimizers, no dropout."""
    return [_bigscience_row(row) for row in read("bigscience_a100.csv", folder)]


def _bigscience_row(row: dict[str, str]) -> Row:
    layout = replace(
        _recomputed(row),
        first_stage_layers=int(row["first_stage_layers"]),
        last_stage_layers=int(row["last_stage_layers"]),
        distributed_optimizer=True,
        precision=Precision(row["precision"]),
    )
    return Row(
        name=f"{row['params_b']}B, {_degrees(layout)}",
        group=f"{row['params_b']}B of {row['layers']} layers, {row['date']}",
        model=replace(gpt(row), learned_positions=False, rotary=False, dropout=False),  # ALiBi.
        layout=layout,
        cluster=a100s(int(row["gpus"]), 400),
        measured=float(row["iteration_time_s"]),
    )


def dlperf(folder: Path = DATA) -> Iterator[Row]:
    """Megatron-LM of March 2021 on nodes of eight V100s with one network card of 100 Gbit/s: full recomputation, 1F1B.

    Tensor-parallel ranks did not yet split transfers.
    """
    for row in read("dlperf_v100.csv", folder):
        layout, gpus = replace(_recomputed(row), split_transfers=False), int(row["gpus"])
        node, per_node = CLUSTERS["p3.16xlarge"], min(gpus, 8)
        yield Row(
            name=f"{row['layers']} layers, h={row['hidden']}, B={row['gbs']}, {_degrees(layout)}",
            group=f"{row['layers']} layers, h={row['hidden']}, {gpus} GPUs, B={row['gbs']}",
            model=gpt(row),
            layout=layout,
            cluster=replace(node, gpus_per_node=per_node, nodes=gpus // per_node, inter_node_gb_s=12.5),
            measured=float(row["iteration_time_ms"]) / 1e3,
        )


def aleph_alpha(folder: Path = DATA) -> Iterator[Row]:
    """Llama models in bf16 with FlashAttention-2 and a fused RMSNorm, 1F1B, nothing recomputed, sharded optimizers.

    Hagemann et al., arXiv 2311.05610: 13B to 65B on 32 to 256 A100-80GB. The vocabulary, untied, is the one with which
    sizes and times give the published utilization. Some of the runs have room for gradients in 16 bits alone.
    """
    for row in read("aleph_alpha_a100.csv", folder):
        layout = Layout(
            schedule="1f1b-flush",
            **sizes(row),
            sequence_parallel=int(row["tp"]) > 1 and row["sequence_parallel"] == "1",
            distributed_optimizer=True,
            gradients_in_bf16=True,
        )
        yield Row(
            name=f"{row['params_b']}B, {row['seq_len']} tokens, {_degrees(layout)}{', sp' * layout.sequence_parallel}",
            group=f"{row['params_b']}B, {int(row['seq_len']):,} tokens, {row['gpus']} GPUs",
            model=replace(
                gpt(row),
                ffn_hidden_size=int(row["ffn_hidden"]),
                tied=False,
                **LIKE_LLAMA,
            ),
            layout=layout,
            cluster=a100s(int(row["gpus"]), SELENE_GBIT_S),
            measured=float(row["iteration_time_s"]),
        )


def sizes(row: dict[str, str]) -> dict[str, int]:
    """Fields of a Layout that tables have under the same short names."""
    names = {"pipeline": "pp", "data": "dp", "tensor": "tp", "microbatch": "mbs", "global_batch": "gbs"}
    return {field: int(row[name]) for field, name in names.items()}


def _recomputed(row: dict[str, str]) -> Layout:
    """Everything recomputed, under 1F1B."""
    return Layout(
        schedule="megatron",
        **sizes(row),
        recompute=Recompute.FULL,
        **OLD_MEGATRON,
    )


def _degrees(layout: Layout) -> str:
    return f"t={layout.tensor} w={layout.data} d={layout.pipeline} b={layout.microbatch}"


def korthikanti(folder: Path = DATA) -> Iterator[Row]:
    """Tables 3 and 5: full recomputation, and selective with sequence parallelism."""
    for row in read("korthikanti22_table3_5.csv", folder):
        for recompute, measured in (
            (Recompute.FULL, row["iter_s_full_recompute"]),
            (Recompute.SELECTIVE, row["iter_s_seqpar_selective"]),
        ):
            layout = Layout(
                schedule="megatron",
                pipeline=int(row["pp"]),
                data=1,
                tensor=int(row["tp"]),
                microbatch=int(row["mbs"]),
                global_batch=int(row["gbs"]),
                chunks=int(row["interleave_v"]),
                recompute=recompute,
                sequence_parallel=recompute is Recompute.SELECTIVE,
                **OLD_MEGATRON,
            )
            yield Row(
                name=f"{row['model']}, {recompute}",
                group=row["model"],
                model=gpt(row),
                layout=layout,
                cluster=a100s(int(row["gpus"]), SELENE_GBIT_S),
                measured=float(measured),
            )


def gpt(row: dict[str, str]) -> Model:
    """The model of a row with plain sizes."""
    return Model(
        num_layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        num_attention_heads=int(row["heads"]),
        seq_length=int(row["seq_len"]),
        vocab_size=int(row.get("vocab", "50257").split()[0]),
    )


LAYER_22B = Model(num_layers=48, hidden_size=6144, num_attention_heads=64, seq_length=2048, vocab_size=51200)


def layer_times(folder: Path = DATA) -> Iterator[tuple[str, Split, float, float]]:
    """Forward and backward of one layer of the 22B model on 8 A100s, in seconds; Table 4."""
    for row in read("korthikanti22_table4_layer_times.csv", folder):
        name = row["experiment"]
        recompute = next((kind for kind in (Recompute.FULL, Recompute.SELECTIVE) if kind in name), Recompute.NONE)
        split = Split(8, 4, "sequence" in name, recompute, Precision.FP16, gradient_width=2, fused_attention=False)
        if recompute is Recompute.SELECTIVE:
            split = split._replace(modules_again=(RecomputeModule.CORE_ATTN,))
        yield name, split, float(row["forward_ms"]) / 1e3, float(row["backward_ms"]) / 1e3


def zero_bubble(folder: Path = DATA) -> list[Row]:
    """Rows of 1F1B with their memory in bytes: 8 and 16 A100s, one layer fewer on the first and last stage."""
    rows = [row for row in read("zero_bubble_table3_4_5_9.csv", folder) if row["schedule"] == "1F1B"]
    return [_zero_bubble_row(row) for row in rows]


def _zero_bubble_row(row: dict[str, str]) -> Row:
    stages, microbatch = int(row["pp"]), int(row["mbs"])
    ends = (int(row["layers"]) + 2) // stages - 1
    layout = Layout(
        schedule="megatron",
        pipeline=stages,
        data=int(row["dp"]),
        tensor=int(row["tp"]),
        microbatch=microbatch,
        global_batch=microbatch * int(row["num_microbatches"]),
        first_stage_layers=ends,
        last_stage_layers=ends,
        **OLD_MEGATRON,
    )
    return Row(
        name=f"{row['model']}, m={row['num_microbatches']}",
        group=row["model"],
        model=gpt(row),
        layout=layout,
        cluster=a100s(int(row["gpus"]), 800),
        measured=layout.global_batch / (float(row["samples_per_gpu_s"]) * int(row["gpus"])),
    )


def memory(folder: Path = DATA) -> list[Row]:
    """Most bytes that torch had allocated, of models with a hidden size from 2304 on."""
    rows = [_llama(row) for row in read("megatron_memory_estimator_checks.csv", folder) if row["model"] == LLAMA]
    rows += [_golden(row) for row in _goldens(folder)]
    rows += [_mixtral(row) for row in _mixtrals(folder)]
    first = {row.group: row for row in reversed(zero_bubble(folder))}
    gigabytes = {row["model"]: float(row["memory_gb"]) for row in _one_f_one_b(folder)}
    rows += [
        Row(name=name, group="zero bubble", model=row.model, layout=row.layout, measured=gigabytes[name] * 1e9)
        for name, row in first.items()
    ]
    return rows


def _one_f_one_b(folder: Path) -> list[dict[str, str]]:
    return [row for row in read("zero_bubble_table3_4_5_9.csv", folder) if row["schedule"] == "1F1B"]


def _llama(row: dict[str, str]) -> Row:
    """The model of the source's example, in GiB: with it, and with no other sequence length, vocabulary or MLP of
    Llama's or GPT-2's, the source's own formula gives the source's own estimates.

    That is GPT with SwiGLU: biases, learned positions, dropout, GPT-2's vocabulary and an MLP of 8/3 h. Megatron-LM
    of 2023 had no fused SwiGLU. It also copied the output of attention, which Core does not and we do not count.
    """
    model = Model(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_hidden_size=10880,
        seq_length=2048,
        vocab_size=50257,
        swiglu=True,
    )
    layout = Layout(
        schedule="megatron",
        **sizes(row),
        distributed_optimizer=True,
        fused_swiglu=False,
    )
    name = f"Llama2-7B, t={layout.tensor} d={layout.pipeline} b={layout.microbatch}"
    return Row(name=name, group=LLAMA, model=model, layout=layout, measured=float(row["peak_actual_gb"]) * 2**30)


def _goldens(folder: Path) -> list[dict[str, str]]:
    """Test cases of Megatron's of a realistic size that say all of it: its others are of a hidden size up to 1024, of
    images, or leave out the vocabulary.
    """
    rows = read("megatron_core_v0.19_golden_values.csv", folder)
    return [row for row in rows if row["vocab-size"] and int(row["hidden-size"] or 0) >= 2304]


_RECORDED_EARLIER = {("gpt3_7b_tp1_pp4_memory_speed", "A100"), ("mixtral_8x7b_tp1pp4ep8vpp8_release", "H100")}
"""Than Megatron waited for what forwards of chunks send, by the dates of the files (260cba71, April 2026)."""


def _golden(row: dict[str, str], gpus: int = 8) -> Row:
    """A test case of Megatron's, by default on one node; the last stage logs."""
    stages, layers = int(row["pipeline-model-parallel-size"]), int(row["num-layers"])
    model = Model(
        num_layers=layers,
        hidden_size=int(row["hidden-size"]),
        num_attention_heads=int(row["num-attention-heads"]),
        num_query_groups=int(row["num-query-groups"]),
        seq_length=int(row["seq-length"]),
        vocab_size=int(row["vocab-size"]),
        tied=False,
    )
    per_chunk = int(row["num-layers-per-virtual-pipeline-stage"] or layers // stages)
    tensor = int(row["tensor-model-parallel-size"])
    layout = Layout(
        schedule="megatron",
        pipeline=stages,
        data=gpus // (stages * tensor),
        tensor=tensor,
        microbatch=int(row["micro-batch-size"]),
        global_batch=int(row["global-batch-size"]),
        chunks=layers // stages // per_chunk,
        waits_for_sends=(row["test_case"], row["device"]) not in _RECORDED_EARLIER,
        distributed_optimizer=True,
        overlap_gradients=row["overlap-grad-reduce"] == "True",
        overlap_parameters=row["overlap-param-gather"] == "True",
    )
    return Row(
        name=f"{row['test_case']}, {row['device']}",
        group="Megatron",
        model=model,
        layout=layout,
        measured=float(row["mem_max_allocated_bytes_max"]),
        stage=stages - 1,
    )


_MIXTRAL = {
    "mixtral_8x22b_tp2pp8ep8vpp1_release": (128, 32000),
    "mixtral_8x7b_alltoall_tp2pp4ep4_release_sm": (128, 256000),
    "mixtral_8x7b_tp1pp4ep8vpp8_release": (64, 32000),
}
"""GPUs and vocabulary, which the rows leave out. The test cases' ``model_config.yaml`` names the tokenizers: Llama 2's,
and one of 256k. No file says how many GPUs there were; with any other number, weights, moments and gradients would not
be the ``mem_allocated_bytes_max`` that lasts from batch to batch, which ``test_gpus_of_mixtral`` checks."""
SCRATCH = "mixtral_8x7b_alltoall_tp2pp4ep4_release_sm"
"""Starts with random weights, the others with trained ones, and so with a router that has not learned to balance."""


def _mixtrals(folder: Path) -> list[dict[str, str]]:
    return [row for row in read("megatron_core_v0.19_golden_values.csv", folder) if row["test_case"] in _MIXTRAL]


def _mixtral(row: dict[str, str]) -> Row:
    """A test case of Megatron's with experts; the last stage logs."""
    gpus, vocabulary = _MIXTRAL[row["test_case"]]
    plain = _golden({**row, "vocab-size": str(vocabulary)}, gpus)
    model = replace(
        plain.model,
        ffn_hidden_size=int(row["ffn-hidden-size"]),
        **LIKE_LLAMA,
        num_experts=int(row["num-experts"]),
        moe_router_topk=int(row["moe-router-topk"]),
    )
    layout = replace(
        plain.layout,
        expert=int(row["expert-model-parallel-size"]),
        expert_tensor=int(row["expert-tensor-parallel-size"] or plain.layout.tensor),
        sequence_parallel=True,
    )
    return replace(plain, group="Mixtral", model=model, layout=layout)


def mixtral_times(folder: Path = DATA) -> list[Row]:
    """Seconds per batch on H100s. Those called A100 are left out: two of their rows are above an A100's peak."""
    return [
        replace(
            _mixtral(row),
            cluster=replace(CLUSTERS["dgx-h100"], nodes=_MIXTRAL[row["test_case"]][0] // 8),
            measured=float(row["iter_time_median_s_second_half"]),
        )
        for row in _mixtrals(folder)
        if row["device"] == "H100"
    ]


def golden_times(folder: Path = DATA) -> list[Row]:
    """The same test cases on one DGX: seconds per batch, in Megatron's deterministic mode; GB200 is priced as B200."""
    clusters = {"A100": CLUSTERS["dgx-a100"], "H100": CLUSTERS["dgx-h100"], "GB200": CLUSTERS["dgx-b200"]}
    return [
        replace(
            _golden(row),
            cluster=clusters[row["device"]],
            measured=float(row["iter_time_median_s_second_half"]),
        )
        for row in _goldens(folder)
    ]
