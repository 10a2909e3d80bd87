"""A profile in place of the cost model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_2bw.cli import main
from megatron_2bw.planner import costs
from megatron_2bw.planner.cluster import CLUSTERS
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.layout import Layout, Precision, Recompute
from megatron_2bw.planner.model import Model
from megatron_2bw.planner.profile import AllReduce, Block, Profile, Update
from megatron_2bw.planner.search import search
from megatron_2bw.planner.space import Space

MODEL = Model(num_layers=8, hidden_size=256, num_attention_heads=4, seq_length=128, vocab_size=1000, dropout=False)
LAYER_S, EMBEDDING_S, LOSS_S = (0.010, 0.020), (0.001, 0.002), (0.004, 0.006)
"""Forward and backward of one sample."""


def block(microbatch: int, recompute: Recompute) -> Block:
    again_s = LAYER_S[0] if recompute is Recompute.FULL else 0.0
    return Block(
        tensor=1,
        microbatch=microbatch,
        sequence_parallel=False,
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
        device="machine",
        memory_gb=8.0,
        ranks=4,
        precision=Precision.FP32,
        fused_attention=False,
        versions="torch 1",
        date="2026-11-22",
        blocks=[
            block(microbatch, recompute) for microbatch in (1, 2) for recompute in (Recompute.NONE, Recompute.FULL)
        ],
        updates=[Update(tensor=1, weights=1_000_000, time_s=0.01)],
        all_reduces=[
            AllReduce(ranks=4, size_bytes=0, time_s=0.001),
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


def test_stages_share_the_layers(profile: Profile):
    times = costs.times_of(MODEL, layout(pipeline=4, schedule="2bw"), profile.cluster())
    forwards = [stage.forward_s for stage in (times.pipeline.first, times.pipeline.middle, times.pipeline.last)]
    assert forwards == pytest.approx([0.021, 0.020, 0.024])


def test_links_are_those_measured(profile: Profile):
    assert profile.link() == (pytest.approx(1e9), 0.001)
    cluster = profile.cluster()
    assert costs.machine_of(cluster).link_bytes_per_s == pytest.approx(1e9)
    assert costs.machine_of(cluster).collective_s == 0.001


def test_a_cluster_may_be_larger_than_what_was_measured(profile: Profile):
    """Layers as measured, network as given."""
    cluster = replace(profile.on(CLUSTERS["dgx-a100"]), nodes=4)
    assert costs.times_of(MODEL, layout(), cluster).works.layer.forward_s == LAYER_S[0]
    assert costs.machine_of(cluster).network_bytes_per_s == costs.machine_of(CLUSTERS["dgx-a100"]).network_bytes_per_s


def test_the_search_keeps_to_what_was_measured(profile: Profile):
    plan = search(MODEL, profile.cluster(), 16, profile.limited(Space()))
    assert {choice.layout.microbatch for choice in plan.choices} <= {1, 2}
    assert {choice.layout.tensor for choice in plan.choices} == {1}
    assert all(choice.layout.precision is Precision.FP32 for choice in plan.choices)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (Space(microbatches=(4,)), "microbatches"),
        (Space(tensors=(2,)), "tensors"),
        (Space(recomputes=(Recompute.SELECTIVE,)), "recomputes"),
        (Space(precision=Precision.BF16), "precision"),
    ],
)
def test_what_was_not_measured_is_refused(profile: Profile, space: Space, named: str):
    with pytest.raises(PlanError, match=named):
        profile.limited(space)


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
def test_a_broken_file_is_named(tmp_path: Path, text: str, named: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "broken.json"
    path.write_text(text)
    assert main(["plan", "--model", "gpt-2.2b", "--profile", str(path), "--global-batch-size", "8"]) == 2
    assert named in capsys.readouterr().err


def test_plan_and_estimate_read_it(profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, model = tmp_path / "profile.json", tmp_path / "model.json"
    profile.save(path)
    model.write_text(json.dumps({name: getattr(MODEL, name) for name in Model.__slots__}))
    words = ["plan", "--model", str(model), "--profile", str(path), "--global-batch-size", "16", "--json"]
    assert main(words) == 0
    best = json.loads(capsys.readouterr().out)["choices"][0]
    assert main(["estimate", "--profile", str(path), "--json", *best["flags"].split(), "--vocab-size", "1000"]) == 0
    assert json.loads(capsys.readouterr().out)["time_s"] == best["time_s"]


def test_several_nodes_cannot_be_verified_here(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "--model", "gpt-2.2b", "--cluster", "p3.16xlarge", "--nodes", "2", "--global-batch-size", "64"]
    assert main([*words, "--verify-top", "1"]) == 2
    assert "2 nodes" in capsys.readouterr().err
