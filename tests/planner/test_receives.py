"""What late receives cost is what the Programs that run take when they are late."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.pipeline import batch
from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.planner.pipeline.programs import programs_of
from megatron_2bw.planner.pipeline.receives import with_late_receives
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.engine import Model as Waits
from megatron_2bw.schedule.lowering import lower, with_gradient_copy
from megatron_2bw.schedule.simulate import steady_state
from tests.cli import run
from tests.planner.pipelines import durations

SMALL = Model(num_layers=8, hidden_size=1024, num_attention_heads=16, seq_length=1024, vocab_size=50257)


def simulated_s(layout: Layout, pipeline: Pipeline) -> Fraction:
    programs = programs_of(layout)
    if layout.schedule == "2bw":
        programs = with_gradient_copy(programs, batch.gradient_copy(layout))
    late = replace(lower(programs), late_receives=True)
    return steady_state(late, durations(pipeline), model=Waits.POSTED).period_s


def drawn(schedule: str, extra: int, seed: int, cases: int):
    """Layouts and pipelines of even and of uneven stages, whose transfers take up to half of a forward."""
    rng = random.Random(seed)
    for _ in range(cases):
        stages = rng.randint(2, 5)
        least = max((1 + extra) * (stages - 1), 1)
        count = 1 if schedule == "pipedream" else rng.randint(least, 2 * least + 6)
        each = [Stage(10, 20)] * stages
        if rng.random() < 0.6:
            each = [Stage(rng.randint(6, 14), rng.randint(12, 28)) for _ in range(stages)]
        send_s = Fraction(rng.choice((1, 2, 3, 5)), rng.choice((1, 4)))
        of_2bw = {}
        if schedule == "2bw":
            of_2bw["gradient_buffers"] = rng.choice((1, 2))
            of_2bw["delayed_microbatches"] = rng.choice((0, 0, rng.randint(least, count)))
            of_2bw["distributed_optimizer"] = rng.random() < 0.5
        data = 1 + of_2bw.get("distributed_optimizer", False)
        layout = Layout(
            schedule=schedule,
            pipeline=stages,
            data=data,
            global_batch=data * count,
            extra_in_flight=extra,
            **of_2bw,
        )
        yield (
            layout,
            Pipeline(
                stages=stages,
                microbatches=count,
                first=each[0],
                middle=max(each[1:-1], key=lambda stage: stage.pair_s, default=each[-1]),
                last=each[-1],
                each=tuple(each),
                send_s=send_s,
                sends_s=(send_s,) * (stages - 1),
                update_s=rng.choice((0, 3, 7)),
                gradients_s=rng.choice((0, 4)),
                norm_s=rng.choice((0, 1)),
            ),
        )


@pytest.mark.parametrize("schedule", ["gpipe", "inter-layer"])
def test_equals_the_simulator(schedule: str):
    for layout, pipeline in drawn(schedule, 0, seed=1, cases=20):
        assert batch.batch_s(layout, with_late_receives(pipeline)) == simulated_s(layout, pipeline), pipeline


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush", "pipedream"])
def test_one_transfer_too_long_at_most(schedule: str):
    exact = 0
    for layout, pipeline in drawn(schedule, 0, seed=2, cases=40):
        exact_s, found_s = simulated_s(layout, pipeline), batch.batch_s(layout, with_late_receives(pipeline))
        assert 0 <= found_s - exact_s <= pipeline.send_s, (layout, pipeline)
        exact += found_s == exact_s
    assert exact


def test_more_in_flight_hide_the_transfers_of_forwards():
    for extra in (1, 2):
        for layout, pipeline in drawn("2bw", extra, seed=3, cases=25):
            exact_s = simulated_s(layout, pipeline)
            found_s = batch.batch_s(layout, with_late_receives(pipeline, extra))
            # Where a stage waits for the norm it receives meanwhile: by then, 2(d-1) microbatches more are there.
            hidden_s = 2 * (1 + extra) * (pipeline.stages - 1) * pipeline.send_s
            assert -2 * pipeline.send_s <= found_s - exact_s <= hidden_s, (layout, pipeline)


def test_kinds_of_stages_are_those_of_each():
    """Whether stages differ by their ends alone or in any way."""
    first, middle, last = Stage(1, 2), Stage(3, 5), Stage(2, 7)
    few = Pipeline(stages=4, microbatches=8, first=first, middle=middle, last=last, send_s=Fraction(1, 2))
    each = replace(few, each=(first, middle, middle, last))
    for extra in (0, 1):
        late = with_late_receives(few, extra)
        assert late.in_order == with_late_receives(each, extra).in_order
        assert late.send_s == 0 == sum(late.links_s)
    alone = Pipeline(stages=1, microbatches=8, first=first, middle=first, last=first)
    assert with_late_receives(alone) == alone


def layout(**more: object) -> Layout:
    fields = {"schedule": "2bw", "pipeline": 4, "data": 1, "microbatch": 2, "global_batch": 32}
    return Layout(**fields | more)


def test_who_waits_for_what_it_receives():
    """Megatron's own schedule does, and ours on GPUs, unless receives are early."""
    cluster = replace(CLUSTERS["dgx-a100"], gpus_per_node=1, nodes=4)

    def time_s(schedule: str, **more: object) -> float:
        return costs.iteration(SMALL, layout(schedule=schedule, **more), cluster).time_s

    for schedule in ("2bw", "gpipe", "1f1b-flush"):
        assert costs.least_s(SMALL, layout(schedule=schedule), cluster) <= time_s(schedule)
        assert time_s(schedule) > time_s(schedule, early_receives=True)
    assert time_s("megatron") == time_s("1f1b-flush")
    assert time_s("chimera") == time_s("chimera", early_receives=True)


SLOW = (
    "plan --model gpt-1.3b --cluster p3.16xlarge --nodes 4 --global-batch-size 64 --pipeline-schedule 2bw "
    "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 8"
)


def test_a_plan_says_what_earlier_ones_would_save(capsys: pytest.CaptureFixture[str]):
    code, late, _ = run(capsys, SLOW)
    assert code == 0
    assert "are transfers that --pipeline-receives early hides" in " ".join(late.split())
    code, early, _ = run(capsys, f"{SLOW} --pipeline-receives early --flags-only")
    assert code == 0
    assert "--pipeline-receives early" in early


ESTIMATE = (
    "estimate --cluster p3.16xlarge --gpus 8 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length "
    "512 --vocab-size 1000 --micro-batch-size 2 --global-batch-size 32 --fp16 --pipeline-model-parallel-size 4"
)


def test_an_estimate_is_of_the_order_that_a_run_has(capsys: pytest.CaptureFixture[str]):
    def priced(flags: str) -> str:
        code, out, err = run(capsys, f"{ESTIMATE} {flags}")
        assert (code, err) == (0, "")
        return out

    assert priced("--pipeline-schedule 2bw") == priced("--pipeline-schedule 2bw --pipeline-receives late")
    assert priced("--pipeline-schedule 2bw") != priced("--pipeline-schedule 2bw --pipeline-receives early")
    note = "late, the default on GPUs, a batch takes a little more"
    assert note in " ".join(priced("--pipeline-schedule chimera").split())
    assert note not in " ".join(priced("--pipeline-schedule chimera --pipeline-receives early").split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{ESTIMATE} --pipeline-receives early", "they are about the schedules of megatron_2bw"),
        (f"{ESTIMATE} --pipeline-schedule 2bw --pipeline-receives soon", "--pipeline-receives soon"),
        (
            "plan --model mixtral-8x7b --cluster dgx-h100 --global-batch-size 8 --pipeline-receives early",
            "--pipeline-receives early: which kernels experts run depends on the data",
        ),
    ],
)
def test_early_ones_are_refused_as_training_does(capsys: pytest.CaptureFixture[str], command: str, message: str):
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "")
    assert message in err
