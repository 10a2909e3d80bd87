"""Tables that leave out microbatch or chunks, as the planner's types: the fastest layouts that fit stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.specs.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.specs.layout import Layout, Recompute
from megatron_2bw.planner.specs.model import Model
from tests.planner import measured
from tests.planner.measured import Row


def sc21(folder: Path) -> Iterator[Row]:
    """Table 1 of arXiv 2104.04473, which leaves out microbatch and chunks: the fastest ones that fit."""
    for row in measured.read("megatron_sc21_table1.csv", folder):
        model, sizes = _of_table(row)
        best = _fastest(_on_selene(model, int(row["gbs"]), sizes, (1, 2, 4, 8, 16)))
        yield replace(
            best,
            name=f"{model.name}, b={best.layout.microbatch}, {best.layout.chunks} chunks",
            measured=float(row["iteration_time_s_derived"]),
        )


def sc21_table_2(folder: Path) -> Iterator[Row]:
    """Table 2's rows of PTD-P: 8 tensor-parallel ranks (section 5.2), the chunks with which it is fastest.

    Its TFLOP/s count the forward that is computed again: ``96*B*s*l*h^2*(1 + s/(6h) + V/(16*l*h))`` (section 5.1).
    """
    shapes = {"174.6": (96, 12288, 96), "529.6": (105, 20480, 128)}
    for row in measured.read("megatron_sc21_table2.csv", folder):
        if row["scheme"] != "PTD-P":
            continue
        layers, hidden, heads = shapes[row["params_b"]]
        model = Model(
            num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048, vocab_size=51200
        )
        of_replica, gpus, batch = int(row["model_parallel_size"]), int(row["gpus"]), int(row["gbs"])
        sizes = {"pipeline": of_replica // 8, "data": gpus // of_replica, "tensor": 8}
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / 6 / hidden + 51200 / 16 / layers / hidden)
        best = _fastest(_on_selene(model, batch, sizes, (int(row["mbs"]),)))
        yield replace(
            best,
            name=f"{row['params_b']}B, {gpus} GPUs, {best.layout.chunks} chunks",
            measured=flops / gpus / float(row["tflops_per_gpu"]) / 1e12,
        )


def mt_nlg(folder: Path) -> Iterator[Row]:
    """MT-NLG 530B on Selene by Megatron-DeepSpeed: 1F1B, everything recomputed."""
    for row in measured.read("mt_nlg.csv", folder):
        tensor, stages, gpus = int(row["tp"]), int(row["pp"]), int(row["gpus"])
        sizes = {"pipeline": stages, "data": gpus // (tensor * stages), "tensor": tensor}
        model, _ = _of_table({**row, "dp": str(sizes["data"])})
        rows = _on_selene(model, int(row["gbs"]), sizes, (int(row["mbs"]),))
        plain = next(found for found in rows if found.layout.chunks == 1)
        yield replace(plain, name=f"{model.name}, {gpus} GPUs", measured=float(row["iteration_time_s"]))


def h100s() -> Iterator[Row]:
    """Megatron-LM's table of H100s, which leaves out microbatch and chunks: the fastest ones that fit."""
    for row in measured.read("megatron_h100_weak_scaling.csv"):
        model, sizes = _of_table(row)
        gpus, batch = int(row["gpus"]), int(row["gbs"])
        options = {
            "sequence_parallel": sizes["tensor"] > 1,
            "distributed_optimizer": True,
            "overlap_gradients": True,
            "overlap_parameters": True,
            "waits_for_sends": False,
            "overlap_tensor": sizes["tensor"] > 1,
        }
        cluster = replace(CLUSTERS["dgx-h100"], nodes=gpus // 8)
        best = _fastest(_rows(model, cluster, _layouts(model, batch, sizes, (1, 2, 4), options)))
        flops = costs.model_flops(model, batch)
        yield replace(
            best,
            name=f"{model.name}, b={best.layout.microbatch}, {best.layout.chunks} chunks",
            measured=flops / gpus / float(row["tflops_per_gpu"]) / 1e12,
        )


def _of_table(row: dict[str, str]) -> tuple[Model, dict[str, int]]:
    """Model and degrees of parallelism of a row of Megatron's tables of models."""
    model = replace(measured.gpt(row), name=f"{row['params_b']}B")
    return model, {"pipeline": int(row["pp"]), "data": int(row["dp"]), "tensor": int(row["tp"])}


def _on_selene(model: Model, batch: int, sizes: dict[str, int], microbatches: Sequence[int]) -> Iterator[Row]:
    """Layouts on a part of it, with everything recomputed."""
    cluster = measured.a100s(sizes["pipeline"] * sizes["data"] * sizes["tensor"], measured.SELENE_GBIT_S)
    options = {"recompute": Recompute.FULL, **measured.OLD_MEGATRON}
    return _rows(model, cluster, _layouts(model, batch, sizes, microbatches, options))


def _rows(model: Model, cluster: Cluster, layouts: Iterable[Layout]) -> Iterator[Row]:
    return (Row(name="", group="", model=model, layout=layout, cluster=cluster, measured=0) for layout in layouts)


def _fastest(rows: Iterable[Row]) -> Row:
    """Of those that fit."""
    fitting = (row for row in rows if memory.largest(row.model, row.layout).total_bytes <= row.cluster.memory_bytes)
    return min(fitting, key=lambda row: costs.iteration(row.model, row.layout, row.cluster).time_s)


def _layouts(
    model: Model, batch: int, sizes: dict[str, int], microbatches: Sequence[int], options: dict[str, Any]
) -> Iterator[Layout]:
    """Megatron's, with every number of chunks."""
    stages = sizes["pipeline"]
    per_stage = model.num_layers // stages
    for microbatch in microbatches:
        for chunks in (n for n in range(1, per_stage + 1) if per_stage % n == 0 and (stages > 1 or n == 1)):
            try:
                layout = Layout(
                    schedule="megatron",
                    microbatch=microbatch,
                    global_batch=batch,
                    chunks=chunks,
                    **sizes,
                    **options,
                )
            except PlanError:
                continue
            if chunks == 1 or layout.microbatches % stages == 0:
                yield layout
