"""A profile in place of the cost model."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_2bw.cli import main
from megatron_2bw.planner.commands.arguments import check_size
from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.model_flags import model_flags
from megatron_2bw.planner.measure import profiling
from megatron_2bw.planner.measure.profile import AllReduce, Block, Profile, Setting, Update
from megatron_2bw.planner.search.finder import price
from megatron_2bw.planner.search.search import search
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Fp8, Layout, Optimizer, Precision, Receives, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.space import Space

MODEL = Model(num_layers=8, hidden_size=256, num_attention_heads=4, seq_length=128, vocab_size=1000, dropout=False)
LAYER_S, EMBEDDING_S, LOSS_S = (0.010, 0.020), (0.001, 0.002), (0.004, 0.006)
"""Forward and backward of one sample."""


def block(microbatch: int, recompute: Recompute) -> Block:
    again_s = LAYER_S[0] if recompute is Recompute.FULL else 0.0
    return Block(
        tensor=1,
        microbatch=microbatch,
        recompute=recompute,
        layer_forward_s=microbatch * LAYER_S[0],
        layer_backward_s=microbatch * (LAYER_S[1] + again_s),
        layer_kept_bytes=1,
        embedding_forward_s=microbatch * EMBEDDING_S[0],
        embedding_backward_s=microbatch * EMBEDDING_S[1],
        loss_forward_s=microbatch * LOSS_S[0],
        loss_backward_s=microbatch * LOSS_S[1],
    )


@pytest.fixture
def profile() -> Profile:
    return Profile(
        model=MODEL,
        setting=Setting(ranks=4, precision=Precision.FP32, fused_attention=False, sequence_parallel=False),
        device="machine",
        memory_gb=8.0,
        versions="torch 1",
        date="2026-11-22",
        blocks=[
            block(microbatch, recompute) for microbatch in (1, 2) for recompute in (Recompute.NONE, Recompute.FULL)
        ],
        updates=[Update(tensor=1, weights=1_000_000, time_s=0.01)],
        all_reduces=[
            AllReduce(ranks=4, size_bytes=1, time_s=0.001),
            AllReduce(ranks=4, size_bytes=2**20, time_s=0.001 + 1.5 * 2**20 / 1e9),
        ],
    )


def layout(**more: object) -> Layout:
    defaults = {"schedule": "gpipe", "pipeline": 1, "data": 1, "global_batch": 4, "precision": Precision.FP32}
    return Layout(**(defaults | {"fused_attention": False} | more))


def test_a_file_keeps_all(profile: Profile, tmp_path: Path):
    path = tmp_path / "profile.json"
    profile.save(path)
    loaded = Profile.load(path)
    for name in Profile.__slots__:
        assert getattr(loaded, name) == getattr(profile, name)


@pytest.mark.parametrize(("recompute", "again_s"), [(Recompute.NONE, 0.0), (Recompute.FULL, LAYER_S[0])])
def test_a_batch_is_the_sum_of_what_was_measured(profile: Profile, recompute: Recompute, again_s: float):
    per_sample_s = 8 * (sum(LAYER_S) + again_s) + sum(EMBEDDING_S) + sum(LOSS_S)
    chosen = layout(microbatch=2, recompute=recompute)
    time_s = costs.iteration(MODEL, chosen, profile.cluster()).time_s
    assert time_s == pytest.approx(4 * per_sample_s + MODEL.parameters * 1e-8, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "stretch"),
    [("gpipe", 1, 2), ("gpipe", 4, 18 / 16), ("gpipe", 64, 258 / 256), ("2bw", 4, 1), ("2bw", 64, 1)],
)
def test_a_rank_that_waits_leaves_its_processor_to_others(
    profile: Profile, schedule: str, microbatches: int, stretch: float
):
    """Four ranks on two processors: one microbatch is alone on its way, many keep both processors busy."""
    shared = replace(profile, processors=2)
    chosen = layout(schedule=schedule, pipeline=4, global_batch=microbatches, receives=Receives.EARLY)
    alone, found = (costs.iteration(MODEL, chosen, one.cluster()) for one in (profile, shared))
    work_s = (1 - alone.bubble_ratio) * alone.time_s
    links_s = 2 * microbatches * 0.75 * costs.times_of(MODEL, chosen, profile.cluster()).pipeline.send_s
    assert found.time_s == pytest.approx(stretch * work_s + links_s, rel=0.05)
    assert sum(found.parts.values()) == pytest.approx(found.time_s)
    assert costs.iteration(MODEL, chosen, replace(profile, processors=4).cluster()) == alone


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b-flush", 1), ("megatron", 1), ("megatron", 2), ("2bw", 1)])
def test_a_microbatch_crosses_every_boundary_twice(profile: Profile, schedule: str, chunks: int):
    """Where ranks share processors, nobody computes for a rank that sends or receives."""
    slower_s, microbatches, stages = 0.003, 8, 4
    chosen = layout(schedule=schedule, pipeline=stages, global_batch=microbatches, chunks=chunks)
    shared = replace(profile, processors=2)
    late = [replace(one, time_s=one.time_s + slower_s) for one in shared.all_reduces]
    clusters = shared.cluster(), replace(shared, all_reduces=late).cluster()
    fast, slow = (costs.iteration(MODEL, chosen, cluster).time_s for cluster in clusters)
    norms_s = [costs.times_of(MODEL, chosen, cluster).pipeline.norm_s for cluster in clusters]
    crossed = 2 * microbatches * (stages * chunks - 1) / stages
    assert slow - fast == pytest.approx(crossed * slower_s + norms_s[1] - norms_s[0])


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_the_slowest_stage_has_one_processor_at_most(profile: Profile, schedule: str):
    uneven = layout(schedule=schedule, pipeline=4, global_batch=64, last_stage_layers=5, receives=Receives.EARLY)
    times_s = [
        costs.iteration(MODEL, uneven, replace(profile, processors=processors).cluster()).time_s
        for processors in (1, 2, 3, 4)
    ]
    assert times_s[3] == costs.iteration(MODEL, uneven, profile.cluster()).time_s
    assert times_s[2] >= 0.75 * times_s[3]
    for processors, time_s in enumerate(times_s, start=1):
        shared = replace(profile, processors=processors)
        assert 0.2 * time_s < costs.work_s(MODEL, uneven, shared.cluster()) <= time_s
    assert times_s == sorted(times_s)


def test_stages_share_the_layers(profile: Profile):
    times = costs.times_of(MODEL, layout(pipeline=4, schedule="2bw"), profile.cluster())
    forwards = [stage.forward_s for stage in (times.pipeline.first, times.pipeline.middle, times.pipeline.last)]
    assert forwards == pytest.approx([0.021, 0.020, 0.024])


def test_links_are_those_measured(profile: Profile):
    assert profile.link() == (pytest.approx(1e9), 0.001)
    cluster = profile.cluster()
    assert machine_of(cluster).link_bytes_per_s == pytest.approx(1e9)
    assert machine_of(cluster).collective_s == 0.001


def test_a_cluster_may_be_larger_than_what_was_measured(profile: Profile):
    """Layers as measured, network as given."""
    cluster = replace(profile.on(CLUSTERS["dgx-a100"]), nodes=4)
    assert costs.times_of(MODEL, layout(), cluster).works.layer.forward_s == LAYER_S[0]
    assert machine_of(cluster).network_bytes_per_s == machine_of(CLUSTERS["dgx-a100"]).network_bytes_per_s


def test_the_search_keeps_to_what_was_measured(profile: Profile):
    plan = search(MODEL, profile.cluster(), 16, profile.limited(Space()))
    assert {choice.layout.microbatch for choice in plan.choices} <= {1, 2}
    assert {choice.layout.tensor for choice in plan.choices} == {1}
    assert all(choice.layout.precision is Precision.FP32 for choice in plan.choices)


@pytest.mark.parametrize("name", ["precision", "fused_attention"])
def test_another_setting_is_refused(profile: Profile, name: str):
    other = {"precision": Precision.BF16, "fused_attention": True}
    with pytest.raises(PlanError, match=f"{name} .*: the profile was measured with"):
        profile.limited(Space(**{name: other[name]}))


@pytest.mark.parametrize(
    "other",
    [{"optimizer": Optimizer.SGD}, {"adam_state": AdamState(first_moment="bf16"), "distributed_optimizer": True}],
)
def test_another_optimizer_was_not_timed(profile: Profile, other: dict[str, object]):
    """Neither a search nor a price of one layout takes Adam's time for it."""
    asked = layout(pipeline=1, data=2, microbatch=1, **other)
    with pytest.raises(PlanError, match="a profile times Adam in fp32"):
        profile.limited(Space(optimizer=asked.optimizer, adam_state=asked.adam_state))
    with pytest.raises(PlanError, match="a profile times Adam in fp32"):
        price(MODEL, asked, profile.cluster())


def test_a_swiglu_that_is_not_fused_was_not_measured(profile: Profile):
    split = Split.of(layout(pipeline=1, microbatch=1, global_batch=4))
    assert profile.lacks(split) is None
    assert "fused_swiglu False" in profile.lacks(split._replace(fused_swiglu=False)).reason


@pytest.mark.parametrize(("name", "value"), [("fp8", Fp8.DELAYED), ("fused_loss", True), ("overlap_tensor", True)])
def test_what_needs_transformer_engine_was_not_measured(profile: Profile, name: str, value: object):
    split = Split.of(layout(pipeline=1, microbatch=1, global_batch=4))
    refused = profile.lacks(split._replace(**{name: value}))
    assert name in refused.reason
    assert "a profile is measured without" in refused.reason


def test_experts_that_ranks_split_otherwise_were_not_measured(profile: Profile):
    split = Split.of(layout(pipeline=1, microbatch=1, global_batch=4))._replace(tensor=2, expert_tensor=1)
    experts = replace(profile, model=replace(MODEL, num_experts=8))
    assert "expert_tensor 1: a profile is measured with that of tensor" in experts.lacks(split).reason
    assert "expert_tensor" not in experts.lacks(split._replace(expert_tensor=2)).reason
    assert "expert_tensor" not in profile.lacks(split).reason, "a model without experts"


def test_gradients_in_bf16_were_not_measured(profile: Profile):
    in_bf16 = replace(profile, setting=replace(profile.setting, precision=Precision.BF16))
    one = layout(pipeline=1, microbatch=1, global_batch=4, precision=Precision.BF16)
    assert in_bf16.lacks(Split.of(one)) is None
    assert "gradients in bf16" in in_bf16.lacks(Split.of(one.but(gradients_in_bf16=True))).reason


def test_a_plan_fuses_attention_in_fp16_if_the_measured_gpu_does(profile: Profile):
    """What it was measured in says nothing of what the GPU has."""
    setting = replace(profile.setting, precision=Precision.FP16, fused_attention=True)
    measured = replace(profile, setting=setting)
    assert search(MODEL, measured.cluster(), 16, measured.limited(Space())).best.layout.fused_attention
    with pytest.raises(PlanError, match="has no such kernels in fp16"):
        search(MODEL, replace(measured, has_bf16=False).cluster(), 16, measured.limited(Space()))


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ("--micro-batch-size 4", "--micro-batch-size 4, recompute none: the profile has"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2, --micro-batch-size 1"),
        ("--recompute-granularity selective", "no layout"),
        ("--gpus 8", "gpus 8: the profile was measured with 4 busy at once"),
    ],
)
def test_what_was_not_measured_has_no_layout(
    limit: str, named: str, files: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", *files, "--global-batch-size", "16", *limit.split()]) == 2
    assert named in capsys.readouterr().err


def test_a_combination_that_is_missing_is_left_out(profile: Profile):
    """As where the larger microbatch did not fit into memory."""
    profile.blocks = [b for b in profile.blocks if (b.microbatch, b.recompute) != (2, Recompute.FULL)]
    plan = search(MODEL, profile.cluster(), 16, profile.limited(Space()))
    seen = {(choice.layout.microbatch, choice.layout.recompute) for choice in plan.choices}
    assert (2, Recompute.NONE) in seen
    assert (2, Recompute.FULL) not in seen


@pytest.mark.parametrize("missing", ["blocks", "updates", "all_reduces"])
def test_a_profile_that_was_stopped_is_not_used(profile: Profile, missing: str):
    getattr(profile, missing).clear()
    for use in (profile.cluster, lambda: profile.on(CLUSTERS["dgx-a100"])):
        with pytest.raises(PlanError, match="not finished"):
            use()


def test_another_model_is_refused(profile: Profile):
    with pytest.raises(PlanError, match="hidden_size 512: the profile is of a model with 256"):
        costs.iteration(replace(MODEL, hidden_size=512, kv_channels=128), layout(), profile.cluster())
    costs.iteration(replace(MODEL, num_layers=16, name="deeper"), layout(), profile.cluster())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "model is missing"),
        ('{"model": {"hidden_size": 1}}', "num_layers is missing"),
        ("[", "no JSON"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str, named: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "broken.json"
    path.write_text(text)
    assert main(["plan", "--model", "gpt-2.2b", "--profile", str(path), "--global-batch-size", "8"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        (("blocks", 0), 5, "blocks 5"),
        (("blocks", 0, "tensor"), 0, "tensor 0: give a number above 0"),
        (("blocks", 0, "layer_forward_s"), -1.0, "layer_forward_s -1.0: give a number above 0"),
        (("blocks", 0, "layer_forward_s"), float("nan"), "layer_forward_s nan: give a number above 0"),
        (("updates", 0, "weights"), 0, "weights 0: give a number above 0"),
        (("all_reduces", 1, "time_s"), 0.0005, "the larger sum took no longer"),
        (("setting", "precision"), "fp8", "precision 'fp8'"),
        (("date",), 5, "date 5"),
        (("processors",), -1, "processors -1: give a whole number of at least 0"),
    ],
)
def test_a_broken_file_gets_one_message(
    where: tuple, value: object, named: str, files: list[str], capsys: pytest.CaptureFixture[str]
):
    path = Path(files[-1])
    values = json.loads(path.read_text())
    inner = values
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path.write_text(json.dumps(values))
    assert main(["plan", *files, "--global-batch-size", "16"]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def files(profile: Profile, tmp_path: Path) -> list[str]:
    """Options that name the model and, last, the profile."""
    path, model = tmp_path / "profile.json", tmp_path / "model.json"
    profile.save(path)
    model.write_text(json.dumps({name: getattr(MODEL, name) for name in Model.__slots__}))
    return ["--model", str(model), "--profile", str(path)]


def test_plan_and_estimate_read_it(files: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *files, "--global-batch-size", "16", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["choices"][0]
    flags = [*best["flags"].replace("--attention-backend unfused", "").split(), "--vocab-size", "1000"]
    assert main(["estimate", *files[2:], "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["time_s"] == best["time_s"]


def test_a_launch_script_may_set_what_was_not_measured(files: list[str], tmp_path: Path, capsys):
    script = tmp_path / "run.sh"
    sizes = "--vocab-size 1000 --micro-batch-size 1 --global-batch-size 16 --attention-backend unfused"
    unmeasured = "--tp-comm-overlap --fp8-param-gather --fp8-format hybrid"
    script.write_text(
        f"torchrun --nproc-per-node 4 pretrain_gpt.py {' '.join(model_flags(MODEL))} {sizes} {unmeasured}"
    )
    assert main(["plan", "--from-script", str(script), *files[2:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not set(unmeasured.split()) & set(plan["choices"][0]["flags"].split())
    assert "--tp-comm-overlap" in " ".join(plan["notes"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--verify-top 0", "--verify-top 0"),
        ("--verify-top 1 --explain 2bw:d2", "leave one out"),
        ("--script x.py", "--verify-top"),
        ("--verify-top 1 --script missing.py", "there is no missing.py"),
        ("--verify-top 1 --cost-model paper", "no --verify-top"),
    ],
)
def test_options_that_contradict_each_other(files: list[str], options: str, named: str, capsys):
    assert main(["plan", *files, "--global-batch-size", "16", *options.split()]) == 2
    assert named in capsys.readouterr().err


def test_several_nodes_cannot_be_verified_here(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "--model", "gpt-2.2b", "--cluster", "p3.16xlarge", "--nodes", "2", "--global-batch-size", "64"]
    assert main([*words, "--verify-top", "1"]) == 2
    assert "2 nodes" in capsys.readouterr().err


def test_fused_attention_is_measured_where_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[Setting] = []
    monkeypatch.setattr(profiling, "measure", lambda request, output: asked.append(request.setting))
    monkeypatch.setattr(profiling, "summary", lambda request, profile: [])
    for backend in ("flash", "fused", "unfused"):
        words = f"profile --model gpt-2.2b --gpus 2 --bf16 --attention-backend {backend} --output {tmp_path}/p.json"
        assert main(words.split()) == 0
    assert [setting.fused_attention for setting in asked] == [True, True, False]


def test_there_is_no_fused_attention_in_fp32(capsys: pytest.CaptureFixture[str]):
    assert main("profile --model gpt-2.2b --gpus 1 --attention-backend flash --output p.json".split()) == 2
    assert "fused attention: there are no such kernels in fp32; use bf16" in capsys.readouterr().err


@pytest.mark.parametrize(("experts", "count"), [(8, 1), (0, 0)])
def test_the_layers_that_are_measured_are_all_of_one_kind(profile: Profile, experts: int, count: int):
    """Whatever the model's pattern, which names more layers than there are."""
    given = {"given_flags": "--moe-layer-freq ([1]*8)"} if experts else {}
    request = profiling.Request(
        model=replace(MODEL, num_experts=experts, **given),
        setting=profile.setting,
        tensors=(1,),
        microbatches=(1,),
        recomputes=(Recompute.NONE,),
    )
    words = " ".join(request.words(1, Path("p.json")))
    assert words.count("--moe-layer-freq 1 ") == count
    assert words.rfind("--moe-layer-freq 1 ") >= words.rfind("--moe-layer-freq (")


def test_a_finished_profile_is_not_said_to_be_of_this_machine(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "p.json"
    profile.save(path)
    words = ["profile", *model_flags(MODEL), *"--vocab-size 1000 --gpus 4 --micro-batch-size 1,2".split()]
    words += ["--output", str(path)]
    assert main(words) == 0
    assert "nothing was measured: it is of 2026-11-22, machine, torch 1" in capsys.readouterr().err
    for others in (["--no-bias-gelu-fusion"], ["--run-args", "--no-masked-softmax-fusion"]):
        assert main([*words, *others]) == 2, others
        assert "of another model, setting or number of ranks" in capsys.readouterr().err


def test_a_cluster_says_what_connects_more_gpus_than_were_measured():
    check_size(Namespace(profile=Path("p.json"), cluster="dgx-a100"), CLUSTERS["dgx-a100"], 16)
