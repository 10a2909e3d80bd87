"""What late receives cost is what the Programs that run take when they are late."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.pipeline import batch
from megatron_2bw.planner.pipeline.batch import simulated_s
from megatron_2bw.planner.pipeline.periods import Pipeline, Stage
from megatron_2bw.planner.pipeline.receives import with_late_receives
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Layout, Receives
from megatron_2bw.planner.specs.model import Model
from tests.cli import run
from tests.planner.pipelines import of_each

SMALL = Model(num_layers=8, hidden_size=1024, num_attention_heads=16, seq_length=1024, vocab_size=50257)


def drawn(schedule: str, extra: int, seed: int, cases: int):
    """Layouts and pipelines of even and of uneven stages, whose transfers take up to two forwards."""
    rng = random.Random(seed)
    for _ in range(cases):
        stages = rng.randint(2, 5)
        least = max((1 + extra) * (stages - 1), 1)
        count = 1 if schedule == "pipedream" else rng.randint(least, 2 * least + 6)
        each = [Stage(10, 20)] * stages
        if rng.random() < 0.6:
            each = [Stage(rng.randint(6, 14), rng.randint(12, 28)) for _ in range(stages)]
        send_s = Fraction(rng.choice((1, 2, 3, 5, 20)), rng.choice((1, 4)))
        sends_s = tuple(send_s * rng.choice((1, 1, 1, 3)) for _ in each[1:])
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
        more = {"update_s": rng.choice((0, 3, 7)), "gradients_s": rng.choice((0, 4)), "norm_s": rng.choice((0, 1))}
        yield layout, of_each(each, sends_s, count, late_receives=True, **more)


@pytest.mark.parametrize("schedule", ["gpipe", "inter-layer"])
def test_equals_the_simulator(schedule: str):
    for layout, pipeline in drawn(schedule, 0, seed=1, cases=20):
        assert batch.batch_s(layout, pipeline) == simulated_s(layout, pipeline), pipeline
        assert batch.least_s(layout, pipeline) <= batch.batch_s(layout, pipeline)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush", "pipedream"])
def test_one_transfer_too_long_at_most(schedule: str):
    exact = 0
    for layout, pipeline in drawn(schedule, 0, seed=2, cases=40):
        exact_s, found_s = simulated_s(layout, pipeline), batch.batch_s(layout, pipeline)
        assert 0 <= found_s - exact_s <= max(pipeline.sends_s), (layout, pipeline)
        assert batch.least_s(layout, pipeline) <= found_s
        exact += found_s == exact_s
    assert exact


@pytest.mark.parametrize("extra", [1, 2])
def test_more_in_flight_is_followed(extra: int):
    """Some transfers hide: which, the order of receives decides."""
    hidden = 0
    for layout, pipeline in drawn("2bw", extra, seed=3, cases=40):
        found_s = batch.batch_s(layout, pipeline)
        assert found_s == pytest.approx(simulated_s(layout, pipeline), rel=1e-9), (layout, pipeline)
        assert batch.least_s(layout, pipeline) <= found_s
        hidden += found_s < batch.batch_s(replace(layout, extra_in_flight=0), pipeline)
    assert hidden > 10


def test_kinds_of_stages_are_those_of_each():
    """Whether stages differ by their ends alone or in any way."""
    first, middle, last = Stage(1, 2), Stage(3, 5), Stage(2, 7)
    few = Pipeline(stages=4, microbatches=8, first=first, middle=middle, last=last, send_s=Fraction(1, 2))
    each = replace(few, each=(first, middle, middle, last))
    late = with_late_receives(few)
    assert late.in_order == with_late_receives(each).in_order
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
        assert time_s(schedule) > time_s(schedule, receives=Receives.EARLY)
    assert time_s("megatron") == time_s("1f1b-flush")
    assert time_s("chimera") == time_s("chimera", receives=Receives.EARLY)


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
    note = "late, the default on GPUs, a batch takes up to 1.3% more"
    assert note in " ".join(priced("--pipeline-schedule chimera").split())
    assert note not in " ".join(priced("--pipeline-schedule chimera --pipeline-receives early").split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{ESTIMATE} --pipeline-receives early", "they are about the schedules of megatron_2bw"),
        (f"{ESTIMATE} --pipeline-schedule 2bw --pipeline-receives default", "choose one of late, early"),
        (
            "plan --model mixtral-8x7b --cluster dgx-h100 --global-batch-size 8 --pipeline-receives early",
            "--pipeline-receives early: which kernels run depends on the data",
        ),
        (
            f"{SLOW.replace('2bw', 'megatron')} --pipeline-receives early",
            "--pipeline-receives: Megatron's own schedule has one order of receives; leave it out",
        ),
    ],
)
def test_what_training_would_refuse_is_refused(capsys: pytest.CaptureFixture[str], command: str, message: str):
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "")
    assert message in err


def test_of_a_launch_script(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun pretrain_gpt.py {ESTIMATE.split(maxsplit=5)[5]} --pipeline-schedule 2bw $MORE\n")
    plan = f"plan --from-script {script} --cluster p3.16xlarge --gpus 8 --pipeline-schedule 2bw --flags-only"
    for given, printed in (("", False), ("early", True), ("late", True)):
        flag = f"--pipeline-receives {given}" * (given != "")
        code, out, _ = run(capsys, f"{plan} {flag}")
        assert (code, f"--pipeline-receives {given}" in out) == (0, printed)
    script.write_text(script.read_text().replace("$MORE", "--pipeline-receives early"))
    code, out, _ = run(capsys, plan)
    assert (code, "--pipeline-receives early" in out) == (0, True)
    script.write_text(script.read_text().replace("early", "early --sft"))
    code, _, err = run(capsys, plan)
    assert (code, "--pipeline-receives early beside --sft of the script" in err) == (2, True)


def test_of_a_row():
    """By our name or Megatron's argument."""
    row = {"model": "gpt-1.3b", "cluster": "p3.16xlarge", "gpus": 8, "pipeline": 4, "schedule": "2bw", "fp16": True}
    row |= {"micro_batch_size": 2, "global_batch_size": 32}
    early, early_too, late = (
        predicted({**row, **more})["time_s"]
        for more in ({"receives": "early"}, {"pipeline_receives": "early"}, {"pipeline_receives": "late"})
    )
    assert early == early_too < late == predicted(row)["time_s"]


def test_wide_norms_are_warned_of(capsys: pytest.CaptureFixture[str]):
    wide = "plan --model gpt3-175b --cluster dgx-h100 --nodes 16 --global-batch-size 512 --pipeline-schedule 2bw"
    wide += " --pipeline-model-parallel-size 8 --tensor-model-parallel-size 8 --micro-batch-size 1 --flags-only"
    warning = "With a hidden size of 12,288, norms of Transformer Engine may wait for the whole GPU"
    assert warning in " ".join(run(capsys, f"{wide} --pipeline-receives early")[2].split())
    assert warning not in " ".join(run(capsys, wide)[2].split())


def test_on_processors_receives_are_late_where_they_have_to_be():
    """By what is asked for, or because of experts."""
    shared = replace(CLUSTERS["dgx-a100"], gpus_per_node=1, nodes=4, profile=SimpleNamespace(processors=4))
    pipeline = Pipeline(stages=4, microbatches=8, first=Stage(1, 2), middle=Stage(1, 2), last=Stage(1, 2), send_s=1)

    def is_late(model: Model, **more: object) -> bool:
        return costs.as_received(model, layout(**more), shared, pipeline).late_receives

    experts = replace(SMALL, num_experts=4)
    assert not is_late(SMALL)
    assert not is_late(experts, schedule="megatron")
    assert is_late(SMALL, receives=Receives.LATE)
    assert is_late(experts)
