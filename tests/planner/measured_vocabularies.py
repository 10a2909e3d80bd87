"""Batches of GPTs with vocabularies of 32,000 to 256,000 on pipelines alone, as the planner's types.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288), whose baselines are
Megatron-LM's 1F1B, with as many layers on every stage or fewer on the last; their own methods are left out. How many it
has is published of 8 GPUs alone (sail-sg/VocabularyParallelism, ``artifact/exp_one_host.csv``), so of 16 and 32 there
are rows with equal stages. Of the rest, that repository's ``pretrain_gpt.sh`` says: fp16, FlashAttention, an output
layer of its own, no dropout, a distributed optimizer. Assumed: A100-80GB, as the peak of 312 TFLOP/s in its scripts and
73 GiB in use say, with the network of the same authors' other runs (``measured.zero_bubble``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_2bw.planner.specs.layout import Layout, Precision
from megatron_2bw.planner.specs.model import Model
from tests.planner.measured import DATA, Row, a100s, gpt, read

TABLE_TFLOPS = 320
"""What the utilization of Table 5 is a share of: with it, all 16 rows of which seconds are published take these."""
NODE_GBIT_S = 800
"""Assumed."""


def times(folder: Path = DATA) -> Iterator[Row]:
    """Seconds per batch, by Table 5 where they are not published."""
    for row in read("vocabularies_a100.csv", folder):
        measured = float(row["iteration_time_ms"] or 0) / 1e3
        yield _row(row, measured or by_utilization_s(row))


def memory(folder: Path = DATA) -> Iterator[Row]:
    """Most bytes that torch had allocated, on the fullest stage."""
    for row in read("vocabularies_a100.csv", folder):
        yield _row(row, float(row["memory_gib"]) * 2**30)


def by_utilization_s(row: dict[str, str]) -> float:
    """Seconds per batch, by its share of the peak.

    ``3*(2*B*s*h*V + l*(24*B*s*h^2 + 4*B*s^2*h))`` FLOPs, those of the repository's ``artifact/quick_exp.sh``.
    """
    layers, hidden, seq_length, vocabulary, gpus, batch = (
        int(row[key]) for key in ("layers", "hidden", "seq_len", "vocab", "gpus", "gbs")
    )
    per_layer = 24 * hidden**2 + 4 * seq_length * hidden
    flops = 3 * batch * seq_length * (2 * hidden * vocabulary + layers * per_layer)
    return flops / gpus / (float(row["mfu_percent"]) / 100 * TABLE_TFLOPS * 1e12)


def _row(row: dict[str, str], measured: float) -> Row:
    stages, vocabulary = int(row["pp"]), int(row["vocab"])
    model: Model = replace(gpt(row), tied=False, dropout=False)
    layout = Layout(
        schedule="megatron",
        pipeline=stages,
        data=1,
        microbatch=int(row["mbs"]),
        global_batch=int(row["gbs"]),
        distributed_optimizer=True,
        precision=Precision(row["precision"]),
        pipeline_layout=row["pipeline_layout"],
    )
    group = f"d={stages} s={model.seq_length} V={vocabulary}"
    return Row(
        name=f"{group}{', fewer layers last' * bool(layout.pipeline_layout)}",
        group=group,
        model=model,
        layout=layout,
        cluster=a100s(int(row["gpus"]), NODE_GBIT_S),
        measured=measured,
    )
