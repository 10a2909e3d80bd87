"""The search finds what pricing every single layout finds, and says why layouts are out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from functools import cache
from typing import Any

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.naming import chosen, name, within
from megatron_2bw.planner.papers import mixpipe
from megatron_2bw.planner.report.report import compared
from megatron_2bw.planner.rules import TWO_BW, problem
from megatron_2bw.planner.search.candidates import Candidates
from megatron_2bw.planner.search.efficiency import Progress
from megatron_2bw.planner.search.finder import Finder, first_of_kinds
from megatron_2bw.planner.search.search import Plan, search
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.inputs import sized
from megatron_2bw.planner.specs.layout import Layout, Precision, Receives, Recompute, RecomputeMethod, RecomputeModule
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.space import Space, field_of
from tests.planner.every import MODEL, cluster, equal, every_layout, fastest_by_schedule

CASES = {
    "roomy": (cluster(4, 80), 8),
    "narrow": (cluster(4, 5), 8),
    "tight": (cluster(4, 3.2), 8),
    "v100": (cluster(4, 4, "p3.16xlarge"), 8),
    "two nodes": (dataclasses.replace(cluster(2, 4), nodes=2), 6),
}


@cache
def priced(case: str) -> tuple[tuple[Layout, float, float], ...]:
    """(layout, time in seconds, bytes) of every layout."""
    machine, batch = CASES[case]
    return tuple(
        (layout, costs.iteration(MODEL, layout, machine).time_s, memory.largest(MODEL, layout).total_bytes)
        for layout in every_layout(MODEL, machine, batch)
    )


SPACES = {
    "all": equal(),
    "no sequence parallelism": equal(sequence_parallel=(False,)),
    "no distributed optimizer": equal(distributed_optimizer=(False,)),
    "one gradient buffer": equal(gradient_buffers=(1,)),
    "none extra in flight": equal(extra_in_flight=(0,)),
    "uniform": equal(recomputes=(Recompute.FULL,), recompute_methods=(RecomputeMethod.UNIFORM,)),
    "block": equal(recomputes=(Recompute.FULL,), recompute_methods=(RecomputeMethod.BLOCK,)),
    "one sample": equal(microbatches=(1,)),
    "two stages": equal(pipelines=(2,)),
}
"""Of equally many layers each; ``test_ends.py`` has others."""


def within_limits(layout: Layout, space: Space) -> bool:
    of_2bw = {"gradient_buffers": layout.gradient_buffers, "extra_in_flight": layout.extra_in_flight}
    pairs = {
        **(of_2bw if layout.schedule in TWO_BW else {}),
        "sequence_parallel": layout.sequence_parallel,
        "distributed_optimizer": layout.distributed_optimizer,
        "recomputes": layout.recompute,
        "recompute_methods": layout.recompute_method,
        "microbatches": layout.microbatch,
        "pipelines": layout.pipeline,
    }
    is_allowed = all(space.allows(dimension, (value,)) for dimension, value in pairs.items())
    return is_allowed and not (layout.pipeline_layout and space.has_ends)


@cache
def flush_s(case: str, delayed: Layout) -> float:
    """Seconds of a batch of 1f1b-flush on the stages of 2bw, whose gradients nothing overlaps."""
    flushed = dataclasses.replace(delayed, schedule="1f1b-flush", gradient_buffers=2, extra_in_flight=0)
    assert not flushed.overlap_gradients
    return costs.iteration(MODEL, flushed, CASES[case][0]).time_s


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("efficiency", "synchronous"), [(1.0, 0.0), pytest.param(0.8, 0.0, marks=pytest.mark.slow), (0.9, 0.3)]
)
def test_nothing_beats_the_best(case: str, efficiency: float, synchronous: float, space: str):
    machine, batch = CASES[case]

    def loss_time_s(layout: Layout, time_s: float) -> float:
        if layout.schedule not in TWO_BW:
            return time_s
        first_s = flush_s(case, layout) if synchronous else 0.0
        return (synchronous * first_s + (1 - synchronous) * time_s) / efficiency

    best = [
        (layout.schedule, loss_time_s(layout, time_s))
        for layout, time_s, needed in priced(case)
        if needed <= machine.memory_bytes and within_limits(layout, SPACES[space])
    ]
    if not best:
        with pytest.raises(PlanError):
            search(MODEL, machine, batch, SPACES[space])
        return
    progress = Progress(efficiency=efficiency, synchronous=synchronous)
    choices = search(MODEL, machine, batch, SPACES[space], progress=progress).choices
    ours = fastest_by_schedule((choice.layout.schedule, choice.loss_time_s) for choice in choices)
    assert ours == pytest.approx(fastest_by_schedule(best), rel=1e-12)


@pytest.mark.parametrize("batch", [8, 24])
@pytest.mark.parametrize("memory_gb", [80, 5])
@pytest.mark.parametrize("schedule", ["gems", "chimera", "mixpipe"])
def test_nothing_beats_the_best_of_those_in_both_directions(schedule: str, memory_gb: float, batch: int):
    """Of all layouts that the search knows, priced one by one."""
    machine, space = cluster(8, memory_gb), equal(schedules=(schedule,))
    candidates = Candidates(model=MODEL, cluster=machine, global_batch=batch, space=space)
    times_s = [
        costs.iteration(MODEL, layout, machine).time_s
        for base in candidates.bases()
        for layout in candidates.layouts(base)
        if memory.largest(MODEL, layout).total_bytes <= machine.memory_bytes
    ]
    assert len(times_s) > 20
    best = search(MODEL, machine, batch, space, keep=1).best
    assert best.iteration.time_s == pytest.approx(min(times_s), rel=1e-12)


@pytest.mark.parametrize(("case", "share"), [("narrow", 0.5), ("v100", 0.5), ("far", 0.35)])
def test_nothing_beats_the_best_with_some_delayed_microbatches(case: str, share: float):
    """Of every number that the share allows; the fewest of those that take as long.

    With early receives: late, a batch is shorter by some transfers where the update comes just so.
    """
    machine = cluster(4, 80, "p3.16xlarge") if case == "far" else CASES[case][0]
    machine = dataclasses.replace(machine, nodes=4, gpus_per_node=1) if case == "far" else machine
    batch, best = 40, (math.inf, 0)
    for layout in every_layout(MODEL, machine, batch):
        if layout.schedule != "2bw" or layout.recompute is not Recompute.NONE:
            continue
        for count in range((1 + layout.extra_in_flight) * (layout.pipeline - 1), layout.microbatches):
            if round(100 * share) * layout.microbatches >= 100 * count:
                partly = dataclasses.replace(layout, delayed_microbatches=count, receives=Receives.EARLY)
                if memory.largest(MODEL, partly).total_bytes <= machine.memory_bytes:
                    time_s = costs.iteration(MODEL, partly, machine).time_s
                    best = min(best, (time_s * (1 - 1e-9 if time_s > best[0] else 1), count))
    space = equal(recomputes=(Recompute.NONE,), receives=Receives.EARLY)
    plan = search(MODEL, machine, batch, space, progress=Progress(efficiency=0.95, delayed=share))
    found = plan.best_of(delayed=True)
    assert found.loss_time_s == pytest.approx(best[0] / 0.95, rel=1e-6)
    layout = found.layout
    assert 0 < layout.delayed_microbatches <= share * layout.microbatches * (1 + 1e-9)
    if layout.delayed_microbatches > (1 + layout.extra_in_flight) * (layout.pipeline - 1):
        fewer = dataclasses.replace(layout, delayed_microbatches=layout.delayed_microbatches - 1)
        assert costs.iteration(MODEL, fewer, machine).time_s > found.iteration.time_s
    again = search(MODEL, machine, batch, within(equal(receives=Receives.EARLY), name(layout)), keep=1).best
    assert (again.layout, again.iteration) == (layout, found.iteration)


def test_delayed_microbatches_that_are_asked_for():
    """Other schedules are still compared with."""
    only = Space(schedules=("2bw", "gpipe", "mixpipe"), pipelines=(4,), microbatches=(1,), extra_in_flight=(0,))
    for count in (3, 5, 7):
        plan = best(dataclasses.replace(only, delayed_microbatches=(count,)))
        assert {(c.layout.schedule, c.layout.delayed_microbatches) for c in plan.choices} == {
            ("2bw", count),
            ("gpipe", 0),
            ("mixpipe", 0),
        }
    only = dataclasses.replace(only, schedules=("2bw",))
    for count, progress, message in (
        (2, Progress(), "delayed_microbatches 2: the first of 4 stages runs 3 ahead; use 3, or leave it out"),
        (8, Progress(), "delayed_microbatches 8: a batch has 8 microbatches; leave it out"),
        (5, Progress(delayed=0.5), "delayed_microbatches 5: more than 0.5 of 8; use 4"),
        (0, Progress(delayed=0.5), "delayed_microbatches 8: more than 0.5 of 8; use 4"),
        (
            3,
            Progress(delayed=0.3),
            "2bw delays at least 3 of them on 4 stages, more than 0.3 of a batch; raise global_batch to 10",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            best(dataclasses.replace(only, delayed_microbatches=(count,)), progress=progress)
    exact = dataclasses.replace(only, delayed_microbatches=(21,))
    assert best(exact, batch=60, progress=Progress(delayed=0.35)).best.layout.delayed_microbatches == 21


@pytest.mark.parametrize("case", CASES)
def test_as_little_memory_as_possible_is_found(case: str):
    machine, batch = CASES[case]
    least = min(needed for _, _, needed in priced(case))

    def with_memory(size_bytes: float) -> Plan:
        gpu = dataclasses.replace(machine.gpu, memory_gb=size_bytes / 2**30)
        return search(MODEL, dataclasses.replace(machine, gpu=gpu), batch, equal())

    assert with_memory(least * (1 + 1e-9)).best.memory.total_bytes == least
    with pytest.raises(PlanError, match="fits: "):
        with_memory(least * (1 - 1e-6))


@pytest.mark.parametrize("case", CASES)
def test_what_is_returned_runs_and_fits(case: str):
    machine, batch = CASES[case]
    plan = search(MODEL, machine, batch)
    times = [choice.loss_time_s for choice in plan.choices]
    assert times == sorted(times)
    for choice in plan.choices:
        layout = choice.layout
        assert problem(MODEL, layout) is None
        assert (layout.gpus, layout.global_batch) == (machine.gpus, batch)
        assert layout.microbatch * layout.data * layout.microbatches == batch
        assert layout.schedule not in TWO_BW or layout.microbatches >= layout.pipeline
        fullest = max(memory.stages(MODEL, layout), key=lambda stage: stage.total_bytes)
        assert fullest == choice.memory
        assert choice.headroom_bytes == machine.memory_bytes - fullest.total_bytes >= 0
    assert len({choice.layout for choice in plan.choices}) == len(plan.choices)


def best(space: Space | None = None, batch: int = 8, **more: Any) -> Plan:
    return search(MODEL, cluster(4, 80), batch, space, **more)


def test_limits_are_kept():
    assert {choice.layout.schedule for choice in best(Space(schedules=("gpipe",))).choices} == {"gpipe"}
    assert {choice.layout.tensor for choice in best(Space(tensors=(2,))).choices} == {2}
    assert {
        choice.layout.sequence_parallel for choice in best(Space(tensors=(2,), sequence_parallel=(False,))).choices
    } == {False}
    full = best(Space(recomputes=(Recompute.FULL,), recompute_layers=(2,))).choices
    assert {(choice.layout.recompute, choice.layout.recompute_layers) for choice in full} == {(Recompute.FULL, 2)}
    single = best(Space(precision=Precision.FP32)).best.layout
    assert (single.precision, single.fused_attention) == (Precision.FP32, False)
    with pytest.raises(PlanError, match="has no such kernels in fp32; use attention_backend unfused"):
        best(Space(precision=Precision.FP32, fused_attention=True))
    plain = best(Space(schedules=("megatron",), pipelines=(2,), chunks=(1,))).best.layout
    assert (plain.schedule, plain.pipeline, plain.chunks) == ("megatron", 2, 1)


def test_2bw_needs_d_microbatches_unless_asked_for_fewer():
    only = Space(schedules=("2bw",), pipelines=(4,), microbatches=(1,), extra_in_flight=(0,))
    with pytest.raises(PlanError, match="microbatches 3: 2bw needs at least 4 on 4 stages; raise global_batch to 4"):
        best(only, batch=3)
    assert best(dataclasses.replace(only, tight=True), batch=3).best.layout.microbatches == 3


def test_efficiency_turns_the_choice():
    machine, batch = cluster(8, 80), 16
    halves = (Progress(efficiency=value) for value in (1.0, 0.5))
    eager, careful = (search(MODELS["gpt-7.5b"], machine, batch, progress=progress) for progress in halves)
    delayed = careful.best_of(delayed=True)
    assert careful.best.layout.schedule not in TWO_BW
    assert delayed.loss_time_s == pytest.approx(2 * delayed.iteration.time_s)
    assert eager.best_of(delayed=True).loss_time_s == eager.best_of(delayed=True).iteration.time_s


def test_pipedream_pays_for_a_beginning_that_it_gains_by():
    layout = Layout(schedule="pipedream", pipeline=2, data=2, microbatch=2, global_batch=4)
    machine = cluster(4, 80)
    alone, begun = (
        Progress(efficiency=0.5, synchronous=share).loss_time_s(MODEL, layout, machine, 1.0) for share in (0.0, 0.5)
    )
    flush = dataclasses.replace(layout, schedule="1f1b-flush")
    flush_s = costs.iteration(MODEL, flush, machine).time_s
    assert (alone, begun) == pytest.approx((2.0, 1.0 + flush_s))


def test_rules_are_counted_with_an_example():
    plan = search(MODEL, cluster(6, 3), 24)
    rules = {rejection.rule: rejection for rejection in plan.rejected}
    odd = "stages have equally many layers, but for the ends"
    assert "pipeline 6 does not divide num_layers 8" in rules[odd].reason
    assert "tensor 3 does not divide num_attention_heads 16" in " ".join(r.reason for r in plan.rejected)
    assert "GiB of 3 on its fullest stage" in rules["memory"].reason
    assert all(rejection.count >= 1 and rejection.example for rejection in plan.rejected)
    assert plan.layouts > sum(rejection.count for rejection in plan.rejected)


def test_a_model_that_is_too_large_names_what_would_do():
    with pytest.raises(PlanError) as refusal:
        search(MODELS["gpt-39b"], sized(CLUSTERS["dgx-a100"], gpus=4), 16)
    message = str(refusal.value)
    assert "no layout of 39.1B parameters on 4 GPUs fits" in message
    enough = int(message.split("; use ")[1].removesuffix(" GPUs"))
    assert search(MODELS["gpt-39b"], sized(CLUSTERS["dgx-a100"], gpus=enough), 16).choices
    with pytest.raises(PlanError):
        search(MODELS["gpt-39b"], sized(CLUSTERS["dgx-a100"], gpus=enough // 2), 16)


@pytest.mark.parametrize(
    ("model", "machine", "gpus", "batch", "space", "remedy"),
    [
        ("gpt-76b", "dgx-a100", 5, 64, Space(schedules=("megatron",)), "use 24 GPUs"),
        ("gpt-1t", "dgx-h100", 16, 1536, None, "use 256 GPUs"),
        ("gpt-1t", "dgx-a100", 248, 512, None, "use 256 GPUs"),
        ("llama3-405b", "dgx-h100", 64, 64, None, "use 96 GPUs"),
        ("llama3-405b", "dgx-h100", 8, 2048, None, "use 96 GPUs"),
        ("gpt-76b", "dgx-a100", 8, 1, Space(pipelines=(1,), tensors=(8,)), "use 48 GPUs and a global_batch of 6"),
        ("gpt-1t", "dgx-a100", 8, 8, Space(pipelines=(1,), widths=(1,)), "use GPUs with 2117 GiB"),
        (
            "gpt-1t",
            "dgx-a100",
            8,
            8,
            Space(schedules=("2bw",), pipelines=(2,), tensors=(4,), widths=(1,)),
            "use GPUs with 2651 GiB",
        ),
    ],
)
def test_what_is_said_to_be_enough_is(
    model: str, machine: str, gpus: int, batch: int, space: Space | None, remedy: str
):
    node = CLUSTERS[machine]
    with pytest.raises(PlanError) as refusal:
        search(MODELS[model], sized(node, gpus=gpus), batch, space)
    assert str(refusal.value).endswith(f"; {remedy}")
    numbers = [int(number) for number in re.findall(r"\d+", remedy)]
    if "GiB" in remedy:
        node = dataclasses.replace(node, gpu=dataclasses.replace(node.gpu, memory_gb=numbers[0]))
        assert search(MODELS[model], node, batch, space).choices
    else:
        assert search(MODELS[model], sized(node, gpus=numbers[0]), numbers[1] if numbers[1:] else batch, space).choices


def test_a_batch_that_does_not_split_where_nothing_fits_either():
    """Nor do more GPUs help, of which these limits use most as replicas."""
    machine, space = sized(CLUSTERS["dgx-h100"], gpus=40), Space(pipelines=(2,))
    with pytest.raises(PlanError) as refusal:
        search(MODELS["llama3-405b"], machine, 7, space)
    message = str(refusal.value)
    assert "global_batch 7 does not split over any possible number of replicas (5, 10, 20), and none with " in message
    batch, enough = re.search(r"; with a global_batch of (\d+), use GPUs with (\d+) GiB$", message).groups()
    larger = dataclasses.replace(machine, gpu=dataclasses.replace(machine.gpu, memory_gb=int(enough)))
    assert search(MODELS["llama3-405b"], larger, int(batch), space).choices


def test_a_batch_that_does_not_split_is_replaced_by_one_that_has_a_layout():
    """All 5 GPUs as replicas would need no other than 255, but 2bw a pipeline."""
    few = dataclasses.replace(MODEL, num_layers=4)
    with pytest.raises(
        PlanError, match=r"global_batch 256 does not split over any possible number of replicas \(5\); use 255"
    ):
        search(few, cluster(5, 80), 256)
    with pytest.raises(PlanError, match=r"does not split over any possible number of replicas \(5\); use 8 GPUs$"):
        search(few, cluster(5, 80), 256, Space(schedules=("2bw",)))


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "space", "message"),
    [
        (dataclasses.replace(MODEL, num_layers=10**11), 4, 8, None, "the search handles at most 10000"),
        (MODEL, 4, 0, None, "global_batch 0: give a whole number of at least 1"),
        (
            dataclasses.replace(MODEL, num_layers=6),
            7,
            100,
            None,
            "global_batch 100 does not split over any possible number of replicas (7); use 98",
        ),
        (
            dataclasses.replace(MODEL, num_layers=3),
            4,
            8,
            Space(pipelines=(4,)),
            "pipeline 4 does not divide num_layers 3; use pipeline 2",
        ),
        (
            dataclasses.replace(MODEL, hidden_size=1000, num_attention_heads=10, num_query_groups=10, kv_channels=100),
            8,
            64,
            Space(tensors=(8,)),
            "tensor 8 does not divide num_attention_heads 10; use tensor 2",
        ),
        (
            dataclasses.replace(MODEL, num_layers=24, ffn_hidden_size=7),
            8,
            7,
            Space(microbatches=(6,), last_stage_layers=(5,)),
            "global_batch 7 does not split over any possible number of replicas (4); use 24",
        ),
    ],
)
def test_nonsense(model: Model, gpus: int, batch: int, space: Space | None, message: str):
    with pytest.raises(PlanError) as refusal:
        search(model, cluster(gpus, 80), batch, space)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("space", "message", "field", "value"),
    [
        (Space(pipelines=(3,)), "pipeline 3 does not divide 4 GPUs", "pipelines", 2),
        (Space(pipelines=(0,)), "pipeline 0 is no count", "pipelines", 1),
        (Space(tensors=(8,)), "tensor 8 does not divide the 4 GPUs of a stage", "tensors", 4),
        (Space(pipelines=(4,), tensors=(2,)), "tensor 2 does not divide the 1 GPUs of a stage", "tensors", 1),
        (Space(pipelines=(2,), widths=(4,)), "data 4: a stage has 2 GPUs, 1 per replica", "widths", 2),
        (Space(microbatches=(3,)), "global_batch 8 is no multiple of microbatch 3 x data 4", "microbatches", 2),
        (Space(chunks=(3,)), "chunks 3 does not divide the 4 layers of a stage", "chunks", 2),
        (Space(schedules=("2bw",), chunks=(2,)), "chunks 2: 2bw does not interleave", "chunks", 1),
        (
            Space(tensors=(1,), sequence_parallel=(True,)),
            "sequence_parallel needs tensor above 1",
            "sequence_parallel",
            False,
        ),
        (
            Space(recomputes=(Recompute.FULL,), recompute_layers=(40,)),
            "recompute_layers 40: a stage has 8 layers",
            "recompute_layers",
            8,
        ),
        (
            Space(schedules=("2bw",), gradient_buffers=(3,)),
            "gradient_buffers 3: there are 1 or 2",
            "gradient_buffers",
            2,
        ),
        (
            Space(schedules=("2bw",), pipelines=(2,), extra_in_flight=(9,)),
            "extra_in_flight 9: above 3, transfers would wait for each other",
            "extra_in_flight",
            3,
        ),
        (
            Space(schedules=("2bw",), pipelines=(4,), extra_in_flight=(9, 7)),
            "extra_in_flight 7: above 3, transfers would wait for each other",
            "extra_in_flight",
            1,
        ),
        (
            Space(schedules=("mixpipe",), pipelines=(4,), mixpipe_k=(3,)),
            "mixpipe_k 3: an even number up to pipeline 4",
            "mixpipe_k",
            2,
        ),
    ],
    ids=str,
)
def test_a_limit_that_leaves_nothing_is_named_with_the_nearest_that_does(
    space: Space, message: str, field: str, value: object
):
    with pytest.raises(PlanError) as refusal:
        best(space)
    assert f": {message}; use {field_of(field)} {value}" in str(refusal.value)
    assert best(dataclasses.replace(space, **{field: (value,)})).choices


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "space", "message", "remedy", "enough"),
    [
        (
            "llama3-70b",
            4,
            64,
            Space(tensors=(8,)),
            "tensor 8 does not divide the 4 GPUs of a stage, and none with tensor 4 fits: megatron:d1,t4,",
            "use 16 GPUs",
            {},
        ),
        (
            "mixtral-8x7b",
            4,
            64,
            Space(microbatches=(5,)),
            "global_batch 64 is no multiple of microbatch 5 x data 4, and none with microbatch 4 fits: megatron:d1,t4,",
            "with microbatch 4, use 16 GPUs",
            {"microbatches": (4,)},
        ),
        (
            "mixtral-8x7b",
            1,
            16,
            Space(chunks=(3,)),
            "chunks 3 need pipeline of at least 2, and none with chunks 1 fits: megatron:d1,t1,",
            "with chunks 1, use 16 GPUs",
            {"chunks": (1,)},
        ),
        (
            "llama3-70b",
            2,
            16,
            Space(gradient_buffers=(6,)),
            "gradient_buffers 6: there are 1 or 2, and none with gradient_buffers 2 fits: megatron:d1,t2,",
            "with gradient_buffers 2, use 16 GPUs",
            {"gradient_buffers": (2,)},
        ),
        (
            "mixtral-8x7b",
            1,
            16,
            Space(schedules=("gpipe",)),
            "pipeline 1: gpipe needs at least 2, and none with schedule megatron fits: megatron:d1,t1,",
            "use 16 GPUs",
            {},
        ),
        (
            "mixtral-8x7b",
            4,
            7,
            Space(chunks=(8,)),
            "microbatches 7: interleaving needs a multiple of pipeline 2, and none without limits fits: ",
            "use 16 GPUs and a global_batch of 28",
            {},
        ),
        (
            "llama3-70b",
            4,
            64,
            Space(tensors=(8,), microbatches=(5,)),
            "tensor 8 and the other limits leave none, and none without limits fits: megatron:d1,t4,",
            "without limits, use 16 GPUs",
            {"tensors": None, "microbatches": None},
        ),
    ],
)
def test_a_limit_is_named_before_memory_where_both_leave_nothing(
    model: str,
    gpus: int,
    batch: int,
    space: Space,
    message: str,
    remedy: str,
    enough: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    others, of_other = [], Finder.of_other
    monkeypatch.setattr(Finder, "of_other", lambda finder, **changes: others.append(1) or of_other(finder, **changes))
    with pytest.raises(PlanError) as refusal:
        search(MODELS[model], sized(CLUSTERS["dgx-h100"], gpus=gpus), batch, space)
    assert f" GPUs: {message}" in str(refusal.value)
    assert str(refusal.value).endswith(f"; {remedy}")
    assert len(others) < 40, "all numbers of nodes were tried with limits that none of them helps"
    gpus, size = re.search(r"(\d+) GPUs(?: and a global_batch of (\d+))?$", remedy).groups()
    machine, space = sized(CLUSTERS["dgx-h100"], gpus=int(gpus)), dataclasses.replace(space, **enough)
    assert search(MODELS[model], machine, int(size or batch), space).choices


def test_a_schedule_that_these_stages_have_none_of_is_replaced():
    with pytest.raises(PlanError) as refusal:
        search(MODEL, cluster(3, 80), 3, Space(schedules=("chimera",)))
    remedy = str(refusal.value).split("; use schedule ")[1]
    assert search(MODEL, cluster(3, 80), 3, Space(schedules=(remedy,))).choices


@pytest.mark.parametrize(
    ("gpus", "space", "nearest"),
    [
        (2, {}, "mixpipe_k 3: an even number up to pipeline 2; use mixpipe_k 2"),
        (2, {"pipelines": (2,), "mixpipe_k": (7, 3)}, "use mixpipe_k 2"),
        (1, {}, "mixpipe_k 3: it is even; and with mixpipe_k 2, "),
    ],
)
def test_an_odd_k_is_answered_with_one_that_a_user_can_give(gpus: int, space: dict, nearest: str):
    """The depth, which a layout has as 0, is one."""
    node, limits = (
        sized(CLUSTERS["dgx-h100"], gpus=gpus),
        Space(**{"schedules": ("mixpipe",), "mixpipe_k": (3,), **space}),
    )
    with pytest.raises(PlanError, match=re.escape(nearest)):
        search(MODELS["gpt-2.2b"], node, 8, limits)
    if gpus > 1:
        assert search(MODELS["gpt-2.2b"], node, 8, dataclasses.replace(limits, mixpipe_k=(2,))).choices


def test_recomputing_what_saves_nothing_is_named():
    """No set of modules of a GPT with biases and fused attention does."""
    biased = MODELS["gpt-2.2b"]
    with pytest.raises(PlanError, match=r": recompute selective saves no memory; use recompute none$"):
        search(biased, cluster(4, 80), 8, Space(recomputes=(Recompute.SELECTIVE,)))


def test_fewer_layers_first_where_memory_is_short():
    """The first stage holds most activations, which it need not compute again then, or which fit only then."""
    one = Space(pipelines=(4,), tensors=(4,), contexts=(1,), microbatches=(1,), schedules=("1f1b-flush",))
    layout = search(MODELS["llama3-70b"], dataclasses.replace(CLUSTERS["dgx-h100"], nodes=8), 512, one).best.layout
    assert (layout.first_stage_layers, layout.last_stage_layers, layout.recompute) == (18, 20, Recompute.NONE)
    odd = search(MODELS["gpt-39b"], dataclasses.replace(CLUSTERS["p3.16xlarge"], nodes=7), 96).best.layout
    assert (odd.pipeline, odd.first_stage_layers, odd.last_stage_layers) == (7, 6, 7)


def test_limits_that_exclude_each_other():
    with pytest.raises(PlanError, match="tensor 4 and the other limits leave none; without limits there is "):
        best(Space(pipelines=(4,), tensors=(4,), widths=(4,)))


def test_values_that_only_limits_have():
    """A search by itself does without them."""
    assert best(Space(recomputes=(Recompute.FULL,), recompute_layers=(3,))).best.layout.recompute_layers == 3
    more = best(Space(schedules=("2bw",), pipelines=(2,), extra_in_flight=(3,))).best.layout
    assert (more.schedule, more.extra_in_flight) == ("2bw", 3)
    ends = best(Space(pipelines=(4,), first_stage_layers=(1,), last_stage_layers=(3,))).best.layout
    assert (ends.first_stage_layers, ends.last_stage_layers) == (1, 3)


def test_names_of_layouts_mean_them():
    for layers in (8, 7):
        model, (machine, batch) = dataclasses.replace(MODEL, num_layers=layers), CASES["narrow"]
        plan = search(model, machine, batch, keep=50)
        assert len({name(choice.layout) for choice in plan.choices}) == len(plan.choices)
        for choice in plan.choices:
            assert (
                Candidates(model=model, cluster=machine, global_batch=batch, space=Space()).layout(
                    chosen(name(choice.layout))
                )
                == choice.layout
            )


def test_a_layout_that_is_compared_may_be_faster():
    """One beyond the limits of the search that it is compared with."""
    first, *_, last = best().choices
    assert " longer to a loss than " in next(compared(first, last))
    assert " less to a loss than " in next(compared(last, first))


@pytest.mark.parametrize("text", ["", "3bw:d2", "2bw:q4", "2bw:d", "2bw:d2;t3", "2bw:twice"])
def test_what_is_no_layout(text: str):
    with pytest.raises(PlanError):
        within(Space(), text)


@pytest.mark.parametrize("memory_gb", [80.0, 7.3])
def test_mixpipes_k_and_gamma_are_searched(memory_gb: float):
    """The fastest that fits, as pricing every single one finds it."""
    machine, model = cluster(4, memory_gb), dataclasses.replace(MODEL, dropout=False)
    space = equal(schedules=("mixpipe",), pipelines=(4,), tensors=(1,), microbatches=(8,), recomputes=(Recompute.NONE,))
    shape = {"schedule": "mixpipe", "pipeline": 4, "data": 1, "microbatch": 8, "global_batch": 32}
    all_of_them = [Layout(**shape, mixpipe_k=k % 4, mixpipe_gamma=gamma) for k, gamma in mixpipe.choices(4)]
    fitting = [one for one in all_of_them if memory.largest(model, one).total_bytes <= machine.memory_bytes]
    assert fitting
    best = min(fitting, key=lambda one: costs.iteration(model, one, machine).time_s)
    assert search(model, machine, 32, space).best.layout == best
    assert (len(fitting) == len(all_of_them)) == (memory_gb == 80)
    limited = dataclasses.replace(space, mixpipe_k=(2,), microbatches=None)
    kept = search(model, machine, 32, limited).choices
    assert {(choice.layout.microbatch, choice.layout.mixpipe_k) for choice in kept} == {(8, 2)}


@pytest.mark.parametrize(
    ("case", "layers"),
    [("roomy", 4), pytest.param("roomy", 8, marks=pytest.mark.slow), ("v100", 4), ("v100", 8)],
)
def test_nothing_that_fits_is_skipped(case: str, layers: int):
    """A quick look at a base bounds what all ways to save memory on it need; stages of one layer bound it tightest."""
    model, (machine, batch) = dataclasses.replace(MODEL, num_layers=layers), CASES[case]
    skipped = {Recompute.SELECTIVE: 0, Recompute.FULL: 0}
    for layout in every_layout(model, machine, batch):
        needed = memory.largest(model, layout).total_bytes
        for most in skipped:
            if most is Recompute.FULL or layout.recompute is not Recompute.FULL:
                bounds = {"recompute": most, "gradient_buffers": layout.gradient_buffers}
                assert not memory.needs_more(model, layout, needed, **bounds), layout
                skipped[most] += memory.needs_more(model, layout, needed / 2, **bounds)
        assert not memory.needs_more(model, layout, needed), layout
    assert all(skipped.values())


@pytest.mark.parametrize("schedule", ["2bw", "megatron", "mixpipe"])
def test_no_set_of_modules_that_fits_is_skipped(schedule: str):
    """Latent attention, layers with and without experts, shared experts, further tokens."""
    model = dataclasses.replace(MODELS["deepseek-v3"], num_layers=16)
    sizes = {"pipeline": 4, "data": 16, "expert": 8, "global_batch": 128, "microbatch": 2}
    layout = Layout(schedule=schedule, chunks=2 if schedule == "megatron" else 1, **sizes)
    needed = []
    for on in itertools.product((0, 1), repeat=len(RecomputeModule)):
        modules = tuple(itertools.compress(RecomputeModule, on))
        selective = dataclasses.replace(layout, recompute=Recompute.SELECTIVE, recompute_modules=modules)
        needed.append(memory.largest(model, selective).total_bytes)
    assert not memory.needs_more(model, layout, min(needed), recompute=Recompute.SELECTIVE, gradient_buffers=2)
    assert memory.needs_more(model, layout, 0.9 * min(needed), recompute=Recompute.SELECTIVE, gradient_buffers=2)


def test_an_update_is_not_beside_a_loss():
    """So that what computes less again, and has less under way, never needs more; the bounds rest on that."""
    model = Model(
        num_layers=6,
        hidden_size=512,
        num_attention_heads=16,
        seq_length=1024,
        vocab_size=8000,
        ffn_hidden_size=4096,
        swiglu=True,
        bias=False,
        learned_positions=False,
        tied=False,
        dropout=False,
        num_experts=8,
        moe_router_topk=1,
        moe_shared_expert_intermediate_size=2048,
        moe_shared_expert_gate=True,
        multi_latent_attention=True,
        kv_lora_rank=32,
    )
    sizes = {"pipeline": 2, "tensor": 2, "data": 1, "microbatch": 16, "global_batch": 32, "gradient_buffers": 1}
    copied = {"distributed_optimizer": True, "adam_state": AdamState(first_moment="bf16", second_moment="fp8")}
    layout = Layout(schedule="2bw", sequence_parallel=True, **sizes, **copied)
    selective = {
        "recompute": Recompute.SELECTIVE,
        "recompute_modules": (RecomputeModule.MLA_UP_PROJ, RecomputeModule.MOE),
    }
    for again in (selective, {"recompute": Recompute.FULL, "recompute_layers": model.num_layers}):
        needed = memory.largest(model, dataclasses.replace(layout, **again)).total_bytes
        assert not memory.needs_more(model, layout, needed, recompute=again["recompute"])


def test_ranks_that_share_sequences_share_the_optimizer():
    """So a layout that fits alone is not ruled out with its split."""
    model = dataclasses.replace(MODEL, num_layers=8, seq_length=16384)
    one = {"schedule": "megatron", "pipeline": 1, "data": 1, "context": 8, "global_batch": 8}
    one = Layout(**one, distributed_optimizer=True, recompute=Recompute.FULL)
    machine = cluster(8, 1.1 * memory.largest(model, one).total_bytes / 2**30)
    assert search(model, machine, 8, Space(contexts=(8,))).best.layout.context == 8


def test_a_share_of_a_batch_that_binary_numbers_miss():
    """29 of 100, though 0.29 * 100 is a little less."""
    one = Candidates(model=MODEL, cluster=cluster(8, 80), global_batch=100, space=Space(), delayed=0.29)
    assert one._most_delayed(100) == 29


def test_replicas_with_as_many_microbatches_as_stages_leave_a_choice_of_k():
    limits = {"schedules": ("mixpipe",), "pipelines": (4,), "tensors": (1,), "microbatches": (2,)}
    space = equal(**limits, recomputes=(Recompute.NONE,))
    model = dataclasses.replace(MODEL, num_layers=8, dropout=False)
    candidates = Candidates(model=model, cluster=cluster(8, 80), global_batch=16, space=space)
    found = {(layout.mixpipe_k, layout.mixpipe_gamma) for layout in candidates.bases()}
    assert found == {(k % 4, gamma) for k, gamma in mixpipe.choices(4)}


def test_as_many_kinds_of_layouts_are_found_as_asked_for():
    """However many differ only in how they save memory; the best ones are the same."""
    few, many = (search(MODEL, cluster(8, 80), 64, keep=keep).choices for keep in (3, 12))
    assert [len(first_of_kinds(choices)) >= keep for choices, keep in ((few, 3), (many, 12))] == [True, True]
    assert [*first_of_kinds(few)][:3] == [*first_of_kinds(many)][:3]


def test_a_narrow_search_finds_the_best_where_the_last_stage_has_less_than_others():
    sizes = {"num_layers": 24, "hidden_size": 1536, "num_attention_heads": 24, "seq_length": 2048, "vocab_size": 1000}
    model = Model(**sizes, bias=False, tied=False, dropout=False, learned_positions=False)
    space = Space(schedules=("1f1b-flush",), pipelines=(3, 6), last_stage_layers=(6,), recomputes=(Recompute.NONE,))
    machine = sized(CLUSTERS["dgx-b200"], gpus=3)
    best = search(model, machine, 6, space, keep=1).best
    assert costs.work_s(model, best.layout, machine) <= best.iteration.time_s
    assert best == search(model, machine, 6, space).best
