"""The commands ``plan`` and ``estimate``."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from megatron_2bw.cli import main
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import read
from megatron_2bw.planner.flags.model_flags import model_flags
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.measure import verify
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.report.report import _narrow, compared, launch_lines, stage_totals
from megatron_2bw.planner.search import efficiency
from megatron_2bw.planner.search.finder import price
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Kind
from megatron_2bw.planner.specs.models import MODELS
from tests.cli import run

SCRIPTS = Path(__file__).parent / "scripts"
PLAN_FLEX = "plan --model mixtral-8x7b --cluster dgx-h100 --global-batch-size 8 --moe-token-dispatcher-type flex"
PLAN = "plan --model gpt-2.2b --cluster p3.16xlarge --nodes 8 --global-batch-size 512"
ON_ONE_NODE = "plan --model gpt-2.2b --cluster p3.16xlarge --nodes 1 --global-batch-size 64"
"""The same in a tenth of the time."""
EQUAL = "--decoder-first-pipeline-num-layers 0 --decoder-last-pipeline-num-layers 0"
"""Stages have equally many layers."""
FLAGS = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --vocab-size 1000"
FROM_SCRIPT = f"estimate --cluster dgx-a100 --from-script {SCRIPTS / 'conditions.sh'}"
ESTIMATE = f"estimate --cluster dgx-a100 --gpus 4 {FLAGS} --micro-batch-size 2 --global-batch-size 32 --bf16"


def words_of(text: str) -> str:
    """``text`` in one line."""
    return " ".join(text.split())


def test_plan(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, f"{PLAN} --top 4")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [
        "gpt-2.2b: 2.16B parameters, a vocabulary of 50,257, sequences of 512 tokens, batches of 512 samples",
        "8 x p3.16xlarge: 64 x v100-16gb",
    ]
    assert lines[3].split() == "layout time error tokens/s TFLOP/s bubble delay memory/GiB headroom/GiB".split()
    assert lines[8] == ""
    assert lines[4].startswith("2bw:d")
    assert all(line.split()[-3] == str(int(line.startswith("2bw:"))) for line in lines[4:8])
    assert "2bw computes every batch with weights that lack the update of the batch before (delay 1)" in words_of(out)
    assert "as long as it needs less than" in words_of(out)
    assert "layouts decided. Rules broken, with one example each:" in out
    assert "torchrun --nnodes 8 --nproc-per-node 8 --node-rank $NODE_RANK --master-addr $MASTER_ADDR \\\n" in out


def test_the_flags_that_are_printed_are_the_best_layouts(capsys: pytest.CaptureFixture[str]):
    _, text, _ = run(capsys, f"{PLAN} --json")
    plan = json.loads(text)
    best = plan["choices"][0]
    code, flags, err = run(capsys, f"{PLAN} --flags-only")
    assert (code, flags) == (0, best["flags"] + "\n")
    assert words_of(err) == f"megatron-2bw: {' '.join(plan['advice'])}"
    found = read(Options.parse([*flags.split(), "--vocab-size", "50257"]), gpus=64)
    assert found.model == dataclasses.replace(MODELS["gpt-2.2b"], name="")
    assert json.loads(json.dumps(dataclasses.asdict(found.layout))) == best["layout"]
    assert best["fits"]
    assert len(best["stages"]) == best["layout"]["pipeline"]
    assert [choice["time_to_loss_s"] for choice in plan["choices"]] == sorted(
        choice["time_to_loss_s"] for choice in plan["choices"]
    )


@pytest.mark.parametrize("top", [3, 10, 30])
def test_as_many_layouts_as_asked_for(capsys: pytest.CaptureFixture[str], top: int):
    code, out, _ = run(capsys, f"{ON_ONE_NODE} --top {top} --json")
    assert code == 0
    assert len(json.loads(out)["choices"]) == top


LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (f"{LAYOUT} Et|tL --decoder-first-pipeline-num-layers 1", "exclude each other"),
        (f"{LAYOUT} Et|tL --cost-model paper", f"has no {LAYOUT}"),
        (f"{LAYOUT}=", "is empty"),
    ],
)
def test_a_layout_is_not_half_a_limit(capsys: pytest.CaptureFixture[str], more: str, message: str):
    code, _, err = run(capsys, f"{PLAN} {more}")
    assert code == 2
    assert message in err


def test_what_is_switched_off(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, f"{PLAN} --no-sequence-parallel --no-use-distributed-optimizer --json")
    assert code == 0
    for choice in json.loads(out)["choices"]:
        assert not choice["layout"]["sequence_parallel"]
        assert not choice["layout"]["distributed_optimizer"]


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (9, "--nnodes 3 --nproc-per-node 3"),
        (12, "--nnodes 2 --nproc-per-node 6"),
        (20, "--nnodes 4 --nproc-per-node 5"),
    ],
)
def test_nodes_have_equally_many_processes(gpus: int, words: str):
    layout = Layout(schedule="megatron", pipeline=1, data=gpus, global_batch=gpus)
    assert any(words in line for line in launch_lines(MODELS["gpt-355m"], layout, CLUSTERS["dgx-a100"], []))


def test_ranks_that_share_sequences_need_one_connection():
    layout = Layout(schedule="megatron", pipeline=1, data=1, context=2, global_batch=2)
    on = {name: [*launch_lines(MODELS["gpt-355m"], layout, CLUSTERS[name], [])] for name in ("dgx-a100", "dgx-b200")}
    assert "    export CUDA_DEVICE_MAX_CONNECTIONS=1" in on["dgx-a100"]
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in line for line in on["dgx-b200"]), "no longer, says validate_args"


def test_memory_by_stage_says_what_it_is():
    layout = Layout(schedule="2bw", pipeline=4, data=1, global_batch=4)
    assert next(stage_totals(memory.stages(MODELS["gpt-355m"], layout))).startswith("GiB by stage of the best:  0: ")


def test_the_roomier_layout_that_is_named_leaves_as_much_as_a_prediction_may_be_off():
    choices = [
        SimpleNamespace(
            headroom_bytes=left, layout=Layout(schedule="2bw", pipeline=2, data=data, global_batch=8 * data)
        )
        for data, left in ((1, 1.0), (2, 4.0), (4, 6.0))
    ]
    (text,) = _narrow(SimpleNamespace(cluster=SimpleNamespace(memory_bytes=100.0), best=choices[0], choices=choices))
    assert "of those that were compared, 2bw:d2,t1,w4" in text


def test_a_model_given_by_flags(capsys: pytest.CaptureFixture[str]):
    model = "--num-layers 32 --hidden-size 2304 --num-attention-heads 32 --seq-length 512 --vocab-size 50257"
    same = PLAN.replace("--model gpt-2.2b", model)
    assert run(capsys, f"{same} --flags-only") == run(capsys, f"{PLAN} --flags-only")


def test_a_model_given_by_flags_keeps_them(capsys: pytest.CaptureFixture[str]):
    given = f"{FLAGS} --max-position-embeddings 4096 --rotary-base 5000 --quick-geglu --hidden-dropout 0.05"
    code, flags, _ = run(capsys, f"plan {given} --cluster dgx-a100 --global-batch-size 64 --flags-only")
    assert code == 0
    assert flags.endswith(f" {given.replace('--vocab-size 1000 ', '')}\n")


def test_sample_efficiency(capsys: pytest.CaptureFixture[str]):
    _, neutral, _ = run(capsys, PLAN)
    break_even = float(words_of(neutral).split("(break-even ")[1].split(")")[0])
    _, better, _ = run(capsys, f"{PLAN} --sample-efficiency {break_even + 0.02}")
    assert "it reaches a loss" in words_of(better)
    assert better.splitlines()[4].startswith("2bw:")
    _, worse, _ = run(capsys, f"{PLAN} --sample-efficiency {break_even - 0.02}")
    assert "a flush reaches the loss" in words_of(worse)
    assert not worse.splitlines()[4].startswith("2bw:")


def test_sample_efficiency_as_measured(capsys: pytest.CaptureFixture[str]):
    """The best of all ways, with the flags of the one that is taken."""
    plan, plans = f"{PLAN} {EQUAL} --tensor-model-parallel-size 4", []
    for way in efficiency.MEASURED:
        options = f"--sample-efficiency {way.efficiency} --synchronous-warmup-fraction {way.synchronous}"
        options += f" --delayed-microbatches-fraction {way.delayed}"
        plans.append(json.loads(run(capsys, f"{plan} {options} --top 40 --json")[1]))
    to_loss = [next(c["time_to_loss_s"] for c in plan["choices"] if c["delay"]) for plan in plans]
    assert len(to_loss) == 4
    assert to_loss[1] < min(to_loss[2:])
    assert to_loss[1] <= to_loss[0], "what may delay half may delay less"
    better = plans[to_loss.index(min(to_loss))]
    measured = json.loads(run(capsys, f"{plan} --sample-efficiency auto --top 40 --json")[1])
    for found, one in zip(measured["choices"], better["choices"], strict=True):
        more = " --delay-correction lead --delay-lead 2" if one["layout"]["schedule"] == "2bw" else ""
        assert found == {**one, "flags": f"{one['flags']}{more}"}
    for share in ("synchronous_warmup_fraction", "delayed_microbatches_fraction"):
        assert measured[share] == better[share]
    assert efficiency.RECOMMENDED in " ".join(measured["advice"])
    assert efficiency.RECOMMENDED not in " ".join(better["advice"])
    assert "--synchronous-warmup-iters" in " ".join(plans[2]["advice"])
    assert "--synchronous-warmup-iters" not in " ".join(plans[3]["advice"])
    partly = next(c for c in plans[1]["choices"] if c["delay"])
    count = partly["layout"]["delayed_microbatches"]
    assert f"--pipeline-delayed-microbatches {count} " in partly["flags"]
    assert f"the first {count} microbatches of every batch with weights that lack" in " ".join(plans[1]["advice"])


def test_what_is_said_where_no_flush_is_tried(capsys: pytest.CaptureFixture[str]):
    """It may fit all the same; and what auto rests on is said, and what nobody measured."""
    only = f"{ON_ONE_NODE} --fp16 --sample-efficiency auto --pipeline-schedule 2bw"
    said = " ".join(json.loads(run(capsys, f"{only} --json")[1])["advice"])
    assert "No layout without a delay was tried, or none fits" in said
    assert "Nothing was measured in fp16" in said
    code, out, err = run(capsys, f"{only} --flags-only")
    assert (code, out.split()[0]) == (0, "--pipeline-schedule")
    assert "--delay-correction lead" in out
    assert "Nothing was measured in fp16" in words_of(err)


@pytest.mark.parametrize("optimizer", ["--optimizer lion", "--use-precision-aware-optimizer"])
def test_no_correction_that_training_would_refuse(optimizer: str, capsys: pytest.CaptureFixture[str]):
    limits = "--pipeline-schedule 2bw --pipeline-model-parallel-size 4 --tensor-model-parallel-size 1"
    plan = f"plan --model gpt-2.2b --cluster dgx-a100 --global-batch-size 32 {limits} {optimizer}"
    code, out, err = run(capsys, f"{plan} --sample-efficiency auto --flags-only")
    assert (code, "--delay-correction" in out) == (0, False)
    assert "may cost more there" in words_of(err) or "takes no --delay-correction" in words_of(err)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ("--model llama3-70b --nodes 2 --pipeline-schedule gpipe", " fits: gpipe:"),
        ("--model mixtral-8x7b --gpus 8 --pipeline-schedule chimera", "--num-experts 8: chimera trains no experts"),
        ("--model llama3-70b --nodes 2 --fp16 --pipeline-schedule pipedream", "pipedream cannot scale losses"),
    ],
)
def test_why_none_of_one_schedule(limits: str, why: str, capsys: pytest.CaptureFixture[str]):
    """Not why none of Megatron's own, which fits where the others do not."""
    code, _, err = run(capsys, f"plan --cluster dgx-h100 --global-batch-size 512 {limits}")
    assert code == 2
    assert why in err


def test_as_measured_where_a_batch_has_many_microbatches(capsys: pytest.CaptureFixture[str]):
    """An eighth is enough, and needs no lead."""
    layout = "--pipeline-schedule 2bw,1f1b-flush --pipeline-model-parallel-size 4 --micro-batch-size 1"
    plan = f"plan --model gpt-2.2b --cluster dgx-a100 --global-batch-size 64 {layout} --data-parallel-size 2 {EQUAL}"
    plan = f"{plan} --pipeline-receives early"
    found = json.loads(run(capsys, f"{plan} --sample-efficiency auto --json")[1])
    assert found["delayed_microbatches_fraction"] == 0.125
    assert next(c for c in found["choices"] if c["delay"])["layout"]["delayed_microbatches"] == 4
    assert f"{efficiency.WITHOUT_LEAD} and an eighth of every batch delayed" in " ".join(found["advice"])
    assert not any("--delay-correction" in choice["flags"] for choice in found["choices"])


def test_as_measured_where_a_batch_has_few_microbatches(capsys: pytest.CaptureFixture[str]):
    """Half of it cannot be delayed; the other ways remain."""
    layout = "--pipeline-schedule 2bw --pipeline-model-parallel-size 8 --data-parallel-size 8 --micro-batch-size 1"
    plan = f"plan --model gpt-2.2b --cluster dgx-a100 --nodes 8 --global-batch-size 64 {layout}"
    code, _, err = run(capsys, f"{plan} --delayed-microbatches-fraction 0.5")
    assert code == 2
    assert (
        "2bw delays at least 7 of them on 8 stages, more than 0.5 of a batch; raise --global-batch-size to 112" in err
    )
    found = json.loads(run(capsys, f"{plan} --sample-efficiency auto --json")[1])
    assert found["delayed_microbatches_fraction"] == 1
    assert found["choices"][0]["layout"]["delayed_microbatches"] == 0
    code, _, err = run(capsys, f"{plan.replace('size 64', 'size 32')} --sample-efficiency auto")
    assert code == 2
    assert "microbatches 4: 2bw needs at least 8 on 8 stages; raise --global-batch-size to 64" in err


def test_a_beginning_without_a_delay_is_priced(capsys: pytest.CaptureFixture[str]):
    """As a flush on the same stages; break-even is the efficiency that both need then."""
    layout = "--pipeline-model-parallel-size 8 --pipeline-schedule 2bw,1f1b-flush --micro-batch-size 4"
    plan = f"plan --model gpt-2.2b --cluster dgx-a100 --global-batch-size 64 {layout} --tensor-model-parallel-size 1"
    later = json.loads(run(capsys, f"{plan} --synchronous-warmup-fraction 0.25 --json")[1])
    delayed, flushed = (next(c for c in later["choices"] if c["delay"] == delay) for delay in (1, 0))
    assert flushed["time_to_loss_s"] == flushed["time_s"]
    ratio = delayed["time_to_loss_s"] / flushed["time_s"]
    assert ratio == pytest.approx(0.75 * delayed["time_s"] / flushed["time_s"] + 0.25, rel=0.02)
    assert f"(break-even {ratio:.3f})" in " ".join(later["advice"])
    assert "The first 25% of the batches are priced without the delay" in " ".join(later["advice"])
    many = run(capsys, f"{plan.replace('64', '2048', 1)} --micro-batch-size 1 --synchronous-warmup-fraction 0.25")[1]
    assert "its bubble, 0.75 x (d-1)/m = " in words_of(many)


def test_when_not_to_use_2bw(capsys: pytest.CaptureFixture[str]):
    both = "plan --model gpt-2.2b --cluster dgx-a100 --pipeline-model-parallel-size 8 --pipeline-schedule 2bw,dapple"
    many = words_of(run(capsys, f"{both} --global-batch-size 2048 --micro-batch-size 1")[1])
    assert "m >= 8d: all that 2bw saves of a flush on the same stages is its bubble, (d-1)/m = 0.3% of the time" in many
    assert "Prefer 1f1b-flush:d8," in many
    few = words_of(run(capsys, f"{both} --global-batch-size 64 --micro-batch-size 4")[1])
    assert "It reaches a loss before 1f1b-flush:d8," in few
    assert "m >= 8d" not in few
    same = "1f1b-flush trains as Megatron's own schedule does, to the last bit"
    alone = words_of(run(capsys, f"{both.replace('2bw,', '')} --global-batch-size 64 --micro-batch-size 4")[1])
    assert (same in alone, same in few) == (True, False)
    slower = run(capsys, "plan --model gpt-355m --cluster dgx-a100 --global-batch-size 64")[1]
    assert "Do not use 2bw here: megatron:d1," in slower
    sooner = words_of(
        run(capsys, "plan --model gpt-355m --cluster dgx-a100 --global-batch-size 64 --sample-efficiency 1.5")[1]
    )
    assert "Do not use 2bw here" not in sooner, "who says that a delay helps is told what follows from it"
    assert "At sample efficiency 1.5 it reaches a loss" in sooner


def test_layouts_that_take_as_long_are_said_to():
    """As 1f1b-flush and Megatron's own schedule with one chunk do."""
    layout = Layout(schedule="megatron", pipeline=2, data=4, microbatch=1, global_batch=32)
    choices = [
        price(MODELS["gpt-1.3b"], layout.but(schedule=schedule), CLUSTERS["dgx-a100"])
        for schedule in ("1f1b-flush", "megatron")
    ]
    first, *rest = compared(*choices)
    assert re.fullmatch(r"megatron:d2,.* takes \d+ ms, as long to a loss as 1f1b-flush:d2,.* \(\d+ ms\):", first)
    assert len(rest) == 1


def test_explain(capsys: pytest.CaptureFixture[str]):
    plan = f"{ON_ONE_NODE} --tensor-model-parallel-size 1"
    code, out, _ = run(capsys, f"{plan} --explain gpipe:d4")
    assert code == 0
    assert out.startswith("The best layout of the form gpipe:d4:\ngpipe:d4,")
    assert "longer to a loss than megatron:" in out
    _, out, _ = run(capsys, f"{plan} --explain gpipe:d4,t1,w2,b16,none")
    assert "GiB of 15.78 on its fullest stage" in out
    _, text, _ = run(capsys, f"{plan} --json")
    assert [*json.loads(text)["rejected"][0]] == ["step", "rule", "reason", "example", "count"]
    assert all(isinstance(rejection["reason"], str) for rejection in json.loads(text)["rejected"])
    choices = json.loads(text)["choices"]
    name = choices[0]["name"]
    assert run(capsys, f"{plan} --explain {name}")[1] == f"{name} is the best layout.\n"
    for choice in choices[1:4]:
        assert run(capsys, f"{plan} --explain {choice['name']}")[1].startswith(f"{choice['name']} takes ")


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("2bw:d7", "pipeline 7 does not divide 64 GPUs; use pipeline 8"),
        ("2bw:d0", "pipeline 0 is no count; use pipeline 2"),
        ("2bw:w2,b0", "microbatch 0 is no count; use microbatch 1"),
        ("2bw:d8,t16", "tensor 16 does not divide the 8 GPUs of a stage; use tensor 8"),
        ("2bw:d8,t4,w3", "; use data 2"),
        ("2bw:d8,t4,w3,b1", "data 3: a stage has 8 GPUs, 4 per replica; use 2"),
        ("2bw:d8,t4,w2,b3", "global_batch 512 is no multiple of microbatch 3 x data 2; use 510"),
        ("2bw:d8,t4,w2,b8,v2", "chunks 2: 2bw does not interleave; use schedule megatron"),
        ("2bw:d8,t4,w2,b8,block99", "recompute_layers 99: a stage has 4 layers; use 4"),
        ("2bw:d8,t2,w4,b512", "global_batch 512 is no multiple of microbatch 512 x data 4; use 2048"),
        ("2bw:d8,t4,w2,b64", "microbatches 4: 2bw needs at least 8 on 8 stages; raise global_batch to 1024"),
        ("2bw:d8,t4,w2,b8,uniform3", "takes "),
        ("2bw:d8,x3", "The best layout of the form 2bw:d8,x3:"),
    ],
)
def test_every_layout_has_a_reason(capsys: pytest.CaptureFixture[str], layout: str, reason: str):
    code, out, _ = run(capsys, f"{PLAN} {EQUAL} --explain {layout}")
    assert code == 0
    assert reason in out
    assert "the limits" not in out


def test_no_samples_at_a_time_and_a_batch_that_does_not_split(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, f"{PLAN.replace('512', '511')} --explain 2bw:w2,b0")
    assert (code, "global_batch 511 does not split over any possible number of replicas (2)" in out) == (0, True)


def test_the_papers_own_planners(capsys: pytest.CaptureFixture[str]):
    small = "plan --model gpt-2.2b --cluster p3.16xlarge --global-batch-size 256"
    code, out, _ = run(capsys, f"{small} --cost-model paper")
    assert code == 0
    assert out.splitlines()[2].split()[:3] == ["schedule", "width", "depth"]
    assert "samples/s" in out
    assert "-m megatron_2bw pretrain_gpt.py" in out
    _, flags, _ = run(capsys, f"{small} --cost-model paper --flags-only")
    _, text, _ = run(capsys, f"{small} --cost-model paper --json")
    best = json.loads(text)["choices"][0]
    assert flags.startswith("--pipeline-schedule 2bw --tensor-model-parallel-size 1 ")
    assert f" --pipeline-model-parallel-size {best['depth']} " in flags
    seven = (
        "plan --model gpt-2.2b --cluster p3.16xlarge --nodes 7 --global-batch-size 64 --cost-model paper --flags-only"
    )
    assert run(capsys, seven)[2] == "megatron-2bw: these flags are for 32 of the 56 GPUs\n"
    both = "plan --model bert-355m --cluster p3.16xlarge --nodes 2 --global-batch-size 64 --cost-model mixpipe"
    code, out, _ = run(capsys, both)
    assert (code, "injected" in out, "flags of mixpipe:d8," in out) == (0, True, True)
    flags = run(capsys, f"{both} --flags-only")[1]
    best = json.loads(run(capsys, f"{both} --json")[1])["choices"][0]
    layout = read(Options.parse([*flags.split(), "--vocab-size", "30522"]), gpus=16, kind=Kind.BERT).layout
    assert (
        layout.schedule,
        layout.pipeline,
        layout.data,
        layout.microbatch,
        layout.mixpipe_k,
        layout.mixpipe_gamma,
    ) == (
        "mixpipe",
        *(best[field] for field in ("depth", "width", "microbatch", "injected", "extra")),
    )
    experts = both.replace("--model bert-355m", f"{FLAGS} --num-experts 4 --disable-bias-linear")
    code, out, _ = run(capsys, experts)
    assert (code, "There are no flags for the best: num_experts 4: mixpipe trains no experts" in out) == (0, True)
    assert "num_experts 4: mixpipe trains no experts" in run(capsys, f"{experts} --flags-only")[2]


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "plan.svg"
    assert run(capsys, f"{ON_ONE_NODE} --flags-only --plot {picture}")[0] == 0
    root = ElementTree.parse(picture).getroot()
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) > 50
    assert "gpt-2.2b on 8 x v100-16gb: throughput against memory" in root[0].text
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    assert all(0 < float(c.get("cx")) < width and 0 < float(c.get("cy")) < height for c in circles)


def test_estimate(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(
        capsys, f"{ESTIMATE} --pipeline-model-parallel-size 4 --pipeline-schedule 2bw --lr 1e-4 --seed 1"
    )
    assert (code, err) == (0, "")
    assert "2bw:d4,t1,w1,b2: m = 16 microbatches per batch and replica, delay 1" in out
    heads = next(line for line in out.splitlines() if line.startswith("stage (GiB)"))
    assert all(part in heads for part in ("weights", "older weights", "captured gradients", "optimizer", "activations"))
    assert "\nfits: " in out


def test_flags_that_cannot_be_priced_can_be_ignored(capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, f"{ESTIMATE} --fp4-format e2m1 --seed 3")
    assert code == 2
    assert "does not cover 4-bit matrix products; to price the rest, give --ignore fp4-format" in err
    ignored = run(capsys, f"{ESTIMATE} --fp4-format e2m1 --seed 3 --ignore fp4-format,--seed")
    assert ignored == run(capsys, ESTIMATE)
    assert "--ignore --lr: it is not given" in run(capsys, f"{ESTIMATE} --ignore lr")[2]


@pytest.mark.parametrize("name", ["bert-2.2b", "llama3-8b", "mixtral-8x7b"])
def test_estimate_of_a_model_by_name_is_that_by_its_flags(capsys: pytest.CaptureFixture[str], name: str):
    model, gpus = MODELS[name], "--cluster dgx-h100 --micro-batch-size 1 --global-batch-size 64 --bf16"
    by_name, by_flags = (
        run(capsys, f"estimate {gpus} {described} --json")
        for described in (
            f"--model {name}",
            f"{' '.join(model_flags(model))} --vocab-size {model.vocab_size} --model-kind {model.kind}",
        )
    )
    assert by_name[0] == 0
    assert by_name == by_flags


def test_estimate_what_does_not_fit(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, f"{ESTIMATE} --hidden-size 16384 --num-layers 64")
    assert code == 0
    assert "does not fit: stage 0 needs " in out


@pytest.mark.parametrize("share", [0.9, 0.97, 1.03, 1.1])
def test_estimate_says_where_memory_is_too_close_to_call(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, share: float
):
    needed = max(stage["total_bytes"] for stage in json.loads(run(capsys, f"{ESTIMATE} --json")[1])["stages"])
    file = tmp_path / "cluster.json"
    gpu = {
        "name": "a100",
        "memory_gb": needed / share / 2**30,
        "peak_tflops": 312,
        "hbm_gb_s": 2039,
        "nvlink_gb_s": 300,
    }
    links = {"gpus_per_node": 8, "nodes": 1, "intra_node_gb_s": 300, "inter_node_gb_s": 200}
    file.write_text(json.dumps({"name": "mine", "gpu": gpu, **links}))
    out = run(capsys, ESTIMATE.replace("dgx-a100", str(file)))[1]
    assert ("does not fit: " in out) == (share > 1)
    assert (", less than the 5% by which this may be off" in out) == (abs(share - 1) < 0.05)


@pytest.mark.parametrize("name", [file.name for file in SCRIPTS.glob("*.sh")])
def test_estimate_of_a_script(capsys: pytest.CaptureFixture[str], name: str):
    cluster = "p3.16xlarge" if name == "slurm.sh" else "dgx-a100"
    code, out, _ = run(capsys, f"estimate --cluster {cluster} --from-script {SCRIPTS / name} --json")
    assert code == 0
    assert json.loads(out)["time_s"] > 0
    _, smaller, _ = run(capsys, f"estimate --cluster {cluster} --from-script {SCRIPTS / name} --json --seq-length 128")
    assert json.loads(smaller)["time_s"] < json.loads(out)["time_s"]


def test_gpus_that_are_given_are_those_of_a_script(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    script, data = tmp_path / "run.sh", []
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS} --micro-batch-size 1 --bf16")
    for more in ("", "--gpus 4"):
        code, out, _ = run(capsys, f"estimate --cluster dgx-a100 --from-script {script} {more} --json")
        assert code == 0
        data.append(json.loads(out)["layout"]["data"])
    assert data == [8, 4]


def test_a_script_that_does_not_say_how_many_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(f"python pretrain_gpt.py {FLAGS} --bf16 --micro-batch-size 1")
    note = "note: the script does not say how many GPUs it uses: priced on the cluster's 8; give --gpus\n"
    assert run(capsys, f"estimate --cluster dgx-a100 --from-script {script}")[1].endswith(note)
    assert note not in run(capsys, f"estimate --cluster dgx-a100 --from-script {script} --gpus 8")[1]


def test_a_script_that_goes_on_from_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Whether there is one only running it would tell; flags of either way can be left out."""
    script = tmp_path / "run.sh"
    flags = ESTIMATE.removeprefix("estimate --cluster dgx-a100 --gpus 4 ")
    script.write_text(f"if [ -f last ]; then A='--load x'; fi; python {flags} $A")
    command = f"estimate --cluster dgx-a100 --gpus 4 --from-script {script}"
    assert run(capsys, command) == run(capsys, ESTIMATE)
    assert run(capsys, f"{command} --ignore load")[0] == 0
    assert "--ignore --lr: it is not given" in run(capsys, f"{command} --ignore lr")[2]


def test_estimate_of_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    good = {"id": 7, "model": "gpt-2.2b", "schedule": "2bw", "pipeline": 4, "tensor": 2, "global_batch": 64}
    own = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 100}
    machine = {"cluster": {"gpu": "h100-80gb", "gpus_per_node": 4, "inter_node_gb_s": 50}, "gpus": 4}
    rows = [
        good,
        {**own, **machine, "schedule": "megatron", "pipeline": 2, "global_batch": 8, "recompute": "full"},
        {**good, "pipeline": 3},
        {**good, "pipeline": "four"},
        {**good, "pipeline": 0},
        {**good, "nodes": "two"},
        {**good, "precision": "fp64"},
        {"schedule": "2bw"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*map(json.dumps, rows), "", "{", "[]"]))
    code, out, _ = run(capsys, f"estimate --cluster dgx-a100 --jsonl {file}")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert [("prediction" in row, "error" in row) for row in found] == [(True, False)] * 2 + [(False, True)] * 8
    assert {key: found[0][key] for key in good} == good
    assert found[0]["prediction"]["fits"] is True
    file.write_text(json.dumps(good))
    assert run(capsys, f"estimate --cluster dgx-a100 --jsonl {file}")[0] == 0


ROW = {"model": "gpt-2.2b", "schedule": "2bw", "pipeline": 4, "tensor": 2, "global_batch": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"error": "of an earlier time"},
        {"schedule": "dapple"},
        {"note": "a line\u2028and another"},
        {"num_layers": 32, "name": "the same", "gpu": "a label"},
        {"model": dataclasses.asdict(MODELS["gpt-2.2b"])},
        {"data": 8, "gpus": 64},
        {"data": 8, "nodes": 8},
        {"data": 8, "nodes": 16},
        {"tensors": "beside tensor", "microbatches": 64.0},
    ],
    ids=str,
)
def test_rows_that_have_a_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object]):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, **changes}, ensure_ascii=False), encoding="utf-8")
    code, out, err = run(capsys, f"estimate --cluster dgx-a100 --jsonl {file}")
    (found,) = map(json.loads, out.splitlines())
    assert (code, err, "error" in found) == (0, "", False)
    assert found["prediction"]["time_s"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prediction": {"time_s": 1}, "pipeline": 0},
            "layout: pipeline 0 is no count; give a whole number of at least 1",
        ),
        ({"seq_length": 10**320}, "seq_length 1000"),
        ({"model": {**dataclasses.asdict(MODELS["gpt-2.2b"]), "hidden_size": 10**320}}, "of at most 1000000000000"),
        ({"global_batch": 10**320}, "0000 is no count; give a whole number of at most 1000000000000"),
        ({"pipeline": 10**4000, "tensor": 10**4000}, "0000 is no count; give a whole number of at most 1000000000000"),
        ({"pipeline": -(10**4000), "tensor": -(10**4000)}, "0000 is no count; give a whole number of at least 0"),
        ({"gpus": 10**320}, "gpus 1000"),
        ({"num_layers": 99}, "num_layers 99: the model has 32; leave out one of them"),
        ({"model": 7}, "model 7: give a name or an object"),
        ({"model": "gpt-2.3b"}, "unknown model 'gpt-2.3b'; choose one of gpt-2.2b"),
        ({"schedule": "3bw"}, "unknown schedule '3bw'; choose one of 2bw"),
        ({"recomputes": "full"}, "unknown key 'recomputes'; did you mean 'recompute'?"),
        ({"gpus": 64, "data": 2}, "data 2 x pipeline x tensor x context = 8 are not 64 GPUs; leave out data"),
        ({"nodes": 0}, "nodes 0: give a whole number of at least 1"),
        ({"cluster": {"gpu": "a100", "gpus_per_node": 8, "inter_node_gb_s": 9}}, "unknown gpu 'a100'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rows_that_have_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], message: str
):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, **changes}))
    code, out, err = run(capsys, f"estimate --cluster dgx-a100 --jsonl {file}")
    (found,) = map(json.loads, out.splitlines())
    assert (code, err, "prediction" in found) == (2, "", False)
    assert found["error"].startswith("rows.jsonl, line 1: ")
    assert message in found["error"]


@pytest.mark.parametrize(
    "options",
    [
        PLAN,
        "plan --cluster dgx-h100 --gpus 4 --global-batch-size 16 --num-layers 8 --hidden-size 1024 --swiglu "
        "--num-attention-heads 16 --seq-length 1024 --vocab-size 50257 --num-experts 4 --disable-bias-linear",
    ],
)
def test_what_a_plan_says_is_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path, options: str):
    plan = json.loads(run(capsys, f"{options} --json")[1])
    file, model, cluster = (tmp_path / name for name in ("rows.jsonl", "model.json", "cluster.json"))
    rows = [{**choice["layout"], "model": plan["model"], "cluster": plan["cluster"]} for choice in plan["choices"]]
    file.write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = run(capsys, f"estimate --jsonl {file}")
    predictions = [json.loads(line)["prediction"] for line in out.splitlines()]
    assert code == 0
    assert [found["time_s"] for found in predictions] == [choice["time_s"] for choice in plan["choices"]]
    model.write_text(json.dumps(plan["model"]))
    cluster.write_text(json.dumps(plan["cluster"]))
    batch = f"--global-batch-size {plan['global_batch']}"
    again = json.loads(run(capsys, f"plan --model {model} --cluster {cluster} {batch} --json")[1])
    assert [choice["name"] for choice in again["choices"]] == [choice["name"] for choice in plan["choices"]]


def test_rows_behind_a_byte_order_mark(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW), encoding="utf-8-sig")
    assert run(capsys, f"estimate --cluster dgx-a100 --jsonl {file}")[0] == 0


def test_a_row_of_brackets_is_that_rows_error(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{'[' * 100_000}\n{json.dumps(ROW)}")
    code, out, _ = run(capsys, f"estimate --cluster dgx-a100 --jsonl {file}")
    bad, good = map(json.loads, out.splitlines())
    assert (code, "prediction" in good) == (2, True)
    assert "rows.jsonl, line 1: row: no JSON" in bad["error"]


def test_files_of_model_and_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    model, cluster = tmp_path / "model.json", tmp_path / "cluster.json"
    model.write_text(json.dumps({**dataclasses.asdict(MODELS["gpt-2.2b"])}))
    node = {"gpu": "v100-16gb", "gpus_per_node": 8, "nodes": 2, "inter_node_gb_s": 3.125}
    cluster.write_text(json.dumps(node))
    same = f"plan --model {model} --cluster {cluster} --global-batch-size 64 --flags-only"
    named = run(capsys, f"{ON_ONE_NODE} --nodes 2 --flags-only")
    assert run(capsys, same) == named
    cluster.write_text(json.dumps({**node, "group_gb_s": [[2, 1.5], [4, 2]]}))
    assert run(capsys, same) != named
    cluster.write_text(json.dumps({**node, "gpu": {"memory_gb": 1, "peak_tflops": 9, "hbm_gb_s": 9, "nvlink_gb_s": 9}}))
    assert "needs" in run(capsys, f"{same} --pipeline-schedule 2bw --tensor-model-parallel-size 1")[2]


BAD = {
    PLAN.replace("gpt-2.2b", "gpt-2.3b"): "unknown model 'gpt-2.3b'; choose one of gpt-2.2b",
    PLAN.replace("p3.16xlarge", "p3.16"): "unknown cluster 'p3.16'; choose one of p3.16xlarge",
    PLAN.replace("p3.16xlarge", "v100-16gb"): "unknown cluster 'v100-16gb'; choose one of p3.16xlarge",
    PLAN.replace("p3.16xlarge", "A100"): "unknown cluster 'A100'; choose one of dgx-a100",
    PLAN.replace("512", "0"): "--global-batch-size 0: give a whole number of at least 1",
    PLAN.replace("512", "9" * 320): "give a whole number of at most 1000000000000",
    PLAN.replace("--nodes 8", f"--gpus {'9' * 320}"): "is no multiple of 8, the GPUs of a node",
    f"{ESTIMATE} --num-layers {'9' * 320}": "give a whole number of at most 1000000000000",
    PLAN.replace("512", "many"): "--global-batch-size many: give a whole number of at least 1",
    PLAN.replace("--nodes 8", "--nodes 0"): "nodes 0: give a whole number of at least 1",
    PLAN.replace("--nodes 8", "--gpus 12"): "gpus 12 is no multiple of 8, the GPUs of a node; use 16",
    f"{PLAN} --gpus 8": "gpus 8 and nodes 8 disagree",
    f"{PLAN} --hidden-size 4": "--model gpt-2.2b and --hidden-size both describe the model; give one",
    f"{PLAN} --model-kind bert": "--model gpt-2.2b and --model-kind both describe the model; give one",
    "estimate --cluster dgx-a100 --model gpt-2.2b --swiglu": "--model gpt-2.2b and --swiglu both describe the model",
    f"{FROM_SCRIPT} --model gpt-2.2b": "--model gpt-2.2b and --from-script both describe the model; give one",
    "estimate --jsonl rows --model gpt-2.2b": "--jsonl and --model: the rows hold all that it says; leave one out",
    "estimate --jsonl rows --profile p.json": "--jsonl and --profile: a profile is of one model",
    **{
        f"{ESTIMATE} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw {more}": said
        for more, said in {
            "--delay-correction lead --delay-lead -1": "--delay-lead -1: give a number of at least 0",
            "--delay-correction lead --delay-lead 0": "--delay-lead 0: give a number above 0",
            "--delay-correction lead --delay-lead x": "--delay-lead x: give a number",
            "--delay-correction lead --adam-beta1 abc": "--adam-beta1 abc: give a number from 0 to 1",
            "--delay-correction bogus": "--delay-correction bogus: choose one of none, lead, update-lead",
            "--delay-lead 1": "--delay-lead does not work with --pipeline-schedule 2bw",
        }.items()
    },
    f"{PLAN} --explain 2bw --json": "--explain says why in words, --json prints the plan; leave one out",
    f"{PLAN} --mixpipe-k 4": "--mixpipe-k: only mixpipe has it, which is not searched; leave it out, or add mixpipe",
    f"{PLAN} --pipeline-schedule gpipe --pipeline-gradient-buffers 1": "--pipeline-gradient-buffers: only 2bw has it",
    f"{PLAN} --explain=": "unknown schedule ''",
    f"{PLAN} --plot p.png": "--plot p.png: it is an SVG; give a name ending in .svg",
    f"{PLAN} --hidden 4": "--hidden is neither an option of this command nor a flag that describes a model",
    f"{PLAN} stray": "stray is neither an option of this command nor a flag",
    f"{PLAN} --swiglu stray": "stray is neither an option of this command nor a flag",
    f"{PLAN} --hidden-size 4 stray": "stray is neither an option of this command nor a flag",
    f"{PLAN} --sample-efficiency 0": "sample_efficiency 0: give a number above 0",
    f"{PLAN} --sample-efficiency 95": "sample_efficiency 95: give a number above 0 and up to 2, such as 0.9",
    f"{PLAN} --from-script run.sh": "--model gpt-2.2b and --from-script both describe the model; give one of them",
    f"{PLAN} --ignore seed": "--script-args and --ignore say how to read --from-script; give that too, or leave them",
    f"{PLAN} --sample-efficiency nan": "sample_efficiency nan: give a number above 0",
    f"{PLAN} --synchronous-warmup-fraction 1": "synchronous_warmup_fraction 1.0: give a share from 0 to below 1",
    f"{PLAN} --pipeline-gradient-buffers 3": "--pipeline-gradient-buffers 3: there are 1 or 2; use 2",
    f"{PLAN} --pipeline-extra-in-flight 9": "--pipeline-extra-in-flight 9: above 3, transfers would wait for each",
    f"{PLAN} --pipeline-schedule mixpipe,2bw --mixpipe-k 3": "--mixpipe-k 3: it is even; use 2",
    f"{PLAN} --synchronous-warmup-fraction 0.1 --sample-efficiency auto": "auto chooses the share; leave one out",
    f"{PLAN} --delayed-microbatches-fraction 0": "delayed_microbatches_fraction 0.0: give a share above 0",
    f"{PLAN} --delayed-microbatches-fraction 0.5 --sample-efficiency auto": "auto chooses the share; leave one out",
    f"{PLAN} --cost-model paper --sample-efficiency 0.9": "--cost-model paper has no --sample-efficiency; leave it",
    f"{PLAN} --cost-model paper --plot a.svg": "--cost-model paper has no --plot; leave it out",
    f"{PLAN.replace('512', '1' + '0' * 20)} --cost-model paper": "global_batch 100000000000000000000 is no count; give",
    f"{PLAN.replace('512', '1' + '0' * 400)} --cost-model mixpipe": "0000 is no count; give a whole number of at most",
    f"{PLAN} --explain 2bw:d{'9' * 5000}": "is none of dN, tN",
    f"{PLAN} --cost-model paper --fp32": "--cost-model paper has no --fp32; leave it out, or use default",
    f"{PLAN} --cost-model mixpipe --attention-backend flash": "--cost-model mixpipe has no --attention-backend; leave",
    f"{PLAN} --cost-model paper --no-sequence-parallel": "--cost-model paper has no --sequence-parallel; leave it out",
    f"{PLAN} --cost-model paper --use-distributed-optimizer": "has no --use-distributed-optimizer; leave it out",
    f"{PLAN} --cost-model paper --allow-fewer-microbatches": "has no --allow-fewer-microbatches; leave it out",
    f"{PLAN} --cost-model paper --pipeline-model-parallel-size 8": "has no --pipeline-model-parallel-size; leave it",
    f"{PLAN} --cost-model other": "--cost-model other: choose one of ",
    PLAN.replace("--global-batch-size 512", ""): "--global-batch-size is missing: the number of microbatches depends",
    f"{FROM_SCRIPT} --gpus 0": "gpus 0: give a whole number of at least 1",
    f"{PLAN} --json --flags-only": "--flags-only and --json exclude each other; leave one out",
    f"{PLAN} --gpus": "--gpus has no value; give one",
    f"{PLAN} --exp-avg-dtype bf16": "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer; give it, or use fp32",
    f"{PLAN} --use-precision-aware-optimizer --optimizer sgd": "--use-precision-aware-optimizer is a distributed Adam; "
    "leave it out, or --optimizer and --no-use-distributed-optimizer",
    f"{PLAN} --nodes=--": "--nodes has no value; give one",
    f"{PLAN} --synchronous-warmup-fraction=--": "--synchronous-warmup-fraction has no value; give one",
    f"{PLAN} --synchronous-warmup-fraction x": "--synchronous-warmup-fraction x: give a number",
    f"{PLAN} --top 0": "--top 0: give a whole number of at least 1",
    f"{PLAN} --explain 2bw:z9": "'z9' is none of dN",
    f"{PLAN} --explain 2bw:d2,d4": "layout '2bw:d2,d4': 'd4' says what another part says; leave one out",
    f"{PLAN} --explain 2bw:d2,selective,block2": "'block2' says what another part says; leave one out",
    f"{PLAN} --pipeline-schedule 4bw": "unknown schedule '4bw'; choose one of 2bw",
    f"{PLAN} --tensor-model-parallel-size 1,x": "--tensor-model-parallel-size 'x': give whole numbers",
    f"{PLAN} --moe-token-dispatcher-type flex": "-type flex: gpt-2.2b has no experts; leave it out",
    f"{PLAN} --moe-flex-dispatcher-backend deepep": "-backend is of --moe-token-dispatcher-type flex; give that, too",
    f"{PLAN_FLEX} --expert-model-parallel-size 1": "no ranks share the experts; leave one out",
    f"{PLAN} --optimizer adam,sgd": "--optimizer adam,sgd: a run has one; give adam, or plan once for each",
    f"{PLAN} --micro-batch-size 0": "--micro-batch-size 0: give whole numbers of at least 1",
    f"{PLAN} --recompute-granularity all": "--recompute-granularity 'all': give none, selective, full",
    f"{PLAN} --tensor-model-parallel-size 3": "64 GPUs of a stage; use --tensor-model-parallel-size 2",
    f"{PLAN} --pipeline-schedule 2bw --pipeline-extra-in-flight 9": "--pipeline-extra-in-flight 9: above 3, transfers",
    f"{PLAN.replace('--model gpt-2.2b', FLAGS)} --squared-relu": "--squared-relu has no kernel that is fused",
    f"{PLAN.replace('--model gpt-2.2b', FLAGS)} --encoder-seq-length 512": "leave out --encoder-seq-length",
    f"{PLAN} --bf16": "precision bf16: v100-16gb has no bf16; use fp16",
    f"{PLAN} --flags-only --plot /nowhere/a.svg": "cannot write /nowhere/a.svg: No such file",
    "plan --model gpt-1t --cluster dgx-a100 --global-batch-size 64": "uniform3,sp needs 2116.3 GiB of 79.25",
    f"plan {FLAGS} --num-attention-heads 7 --cluster dgx-a100 --global-batch-size 8": (
        "--num-attention-heads 7 does not divide --hidden-size 1024"
    ),
    "plan --model llama3-8b --cluster dgx-a100 --global-batch-size 8 --fp8-recipe delayed": (
        "fp8 delayed: a100-80gb has no products in 8 bits; leave --fp8-format and --fp8-recipe out"
    ),
    f"{ESTIMATE} --micro-batch-size -1": "--micro-batch-size -1: give a whole number of at least 1",
    "plan --cluster dgx-a100 --global-batch-size 8": "--num-layers is missing",
    "plan --model gpt-1t --global-batch-size 8": "--cluster is missing",
    ESTIMATE.replace("--cluster dgx-a100", ""): "--cluster is missing",
    f"{ESTIMATE} --tensor-model-parallel-size 3": "gpus 4 is no multiple of tensor x context x pipeline = 3; use 3",
    f"{ESTIMATE} --from-script /nowhere.sh": "--from-script /nowhere.sh: No such file or directory",
    f"{ESTIMATE} --pipeline-schedule 2bw gpipe": "--pipeline-schedule 2bw gpipe: it takes one value; leave out 'gpipe'",
    f"{ESTIMATE} --recompute-granularity selective x": "selective x: it takes one value; leave out 'x'",
    ESTIMATE.replace("estimate", "estimate stray"): "stray is no option of this command, and no flag of Megatron's;",
    f"estimate {SCRIPTS / 'conditions.sh'} --cluster dgx-a100": "conditions.sh, if its flags are meant",
    f"{PLAN} --verify-top 1 --run-args '--a": "--run-args '--a: no closing quotation; write it as for a shell",
    f"{ESTIMATE} --num-experts 4 --moe-aux-loss-coeff 0.1 x": "--moe-aux-loss-coeff x: give a number of at least 0",
    f"{ESTIMATE} --num-experts 4 --moe-router-load-balancing-type aux_loss x": "-type x: choose one of aux_loss",
    f"{ESTIMATE} --jsonl rows": "--jsonl and --num-layers: the rows hold all that it says",
    "estimate --jsonl /nowhere": "--jsonl /nowhere: No such file or directory",
}


def test_flags_with_several_values_are_printed_with_all(capsys: pytest.CaptureFixture[str]):
    balanced = "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2"
    mixture = f"{FLAGS} --num-experts 4 --disable-bias-linear {balanced} --cluster dgx-a100 --global-batch-size 8"
    for command in (f"plan {mixture} --flags-only", f"estimate {mixture} --micro-batch-size 1 --json"):
        code, printed, _ = run(capsys, command)
        assert code == 0
        assert balanced in printed.replace('", "', " ")


def test_a_pattern_is_printed_as_megatron_reads_it(capsys: pytest.CaptureFixture[str]):
    words = f"plan {FLAGS} --num-experts 4 --disable-bias-linear --cluster dgx-a100 --global-batch-size 8".split()
    assert main([*words, "--flags-only", "--moe-layer-freq", "([0]*1 + [1]*7)"]) == 0
    assert "--moe-layer-freq ([0]*1+[1]*7) " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--run-args", "--a 'b c'"], ["--run-args", "--a"], ["--run-args=--a"]])
def test_flags_in_one_string(words: list[str], monkeypatch: pytest.MonkeyPatch):
    """Also one without a value, which argparse would take for an option."""
    seen: list[list[str]] = []

    def measured(plan: object, choices: object, script: object, more_flags: list[str]) -> NoReturn:
        seen.append(more_flags)
        raise PlanError("enough")

    monkeypatch.setattr(verify, "measured", measured)
    assert main([*PLAN.replace("--nodes 8", "--nodes 1").replace("512", "8").split(), "--verify-top", "1", *words]) == 2
    assert seen == [shlex.split(words[-1].removeprefix("--run-args="))]


def test_what_the_estimate_leaves_out_of_layers_of_torch_in_fp32(capsys: pytest.CaptureFixture[str]):
    in_fp32 = ESTIMATE.replace(" --bf16", "")
    assert "which are in TF32" in words_of(run(capsys, f"{in_fp32} --transformer-impl local")[1])
    for command in (f"{ESTIMATE} --transformer-impl local", in_fp32):
        assert "TF32" not in run(capsys, command)[1]


def test_gamma_may_be_0(capsys: pytest.CaptureFixture[str]):
    code, printed, _ = run(capsys, f"{ON_ONE_NODE} --pipeline-schedule mixpipe --mixpipe-gamma 0 --flags-only")
    assert code == 0
    assert "--pipeline-schedule mixpipe" in printed


@pytest.mark.parametrize("command", BAD)
def test_nonsense_gets_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str], command: str):
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "")
    (message,) = err.splitlines()
    assert message.startswith("megatron-2bw: error: ")
    assert BAD[command] in message
    assert not Path("a.svg").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node 0 of"),
        ({"inter_node_gb_s": -3.1}, "inter_node_gb_s -3.1 of"),
        ({"inter_node_gb_s": "fast"}, "inter_node_gb_s 'fast': give a number"),
        ({"gpus_per_node": 8.5}, "gpus_per_node 8.5: give a whole number"),
        ({"gpus_per_node": True}, "gpus_per_node True: give a whole number"),
        ({"gpu": "v100"}, "unknown gpu 'v100'; choose one of v100-"),
        ({"gpu": "A100"}, "unknown gpu 'A100'; choose one of a100-"),
        ({"gpu": None}, "gpu is missing; give a name"),
        ({"gpu": ["a100-80gb", "v100-16gb"]}, "and all GPUs are of one kind; give a name"),
        ({"gpu": {"memory_gb": 16}}, "gpu: peak_tflops is missing; give a number"),
        ({"intra_node": 3}, "unknown key 'intra_node'; did you mean 'intra_node_gb_s'?"),
        ({"profiled": 3}, "intra_node_gb_s, inter_node_gb_s, group_gb_s\n"),
        ({"group_gb_s": {"2": 25}}, "group_gb_s {'2': 25}: give a list"),
        ({"group_gb_s": [[2, 25], [4]]}, "group_gb_s [4]: give a list of 2"),
        ({"group_gb_s": [[2.5, 25]]}, "group_gb_s 2.5: give a whole number"),
        ({"group_gb_s": [[4, 25], [2, 25]]}, "group_gb_s [4, 2] of mine: give more ranks each time, 2 at least"),
        ({"group_gb_s": [[1, 25]]}, "group_gb_s [1] of mine: give more ranks each time, 2 at least"),
        ({"group_gb_s": [[2, 200]]}, "group_gb_s 200 of mine, of 2 ranks: give a number from 1e-09 to intra_node_gb_s"),
        ({"whole_node": 3}, "unknown key 'whole_node'; did you mean"),
        ({"profile": 3}, "unknown key 'profile'; give the file of a profile as --profile FILE"),
        ({"inter_node_gb_s": None}, "inter_node_gb_s None: give a number"),
        ({"inter_node_gb_s": float("inf")}, "inter_node_gb_s inf of mine: give a number from 1e-09 to 1e+12"),
        (
            {"gpu": {"memory_gb": 16, "peak_tflops": 1, "hbm_gb_s": 1e-320, "nvlink_gb_s": 1}},
            ".json: give a number from 1e-09 to 1e+12",
        ),
    ],
)
def test_bad_clusters(capsys: pytest.CaptureFixture[str], tmp_path: Path, values: dict[str, object], message: str):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"gpu": "v100-16gb", "gpus_per_node": 8, "inter_node_gb_s": 3, **values}))
    code, _, err = run(capsys, f"plan --model gpt-2.2b --cluster {file} --global-batch-size 64")
    assert code == 2
    assert str(file) in err or "unknown gpu" in err
    assert message in err


@pytest.mark.parametrize("text", ["{", "", "[]", "3", '{"num_layers": 3,}', "\udcff"])
def test_malformed_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str):
    file = tmp_path / "model.json"
    file.write_text(text, errors="surrogateescape")
    code, _, err = run(capsys, f"plan --model {file} --cluster dgx-a100 --global-batch-size 64")
    assert (code, err.count("\n")) == (2, 1)
    assert f"error: {file}" in err


def test_estimate_speaks_of_flags_and_names_those_that_it_does_not_read(capsys: pytest.CaptureFixture[str]):
    few = "--pipeline-schedule 2bw --pipeline-model-parallel-size 4 --global-batch-size 4"
    code, _, err = run(capsys, f"{ESTIMATE} {few}")
    assert (code, "2bw needs at least 3 on 4 stages; raise --global-batch-size to 6" in err) == (2, True)
    _, out, _ = run(capsys, f"{ESTIMATE} --seed 3 --tp-size 4 --recompute-modules mlp")
    assert "note: --tp-size: not among Megatron's flags, so not priced" in out
    assert "note: --seed: no price depends on it" in out
    full = f"{PLAN} --recompute-granularity full --recompute-modules mlp"
    assert "--recompute-modules is of --recompute-granularity selective; leave one out" in run(capsys, full)[2]
    assert "begins with no schedule; write such as 2bw:d2,t1" in run(capsys, f"{PLAN} --explain d2,t1")[2]


LAUNCH = (
    "torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads "
    "32 --seq-length 4096 --max-position-embeddings 4096 --tokenizer-type Llama2Tokenizer --bf16 --micro-batch-size 1 "
    "--global-batch-size 512 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --optimizer sgd "
    "--num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --swiglu --disable-bias-linear --msamp --lr 1e-4"
)


def test_a_plan_for_a_launch_script(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Its model, batch, GPUs and what a search leaves as it is; flags behind it win, and its layout counts nothing."""
    script = tmp_path / "run.sh"
    script.write_text(LAUNCH)
    command = f"plan --from-script {script} --cluster dgx-a100"
    code, out, _ = run(capsys, f"{command} --json")
    found = json.loads(out)
    assert (code, found["global_batch"], found["cluster"]["nodes"]) == (0, 512, 4)
    assert (found["model"]["num_layers"], found["model"]["vocab_size"]) == (32, 32000)
    best = found["choices"][0]["layout"]
    assert (best["precision"], best["optimizer"]) == ("bf16", "sgd")
    stale = {"--num-layers-per-virtual-pipeline-stage", "--sequence-parallel"}.difference(
        found["choices"][0]["flags"].split()
    )
    assert found["notes"] == [
        "no --vocab-size: priced with 32,000 tokens, those of Llama2Tokenizer as published; give yours",
        "--msamp: not among Megatron's flags, so not priced",
        f"take {', '.join(sorted(stale))} out of the script: the plan has another layout",
    ]
    changed = f"{command} --fp16 --global-batch-size 64 --gpus 16 --vocab-size 50000 --optimizer adam"
    found = json.loads(run(capsys, f"{changed} --ignore msamp --json")[1])
    assert (found["global_batch"], found["cluster"]["nodes"], found["model"]["vocab_size"]) == (64, 2, 50000)
    assert found["choices"][0]["layout"]["precision"] == "fp16"
    assert found["choices"][0]["layout"]["optimizer"] == "adam"
    out, silent = found["notes"]
    assert {"--bf16", "--num-layers-per-virtual-pipeline-stage"} <= set(re.split("[ ,]+", out))
    assert silent.startswith("--optimizer: planned without;")
    assert "note: --msamp" in run(capsys, f"{command} --flags-only")[2]
    assert "note: --msamp" in run(capsys, command)[1]


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (("--global-batch-size 512", ""), "", "--global-batch-size is missing: the number of microbatches depends"),
        (("--seq-length 4096", ""), "", "--seq-length is missing: the costs depend on it"),
        (("--msamp", "--num-key-value-heads 8"), "", "give --group-query-attention --num-query-groups in its place"),
        (("--msamp", "--swiglu 8"), "", "--swiglu 8: it takes no value"),
        (("", ""), "--global-batch-size 0", "--global-batch-size 0: give a whole number of at least 1"),
        (("", ""), "--recompute-activations", "--recompute-activations is neither an option of this command nor"),
        (("", ""), "--optimizer sgd --use-precision-aware-optimizer", "is a distributed Adam; leave it out"),
        (("--bf16", "--bf16 --lora-r 4 --deepspeed"), "", "; to price the rest, give --ignore deepspeed,lora-r"),
        (("--msamp", "--position-embedding-type alibi"), "", "(a flag behind --from-script FILE wins over the"),
        (
            ("--lr 1e-4", f"; {LAUNCH} --optimizer adam"),
            "",
            "2 different training commands, optimizer sgd or adam; leave one, or give its flags",
        ),
        (
            ("--msamp", "--fp8-format hybrid"),
            "--bf16 --pipeline-schedule 2bw",
            "2bw changes weights whose copies in 8 bits",
        ),
    ],
    ids=str,
)
def test_a_launch_script_that_cannot_be_planned(
    change: tuple[str, str], more: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    script = tmp_path / "run.sh"
    script.write_text(LAUNCH.replace(*change))
    code, _, err = run(capsys, f"plan --from-script {script} --cluster dgx-h100 {more}")
    assert (code, message in err) == (2, True), err


def test_the_papers_planners_say_what_to_take_out(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(LAUNCH.replace("--msamp ", ""))
    for more in ("", " --flags-only"):
        plan = f"plan --from-script {script} --cluster dgx-h100 --cost-model paper{more}"
        code, out, err = run(capsys, plan)
        assert (code, "take --num-layers-per-virtual-pipeline-stage" in out + err) == (0, True), out + err


def test_flags_of_other_programs_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """All that are refused at once; those of the launcher are its own."""
    script = tmp_path / "run.sh"
    script.write_text(LAUNCH.replace("--msamp", "--fp8-hybrid --glu-activation x --optimizer adam"))
    command = f"estimate --from-script {script} --cluster dgx-h100"
    assert "--fp8-hybrid: no flag of today's Megatron; give --fp8-format hybrid in its place; --glu-act" in (
        err := run(capsys, command)[2]
    )
    assert "or behind a script with --ignore fp8-hybrid,glu-activation" in err
    out = run(capsys, f"{command} --ignore fp8-hybrid,glu-activation --fp8-format hybrid --tp-size 4")[1]
    assert [line for line in out.splitlines() if line.startswith("note:")] == [
        "note: no --vocab-size: priced with 32,000 tokens, those of Llama2Tokenizer as published; give yours",
        "note: --tp-size: not among Megatron's flags, so not priced",
    ]


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ("--model mixtral-8x7b", ["--pipeline-schedule inter-layer", "--context-parallel-size", "--expert-tensor"]),
        ("--model llama2-7b --pipeline-schedule 2bw --context-parallel-size 1,2", []),
        ("--model llama3-8b", ["--pipeline-schedule inter-layer, pipedream, gems, chimera, mixpipe"]),
        ("--model bert-2.2b", ["--pipeline-schedule inter-layer"]),
    ],
)
def test_a_plan_says_what_it_did_not_try(more: str, left_out: list[str], capsys: pytest.CaptureFixture[str]):
    command = f"plan {more} --cluster dgx-h100 --gpus 16 --global-batch-size 64 --micro-batch-size 1"
    found = json.loads(run(capsys, f"{command} --json")[1])["not_tried"]
    assert len(found) == len(left_out)
    assert all(map(str.startswith, found, left_out))
    assert ("Not tried unless asked for: " in run(capsys, command)[1]) == bool(left_out)


LEAN = LAUNCH.replace("--num-layers-per-virtual-pipeline-stage 2 --sequence-parallel ", "").replace("--msamp ", "")


@pytest.mark.parametrize(
    ("behind", "more", "notes"),
    [
        ("", "", []),
        ("--moe-token-dispatcher-type flex", "", []),
        (f"; {LEAN} --global-batch-size 256", "--global-batch-size 64", []),
        ("--sequence-parallel --bf16", "--tensor-model-parallel-size 1", ["take --sequence-parallel out"]),
        ("--step-batch-size-schedule '0:256 1B:512'", "", ["take --step-batch-size-schedule out of the"]),
        ("--microbatch-group-size-per-virtual-pipeline-stage 16", "", ["take --microbatch-group-size"]),
        ("--defer-embedding-wgrad-compute", "--pipeline-schedule 2bw", ["take --defer-embedding-wgrad-compute out"]),
        ("", "--fp16", ["take --bf16 out of the script"]),
        ("--use-flash-attn", "--attention-backend unfused", ["--use-flash-attn: planned without; take that out of"]),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "", ["--cross-entropy-fusion-impl: planned"]),
        ("--no-bias-swiglu-fusion --grad-reduce-in-bf16", "", []),
        ("--grad-reduce-in-bf16", "--fp16", ["take --grad-reduce-in-bf16, --bf16 out of the script"]),
        ("--num-distributed-optimizer-instances 2", "", ["take --num-distributed-optimizer-instances out of the"]),
        ("--yaml-cfg x --tensor-model-parallel-size 3", "--ignore yaml-cfg", []),
    ],
    ids=str,
)
def test_what_of_a_launch_script_does_not_go_with_its_plan(
    behind: str, more: str, notes: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    script = tmp_path / "run.sh"
    script.write_text(f"{LEAN} {behind}")
    code, out, err = run(capsys, f"plan --from-script {script} --cluster dgx-h100 --micro-batch-size 1 {more} --json")
    assert code == 0, err
    guess, *found = json.loads(out)["notes"]
    assert guess.startswith("no --vocab-size")
    assert len(found) == len(notes)
    assert all(map(str.startswith, found, notes)), found


SETTINGS = "--tp-comm-overlap --grad-reduce-in-bf16 --no-bias-swiglu-fusion"


def test_what_no_search_decides_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Of a launch script as of the command line: in the prices, and in the flags."""
    sizes = "--cluster dgx-h100 --tensor-model-parallel-size 4 --pipeline-schedule 1f1b-flush --json"
    script, times = tmp_path / "run.sh", []
    for settings in ("", SETTINGS):
        script.write_text(f"{LEAN} {settings}")
        for command in (f"plan --from-script {script}", f"plan --from-script {script} {settings}"):
            code, out, err = run(capsys, f"{command} {sizes}")
            assert code == 0, err
            best = json.loads(out)["choices"][0]
            assert set(settings.split()) <= set(best["flags"].split())
            times.append(best["time_s"])
    assert (times[0], times[2]) == (times[1], times[3])
    assert times[0] != times[2]


def test_weights_gathered_in_8_bits_need_products_in_8_bits(capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "plan --model gpt-2.2b --cluster dgx-h100 --global-batch-size 64 --fp8-param-gather")
    assert (code, "needs --fp8-recipe" in words_of(err)) == (2, True)


@pytest.mark.parametrize("more", ["", "--explain 2bw:d2,t1", "--cost-model paper", "--flags-only", "--json"])
def test_no_form_of_a_plan_hides_what_was_assumed(more: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(LAUNCH.replace("--bf16", "").replace("--nproc-per-node 8", "-m"))
    fewer = "" if "paper" in more else "--micro-batch-size 1"
    code, out, err = run(capsys, f"plan --from-script {script} --cluster dgx-a100 {fewer} {more}")
    assert code == 0, err
    said = words_of(out + err)
    assert "the script does not say how many GPUs" in said
    assert "tokens, those of Llama2Tokenizer" in said
    assert "--msamp: not among Megatron's flags" in said
    assert ("priced in fp32" in said) == ("paper" not in more)
