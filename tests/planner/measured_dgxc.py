"""Step times of NVIDIA's benchmarking recipes on H100 and GB200, in 16 and in 8 bits, as the planner's types.

NVIDIA/dgxc-benchmarking publishes them with every release (commits and files are in the data). Sizes are those of its
tables; of the rest, its configurations say: sequence parallelism with tensor parallelism; a distributed optimizer that
overlaps, as collectives of tensor-parallel ranks do; gradients in bf16; nothing recomputed, but for Nemotron 340B the
core of attention (``nemotron4-340b-synth.yaml``). With v = 8, embedding and loss of Llama 3.1 405B count as layers.
Every expert of Grok-1 gets as many tokens (``grok1_314b.yaml``: a capacity factor of 1), as predictions assume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_2bw.planner.cost.ends import counted_ends
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Fp8, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from tests.planner.measured import DATA, Row, read
from tests.planner.measured_fp8 import NEMO_MODELS, SYSTEMS, row_of

_NEMOTRON_340B = NEMO_MODELS["Nemotron-340B"]
_MODELS: dict[str, Model] = {
    **{name: MODELS[name] for name in ("llama3-8b", "llama3-70b", "llama3-405b")},
    "gpt3-175b": NEMO_MODELS["GPT3-175B"],
    "nemotron4-15b": replace(
        _NEMOTRON_340B,
        num_layers=32,
        hidden_size=6144,
        num_attention_heads=48,
        kv_channels=128,
        ffn_hidden_size=24576,
    ),
    "nemotron4-340b": _NEMOTRON_340B,
    "grok1": replace(
        MODELS["llama3-8b"],
        num_layers=64,
        hidden_size=6144,
        num_attention_heads=48,
        kv_channels=128,
        ffn_hidden_size=32768,
        num_experts=8,
    ),
}
_SYSTEMS = {"H100": CLUSTERS["dgx-h100"], "GB200": SYSTEMS["DGX-GB200"]}


def steps(folder: Path = DATA) -> Iterator[Row]:
    """Rows of one group differ in the number of GPUs and in the batch."""
    for row in read("dgxc_benchmarking.csv", folder):
        layers, pipeline, chunks = int(row["layers"]), int(row["pp"]), int(row["vp"])
        model = _MODELS[row["model"]]
        model = replace(model, num_layers=layers, seq_length=int(row["seq_len"] or model.seq_length))
        gpus, batch = int(row["gpus"]), int(row["gbs"])
        is_8_bits = row["precision"] == "FP8"
        cut = f" of {layers} layers" * (layers != _MODELS[row["model"]].num_layers)
        group = f"{row['model']}{cut}, {row['system']}, {row['precision']}"
        yield replace(
            row_of(
                f"{group}, {gpus} GPUs, B={batch}",
                model,
                {**row, "tokens_per_s_per_gpu": str(batch * model.seq_length / (gpus * float(row["step_s"])))},
                _SYSTEMS[row["system"]],
                Fp8.DELAYED if is_8_bits else Fp8.NONE,
                gradients_in_bf16=True,
                fp8_parameters=is_8_bits,
                recompute=Recompute.SELECTIVE if row["model"] == "nemotron4-340b" else Recompute.NONE,
                pipeline_layout=dict(counted_ends(layers, 0, pipeline))[chunks] if layers % (pipeline * chunks) else "",
                expert=int(row["ep"] or 1),
                expert_tensor=int(row["etp"] or 0),
            ),
            group=group,
        )
