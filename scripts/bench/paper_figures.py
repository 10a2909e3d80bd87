"""Print the tables behind figures of the papers: speed-ups from the default cost model, others from closed forms.

    python scripts/bench/paper_figures.py [NAME ...]

NAME is one of decisions, speedups (also figures 6 and 10), figure-7 (with 11), figure-8, figure-9, figure-12
(PipeDream-2BW) and mixpipe; all of them by default. Each table states its configuration.

PipeDream-2BW (arXiv 2006.09503v3): servers are p3.16xlarge with 8 V100 of 16 GB each, models those of its
scripts, sequences 512 tokens. What depends on flushes, logits or tensor parallelism is not in its cost model.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from paper_speedups import INTER_LAYER, TENSOR, Choice, System

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.papers import mixpipe, paper
from megatron_2bw.planner.papers.blocks import Blocks, compute_s, estimate
from megatron_2bw.planner.specs.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.table import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of one figure and what they were computed for."""

    title: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    """None where a configuration does not fit or does not exist."""

    def __str__(self) -> str:
        cells = [self.columns, *(tuple(map(_cell, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [" | ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([self.title, self.setting, "", *lines])


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


GPT_1_3B, GPT_2_2B, GPT_3_8B, BERT_2_2B, BERT_3_8B = (
    MODELS[name] for name in ("gpt-1.3b", "gpt-2.2b", "gpt-3.8b", "bert-2.2b", "bert-3.8b")
)


def servers(count: int) -> Cluster:
    """``count`` p3.16xlarge."""
    return replace(CLUSTERS["p3.16xlarge"], nodes=count, name=f"{count} x p3.16xlarge")


def decisions() -> Table:
    """Section 5.2: what Algorithm 1 picks with recompute and the largest microbatch that fits."""

    def rows() -> Iterator[tuple[str | float | None, ...]]:
        for model in (GPT_2_2B, GPT_3_8B, BERT_2_2B, BERT_3_8B):
            for batch in (512, 2048):
                best = paper.plan(model, servers(8), batch, recompute=True)[0]
                shape = (best.depth, best.width, best.microbatch, best.accumulation)
                yield model.name, batch, *shape, best.samples_per_s, best.memory_bytes / GIB

    return Table(
        title="Section 5.2: configurations picked",
        setting="8 x p3.16xlarge, recompute, the largest b that fits, 18 bytes per parameter and version",
        columns=("model", "batch", "d", "w", "b", "g", "samples/s", "GiB"),
        rows=tuple(rows()),
    )


BATCHES = tuple(2**power for power in range(6, 12))
"""From 64 to 2,048 samples."""


def speedups() -> Table:
    """Section 5.2 and figures 6 and 10: 2BW over everything that the paper compares it with, by the default model."""

    def rows() -> Iterator[tuple[str | float | None, ...]]:
        for model, cluster, depth, tensor_ranks in (
            (GPT_2_2B, servers(1), 8, (8,)),
            (GPT_3_8B, servers(8), 16, (8, 16, 32)),
        ):
            own = System(name="2bw", model=model, cluster=cluster, pipeline=depth)
            others = [replace(own, name=name) for name in (INTER_LAYER, "gpipe", "1f1b-flush")]
            others += [replace(own, name=TENSOR, pipeline=1, tensor=ranks) for ranks in tensor_ranks]
            for other, batch in itertools.product(others, BATCHES):
                shape = (other.name, other.cluster.gpus, other.pipeline, other.data, other.tensor, batch)
                largest = own.largest(batch)
                same = other.with_microbatch(batch, largest.microbatch) if largest else None
                yield *shape, *_over(own.fastest(batch), other.fastest(batch)), *_over(largest, same)

    return Table(
        title="Section 5.2: 2BW's throughput over that of others",
        setting="GPT 2.2B on 1 and 3.8B on 8 x p3.16xlarge, fp16, recompute; the fastest b, and 2BW's largest",
        columns=("over", "GPUs", "d", "w", "t", "batch", "fastest b", "times", "2BW's b", "times with it"),
        rows=tuple(rows()),
    )


def _over(own: Choice | None, other: Choice | None) -> tuple[int | None, float | None]:
    """The other's microbatch, and how many times as fast one's own is."""
    return (other.microbatch, own.samples_per_s / other.samples_per_s) if own and other else (None, None)


def memory_by_system() -> Table:
    """Figures 7 and 11: memory of the systems on 8 GPUs, as far as section 3 gives a formula."""
    cluster = servers(1)

    def rows() -> Iterator[tuple[str | float | None, ...]]:
        for model in (GPT_2_2B, BERT_2_2B):
            for batch in (32, 64, 256):
                microbatch = paper.plan(model, cluster, batch, recompute=True)[0].microbatch
                shape = {"depth": 8, "microbatch": microbatch, "microbatches": batch // microbatch, "recompute": True}
                blocks = estimate(model, cluster.gpu)
                needs = (paper.memory_bytes(blocks, schedule=schedule, **shape) / GIB for schedule in paper.VERSIONS)
                yield model.name, batch, microbatch, *needs

    return Table(
        title="Figures 7 and 11: memory per GPU by system, GiB",
        setting="1 x p3.16xlarge, 8 stages, recompute, the largest b that fits with 2BW; blocks only, no logits",
        columns=("model", "batch", "b", *paper.VERSIONS),
        rows=tuple(rows()),
    )


FIGURE_8 = ((4, 1), (8, 1), (8, 32))
"""(d, b) of its curves."""


def throughput_by_batch() -> Table:
    """Figure 8: throughput of 2BW against the batch for three (d, b)."""
    cluster, blocks = servers(8), estimate(GPT_1_3B, servers(8).gpu)

    def speed(depth: int, microbatch: int, batch: int) -> float | None:
        width = cluster.gpus // depth
        if batch % (width * depth * microbatch):
            return None
        return paper.samples_per_s(
            blocks,
            cluster,
            schedule="2bw",
            width=width,
            depth=depth,
            microbatch=microbatch,
            microbatches=batch // (width * microbatch),
            recompute=True,
        )

    return Table(
        title="Figure 8: 2BW's samples/s against the batch by (d, b)",
        setting="GPT 1.3B, 8 x p3.16xlarge, recompute",
        columns=("batch", *(f"({depth}, {microbatch})" for depth, microbatch in FIGURE_8)),
        rows=tuple((batch, *(speed(*shape, batch) for shape in FIGURE_8)) for batch in BATCHES),
    )


def largest_models() -> Table:
    """Figure 9: billions of parameters that fit with 2BW on stages of 16 GB."""
    cluster, like = servers(8), MODELS["gpt-355m"]
    depths = (1, 2, 4, 8, 16, 32, 64)
    models = [largest_model(like, cluster, depth) for depth in depths]
    return Table(
        title="Figure 9: the largest model by depth",
        setting="8 x p3.16xlarge, 2BW, recompute, b = 1, hidden size 1024, 18 bytes per parameter and version",
        columns=("d", "layers", "billions"),
        rows=tuple((d, model.num_layers, model.parameters / 1e9) for d, model in zip(depths, models, strict=True)),
    )


def largest_model(like: Model, cluster: Cluster, depth: int) -> Model:
    """``like`` with as many layers as fit on ``depth`` stages with 2BW, recompute and microbatches of 1.

    Raises:
        PlanError: not even one layer per stage fits.
    """

    def of(layers: int) -> Model:
        return replace(like, num_layers=layers * depth)

    def needed_bytes(layers: int) -> float:
        shape = {"schedule": "2bw", "depth": depth, "microbatch": 1, "microbatches": depth, "recompute": True}
        return paper.memory_bytes(estimate(of(layers), cluster.gpu), **shape)

    one_bytes = needed_bytes(1)
    spare_bytes = cluster.memory_bytes - one_bytes
    if spare_bytes < 0:
        raise PlanError(f"hidden_size {like.hidden_size}: a layer per stage needs {one_bytes / GIB:.1f} GiB; go lower")
    return of(1 + int(spare_bytes // (needed_bytes(2) - one_bytes)))


def recompute_on_and_off() -> Table:
    """Figure 12: throughput of 2BW on 8 stages against the microbatch, with and without recompute."""
    cluster = servers(1)

    def speed(blocks: Blocks, microbatch: int, recompute: bool) -> float | None:
        shape = {"schedule": "2bw", "depth": 8, "microbatch": microbatch, "microbatches": 8, "recompute": recompute}
        if paper.memory_bytes(blocks, **shape) > cluster.memory_bytes:
            return None
        return paper.samples_per_s(blocks, cluster, width=1, **shape)

    def rows() -> Iterator[tuple[str | float | None, ...]]:
        for model in (GPT_1_3B, GPT_2_2B):
            blocks = estimate(model, cluster.gpu)
            for microbatch in (1, 2, 4, 8, 16):
                yield model.name, microbatch, speed(blocks, microbatch, True), speed(blocks, microbatch, False)

    return Table(
        title="Figure 12: 2BW's samples/s with and without recompute",
        setting="1 x p3.16xlarge, d = 8, w = 1, m = 8, 18 bytes per parameter and version; - does not fit",
        columns=("model", "b", "recompute", "none"),
        rows=tuple(rows()),
    )


BERT_48 = Model(
    num_layers=48,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=512,
    vocab_size=30522,
    tied=False,
    kind=Kind.BERT,
    name="Bert-48",
)
GPT_72 = replace(BERT_48, num_layers=72, vocab_size=50257, kind=Kind.GPT, name="GPT-72")
"""MixPipe's Table II has 669,933,442 and 1,010,477,056 parameters for them."""

_WEAK_SCALING: dict[str, dict[str, tuple[int, float]]] = {
    "Bert-48": {"gpipe": (4, 1.46), "gems": (16, 2.39), "1f1b-flush": (4, 1.34), "chimera": (16, 1.16)},
    "GPT-72": {"gpipe": (2, 1.38), "gems": (8, 2.25), "1f1b-flush": (2, 1.33), "chimera": (8, 1.12)},
}
"""Microbatch and published speed-up of MixPipe on 32 GPUs. GPT-72's microbatches are not published; they are taken to
be in the proportions of Bert-48's: what Table II's smallest batch gives per GPU, and a quarter of that, which makes 16
microbatches, for GPipe and DAPPLE; with a half, those would take 1.14 times as long as MixPipe."""


def mixpipe_speedups() -> Table:
    """MixPipe's weak scaling: time of a batch under other schedules over that under MixPipe, computation only."""
    cluster = replace(CLUSTERS["p3dn.24xlarge"], nodes=4)
    depth = 4

    def rows() -> Iterator[tuple[str | float | None, ...]]:
        for model, per_gpu in ((BERT_48, 16), (GPT_72, 8)):
            blocks = estimate(model, cluster.gpu)
            own = next(p for p in mixpipe.plan(model, cluster, per_gpu * cluster.gpus) if p.depth == depth)
            steps = mixpipe.steps(depth, own.injected, own.extra)
            own_s = float(steps) * compute_s(blocks, depth=depth, microbatch=own.microbatch)
            for schedule, (microbatch, published) in _WEAK_SCALING[model.name].items():
                other = _other(blocks, cluster, schedule, depth, microbatch, depth * per_gpu // microbatch)
                ratio = other[1] / own_s
                yield model.name, own.injected, own.extra, schedule, microbatch, other[0], ratio, published

    return Table(
        title="MixPipe: weak scaling, speed-up over other schedules",
        setting="32 V100 of 32 GB, D = 4, W = 8, N = D for MixPipe; 16-bit activations",
        columns=("model", "K", "Gamma", "over", "B", "recompute", "predicted", "published"),
        rows=tuple(rows()),
    )


def steps_of(schedule: str, depth: int, microbatches: int) -> Fraction:
    """Times of a stage per batch for what MixPipe is compared with, a backward taking two forwards.

    ``N+D-1`` for ``gpipe`` and ``1f1b-flush`` (DAPPLE), ``(N(2D+1) + D-1)/3`` for ``gems``, ``(5D-4)/3`` for
    ``chimera``, which has N = D.

    >>> [str(steps_of(schedule, 4, 4)) for schedule in ("gpipe", "1f1b-flush", "gems", "chimera")]
    ['7', '7', '13', '16/3']

    Raises:
        PlanError: an unknown schedule, or Chimera with N other than an even D.
    """
    if schedule in ("gpipe", "1f1b-flush"):
        return Fraction(microbatches + depth - 1)
    if schedule == "gems":
        return Fraction(microbatches * (2 * depth + 1) + depth - 1, 3)
    if schedule != "chimera":
        raise PlanError(f"schedule {schedule!r}: choose one of gpipe, 1f1b-flush, gems, chimera")
    if microbatches != depth:
        raise PlanError(f"microbatches {microbatches}: chimera is defined for as many as its depth; use {depth}")
    return mixpipe.steps(depth, depth, 0)


def _other(
    blocks: Blocks, cluster: Cluster, schedule: str, depth: int, microbatch: int, microbatches: int
) -> tuple[str, float]:
    """Whether ``schedule`` has to recompute, and its time per batch."""
    in_flight = {"gpipe": microbatches, "1f1b-flush": min(depth, microbatches), "gems": 1, "chimera": depth}[schedule]
    replicas = 2 if schedule in ("gems", "chimera") else 1
    stage_bytes = (replicas * blocks.state_bytes + in_flight * microbatch * blocks.activation_bytes) / depth
    recompute = stage_bytes > mixpipe.budget_bytes(cluster)
    stage_s = compute_s(blocks, depth=depth, microbatch=microbatch, recompute=recompute)
    return "yes" if recompute else "no", float(steps_of(schedule, depth, microbatches)) * stage_s


TABLES: dict[str, Callable[[], Table]] = {
    "decisions": decisions,
    "speedups": speedups,
    "figure-7": memory_by_system,
    "figure-8": throughput_by_batch,
    "figure-9": largest_models,
    "figure-12": recompute_on_and_off,
    "mixpipe": mixpipe_speedups,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the tables behind figures of the papers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(TABLES)} (default: all)")
    names = parser.parse_args(argv).names or list(TABLES)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; choose from {', '.join(TABLES)}")
    print("\n\n".join(str(TABLES[name]()) for name in names))


if __name__ == "__main__":
    main()
