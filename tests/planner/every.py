"""A small model, and every layout of one, written down without the search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from megatron_2bw.planner.multiples import divisors
from megatron_2bw.planner.rules import TWO_BW, problem
from megatron_2bw.planner.specs.cluster import CLUSTERS, Cluster
from megatron_2bw.planner.specs.inputs import sized
from megatron_2bw.planner.specs.layout import Layout, Precision, Recompute, RecomputeMethod, RecomputeModule
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.space import Space

_DENSE_MODULES = (
    (RecomputeModule.CORE_ATTN,),
    (RecomputeModule.MLP,),
    (RecomputeModule.CORE_ATTN, RecomputeModule.MLP),
)
MODEL = Model(num_layers=8, hidden_size=1024, num_attention_heads=16, seq_length=1024, vocab_size=50257)


def equal(**limits: Any) -> Space:
    """A Space with these limits and no other than stages of equally many layers."""
    return Space(first_stage_layers=(0,), last_stage_layers=(0,), **limits)


def fastest_by_schedule(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The least seconds of every schedule, of pairs of both."""
    fastest: dict[str, float] = {}
    for schedule, time_s in times:
        fastest[schedule] = min(time_s, fastest.get(schedule, math.inf))
    # With one chunk, Megatron's schedule is 1f1b-flush, which stands for it.
    fastest["megatron"] = min(fastest.get("megatron", math.inf), fastest.get("1f1b-flush", math.inf))
    return fastest


def cluster(gpus: int, memory_gb: float, base: str = "dgx-a100") -> Cluster:
    whole = sized(CLUSTERS[base], gpus=gpus)
    return dataclasses.replace(whole, gpu=dataclasses.replace(whole.gpu, memory_gb=memory_gb))


def counting_ends(layers: int, pipeline: int) -> list[str]:
    """What several chunks per stage hold if each has as much, embedding and loss being as much as a layer."""
    all_of_model = "E" + "t" * layers + "L"
    spreads = []
    for chunks in range(2, layers + 1):
        size, left = divmod(len(all_of_model), pipeline * chunks)
        if pipeline > 1 and size and not left:
            spreads.append("|".join(all_of_model[at : at + size] for at in range(0, len(all_of_model), size)))
    return spreads


def every_layout(
    model: Model,
    machine: Cluster,
    batch: int,
    *,
    ends: Callable[[Layout], Collection[tuple[int, int]]] = lambda layout: [(0, 0)],
    pipelines: Collection[int] | None = None,
    ordinary: Collection[str] = ("2bw", "1f1b-flush", "gpipe"),
) -> Iterator[Layout]:
    """All that run, of all depths or these.

    ``ends`` says how many layers the first and the last stage may have, of the size and the microbatch of a layout.
    ``ordinary`` are the schedules beside Megatron's own.
    """
    gpus, has_bf16 = machine.gpus, machine.gpu.has_bf16
    recomputes = [
        {"recompute": Recompute.NONE},
        *({"recompute": Recompute.SELECTIVE, "recompute_modules": modules} for modules in _DENSE_MODULES),
        *(
            {"recompute": Recompute.FULL, "recompute_method": method, "recompute_layers": layers}
            for method, layers in itertools.product(RecomputeMethod, range(1, model.num_layers + 1))
        ),
    ]
    schedules = [(name, 1, "") for name in ordinary]
    schedules += [("megatron", chunks, "") for chunks in range(1, model.num_layers + 1)]
    for pipeline, tensor in itertools.product(pipelines or range(1, gpus + 1), range(1, machine.gpus_per_node + 1)):
        if gpus % (pipeline * tensor) or batch % (gpus // (pipeline * tensor)):
            continue
        data = gpus // (pipeline * tensor)
        for microbatch in divisors(batch // data):
            plain = Layout(
                schedule="megatron",
                pipeline=pipeline,
                tensor=tensor,
                data=data,
                microbatch=microbatch,
                global_batch=batch,
                precision=Precision.BF16 if has_bf16 else Precision.FP16,
                fused_attention=has_bf16,
            )
            pairs = list(ends(plain))
            for (
                (first, last),
                (schedule, chunks, spread),
                recomputed,
                sequence,
                distributed,
                buffers,
                extra,
            ) in itertools.product(
                pairs,
                schedules + [("megatron", 1, spread) for spread in counting_ends(model.num_layers, pipeline)],
                recomputes,
                *((False, True), (False, True), (1, 2), (0, 1)),
            ):
                if (schedule not in TWO_BW and (buffers == 1 or extra == 1)) or (spread and (first, last) != pairs[0]):
                    continue
                layout = plain.but(
                    schedule=schedule,
                    first_stage_layers=0 if spread else first,
                    last_stage_layers=0 if spread else last,
                    chunks=chunks,
                    pipeline_layout=spread,
                    **recomputed,
                    sequence_parallel=sequence,
                    distributed_optimizer=distributed,
                    overlap_gradients=data > 1 and schedule not in TWO_BW,
                    overlap_parameters=distributed
                    and schedule not in TWO_BW
                    and (pipeline == 1 or chunks > 1 or bool(spread)),
                    gradient_buffers=buffers,
                    extra_in_flight=extra,
                )
                if problem(model, layout) is None and (schedule not in TWO_BW or layout.microbatches >= pipeline):
                    yield layout
