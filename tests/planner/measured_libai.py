"""Batches of GPT and BERT, hidden size 1024, on one to four nodes of V100s by Megatron-LM, as the planner's types.

Oneflow-Inc/libai compares itself with Megatron-LM e156d2fea7 (file and commit are in the data; its own times are left
out), as measured in June and July 2022. How that was started is in Oneflow-Inc/OneAutoTest,
``libai/megatron/megatron_args_pretrain_gpt2.sh`` and ``_bert.sh``: fp16, the vocabularies of GPT-2 and of BERT in
Chinese (21,128), tied embeddings, dropout, and with tensor parallelism the inputs of layers that are kept for
recomputation spread over its ranks, which is not priced.

Assumed: V100-SXM2-32GB, as the page says V100 of the release before, and as its issue 475 repeats a row on one with 32
GB, 25,566 MiB of them allocated; nodes wired like AWS's p3dn.24xlarge, of four GPUs, too, with as fast a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Layout, Recompute
from megatron_2bw.planner.specs.model import Kind
from tests.planner.measured import DATA, OLD_MEGATRON, Row, gpt, read, sizes


def times(folder: Path = DATA) -> Iterator[Row]:
    """Seconds per batch, everything recomputed or nothing, 1F1B."""
    for row in read("libai_v100.csv", folder):
        layout = Layout(
            schedule="megatron",
            **sizes(row),
            recompute=Recompute(row["recompute"]),
            **OLD_MEGATRON,
        )
        gpus, node = int(row["gpus"]), CLUSTERS["p3dn.24xlarge"]
        group = f"{row['kind']}, {row['layers']} layers, {gpus} GPUs, B={layout.global_batch}"
        degrees = f"t={layout.tensor} w={layout.data} d={layout.pipeline} b={layout.microbatch}"
        yield Row(
            name=f"{row['kind']}, {gpus} GPUs, B={layout.global_batch}, {degrees}",
            group=group,
            model=replace(gpt(row), kind=Kind(row["kind"])),
            layout=layout,
            cluster=replace(node, gpus_per_node=min(gpus, 8), nodes=-(-gpus // 8)),
            measured=layout.global_batch / float(row["samples_per_s"]),
        )
