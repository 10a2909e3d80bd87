"""PipeDream-2BW's own planner: closed forms for time and memory, and an exhaustive search over them.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503v3), section 4 and
Appendix A. A model is a row of equal blocks, cut into d equal stages with w replicas each. With microbatches
of b samples and m = B/(w*b) of them in a batch of B, a stage needs for one microbatch

    max(c*Tcomp(b) + Tcomm(b), Treduce/m)        c = 4/3 with recompute, else 1

and a pipeline takes a new microbatch after that time; without pipelining, after d times as much. The model
has no flushes, embeddings, logits, uneven stages, tensor parallelism or optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_2bw.planner.errors import PlanError, check_count
from megatron_2bw.planner.multiples import divisors
from megatron_2bw.planner.papers.blocks import Blocks, compute_s, estimate, reduce_s, transfer_s
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.table import GIB

VERSIONS = {"inter-layer": 1, "gpipe": 1, "1f1b-flush": 1, "2bw": 2}
"""Copies of |W| per schedule, sections 3.1 and 3.2. 2BW itself needs two copies of the weights only; the formula
is kept as printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A configuration that fits, and what the model predicts for it."""

    schedule: str
    """``2bw``, or ``inter-layer`` where pipelining does not pay; with depth 1 that is data parallelism alone."""
    width: int
    depth: int
    microbatch: int
    recompute: bool
    microbatches: int
    """m per replica and batch: a multiple of the depth for ``2bw``."""
    samples_per_s: float
    memory_bytes: float

    @property
    def accumulation(self) -> int:
        """g: B = b*w*d*g, and B = b*w*g without pipelining."""
        return self.microbatches // (self.depth if self.schedule == "2bw" else 1)


def samples_per_s(
    blocks: Blocks,
    cluster: Cluster,
    *,
    schedule: str,
    width: int,
    depth: int,
    microbatch: int,
    microbatches: int,
    recompute: bool,
) -> float:
    """Throughput of all replicas, ``w*b/t`` (Appendix A.1.1), of ``2bw`` or ``inter-layer``.

    Raises:
        PlanError: another schedule; the model has no flushes.
    """
    if schedule not in ("2bw", "inter-layer"):
        raise PlanError(f"schedule {schedule!r}: the paper's cost model has no flushes; choose 2bw or inter-layer")
    busy_s = compute_s(blocks, depth=depth, microbatch=microbatch, recompute=recompute)
    busy_s += transfer_s(blocks, cluster, width=width, depth=depth, microbatch=microbatch)
    stage_s = max(busy_s, reduce_s(blocks, cluster, width=width, depth=depth) / microbatches)
    return width * microbatch / (stage_s * (depth if schedule == "inter-layer" else 1))


def memory_bytes(
    blocks: Blocks, *, schedule: str, depth: int, microbatch: int, microbatches: int, recompute: bool
) -> float:
    """Of one GPU: ``versions*|W|/d + stashes*|A_total(b)|/d + n*|A_input(b)|`` (section 3.1, Appendix A.1.2).

    n microbatches are in flight: d for ``2bw``, min(d, m) for ``1f1b-flush``, m for ``gpipe`` and 1 for
    ``inter-layer``. All n of them are stashed, or just one with recompute.

    Raises:
        PlanError: unknown schedule.

    >>> blocks = Blocks(
    ...     count=8, state_bytes=800, gradient_bytes=0, activation_bytes=80, boundary_bytes=1, start_s=0, sample_s=0
    ... )
    >>> for schedule in VERSIONS:
    ...     shape = {"schedule": schedule, "depth": 4, "microbatch": 2, "microbatches": 16}
    ...     print(schedule, *(memory_bytes(blocks, **shape, recompute=recompute) for recompute in (False, True)))
    inter-layer 242.0 242.0
    gpipe 872.0 272.0
    1f1b-flush 368.0 248.0
    2bw 568.0 448.0
    """
    if schedule not in VERSIONS:
        raise PlanError(f"schedule {schedule!r} has no formula in the paper; choose one of {', '.join(VERSIONS)}")
    in_flight = {
        "inter-layer": 1,
        "gpipe": microbatches,
        "1f1b-flush": min(depth, microbatches),
        "2bw": depth,
    }[schedule]
    stashes = 1 if recompute else in_flight
    per_stage = VERSIONS[schedule] * blocks.state_bytes + stashes * microbatch * blocks.activation_bytes
    return per_stage / depth + in_flight * microbatch * blocks.boundary_bytes


EXECUTIONS = (("inter-layer", False), ("2bw", False), ("2bw", True))
"""What Appendix A compares for each (w, d): schedule and recompute."""


def plan(
    model: Model,
    cluster: Cluster,
    global_batch: int,
    *,
    recompute: bool | None = None,
    blocks: Blocks | None = None,
) -> tuple[Plan, ...]:
    """Algorithm 1: the best execution of every (w, d) that fits, the fastest first.

    For each of ``EXECUTIONS`` the largest microbatch that fits is taken. A batch is exactly ``global_batch``
    samples: B = b*w*d*g with a whole g, and B = b*w*m without pipelining. Stages get equally many blocks.

    Args:
        global_batch: B, the largest one known to be safe.
        recompute: keep to executions with or without it.
        blocks: to plan with, in place of ``estimate(model, cluster.gpu)``.

    Raises:
        PlanError: a batch below 1, or nothing fits.

    >>> from megatron_2bw.planner.specs.cluster import CLUSTERS
    >>> model = Model(num_layers=32, hidden_size=2304, num_attention_heads=32, seq_length=512, vocab_size=50257)
    >>> best = plan(model, CLUSTERS["p3.16xlarge"], 256, recompute=True)[0]
    >>> best.schedule, best.width, best.depth, best.microbatch, best.accumulation
    ('2bw', 1, 8, 16, 2)
    """
    check_count("global_batch", global_batch, 1)
    blocks = blocks or estimate(model, cluster.gpu)
    executions = [execution for execution in EXECUTIONS if recompute in (None, execution[1])]
    found = []
    for width in range(1, cluster.gpus + 1):
        for depth in range(1, cluster.gpus // width + 1):
            if global_batch % width == 0 and blocks.count % depth == 0:
                fitting = [
                    fits
                    for schedule, recomputes in executions
                    if (fits := _search(blocks, cluster, global_batch, width, depth, schedule, recomputes))
                ]
                found.extend(sorted(fitting, key=_slowness)[:1])
    if not found:
        raise PlanError(_nothing_fits(model, blocks, cluster, global_batch, executions))
    return tuple(sorted(found, key=_slowness))


def _slowness(plan: Plan) -> float:
    return -plan.samples_per_s


def _search(
    blocks: Blocks, cluster: Cluster, global_batch: int, width: int, depth: int, schedule: str, recompute: bool
) -> Plan | None:
    """SEARCH of Algorithm 1 for one execution: its largest microbatch that fits."""
    per_microbatch = width * (depth if schedule == "2bw" else 1)
    if global_batch % per_microbatch:
        return None
    for microbatch in reversed(divisors(global_batch // per_microbatch)):
        shape = {
            "schedule": schedule,
            "depth": depth,
            "microbatch": microbatch,
            "microbatches": global_batch // (width * microbatch),
            "recompute": recompute,
        }
        needed_bytes = memory_bytes(blocks, **shape)
        if needed_bytes <= cluster.memory_bytes:
            speed = samples_per_s(blocks, cluster, width=width, **shape)
            return Plan(width=width, samples_per_s=speed, memory_bytes=needed_bytes, **shape)
    return None


def _nothing_fits(
    model: Model, blocks: Blocks, cluster: Cluster, global_batch: int, executions: list[tuple[str, bool]]
) -> str:
    needs = {
        depth: min(
            memory_bytes(blocks, schedule=name, depth=depth, microbatch=1, microbatches=depth, recompute=recomputes)
            for name, recomputes in executions
        )
        for depth in range(1, cluster.gpus + 1)
        if blocks.count % depth == 0
    }
    fitting = [depth for depth, needed_bytes in needs.items() if needed_bytes <= cluster.memory_bytes]
    if fitting:
        listed, nearest = ", ".join(map(str, fitting)), max(1, round(global_batch / fitting[0])) * fitting[0]
        return f"global_batch {global_batch} is no multiple of a depth that fits ({listed}): use {nearest}"
    depth = min(needs, key=lambda d: needs[d])
    return (
        f"model {model.name or 'as given'} does not fit on {cluster.gpus} x {cluster.gpu.name} "
        f"({cluster.gpu.memory_gb:g} GiB each): depth {depth} with a microbatch of 1 needs the least, "
        f"{needs[depth] / GIB:.1f} GiB; use more GPUs, larger ones, or a smaller model"
    )
