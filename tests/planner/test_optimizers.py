"""What other optimizers than Adam keep, and how long their updates take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.error_bars import error_bar
from megatron_2bw.planner.cost.muon import newton_schulz_s
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import layout_flags
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.pipeline.stages import Contents
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.search.search import search
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.inputs import sized
from megatron_2bw.planner.specs.layout import Layout, Optimizer, Precision
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.space import Space

DGX = CLUSTERS["dgx-h100"]
MACHINE = machine_of(DGX)
GPT = Model(num_layers=8, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=1024, num_query_groups=4)
EXPERTS = replace(GPT, num_experts=8, ffn_hidden_size=512, bias=False, tied=False)

FIRST = Contents(4, embedding=True)
"""On the first stage of `layout`."""


def layout(**changes) -> Layout:
    """Two stages."""
    return Layout(**({"schedule": "2bw", "pipeline": 2, "data": 1, "global_batch": 8} | changes))


def test_bytes_per_weight():
    """fp32 weights and one moment; of Muon and Lion two, for embeddings, norms and biases."""
    adam, sgd, lion, muon = (memory.stages(GPT, layout(optimizer=one)) for one in Optimizer)
    held = weights_of(GPT, 1)
    for stage in range(2):
        weights = held.of(Contents(4, embedding=stage == 0, final_norm=stage == 1, loss=stage == 1), GPT)
        biases = 1024 + 2 * 256 + 1024 + 4096 + 1024
        others = 1024 * 1024 + 4 * (biases + 4 * 1024) + (2 * 1024 if stage else 0)
        assert adam[stage].optimizer_bytes == 12 * weights
        assert sgd[stage].optimizer_bytes == 8 * weights
        assert lion[stage].optimizer_bytes == muon[stage].optimizer_bytes == 8 * weights + 4 * others
        assert adam[stage].gradients_bytes == muon[stage].gradients_bytes
    shards = layout(data=4, distributed_optimizer=True, global_batch=32)
    shared, whole = (
        memory.stages(EXPERTS, replace(shards, optimizer=Optimizer.MUON, distributed_optimizer=shares))[0]
        for shares in (True, False)
    )
    assert shared.optimizer_bytes == whole.optimizer_bytes / 4


def test_shards_of_whole_matrices_are_as_long_as_the_largest():
    """There are 16 on a stage; the rest of 64 replicas have nothing to update, and all have the buffer."""
    shards = layout(data=64, distributed_optimizer=True, global_batch=512)
    adam, muon = (memory.stages(GPT, replace(shards, optimizer=one))[1] for one in (Optimizer.ADAM, Optimizer.MUON))
    largest, matrices = 4096 * 1024, 4 * 1024 * (1024 + 2 * 256 + 1024 + 2 * 4096)
    padding = 64 * largest - matrices
    for part, width in (("weights_bytes", 2), ("older_weights_bytes", 2), ("gradients_bytes", 4)):
        assert getattr(muon, part) - getattr(adam, part) == width * padding
    assert muon.captured_gradients_bytes - adam.captured_gradients_bytes == 4 * padding / 64
    times = [costs.times_of(GPT, replace(shards, optimizer=one), DGX) for one in (Optimizer.LION, Optimizer.MUON)]
    longest_s = times[1].pipeline.update_s - times[0].pipeline.update_s
    of_three = newton_schulz_s(1024, 1024, MACHINE) + 2 * newton_schulz_s(256, 1024, MACHINE)
    assert longest_s == pytest.approx(max(of_three, newton_schulz_s(4096, 1024, MACHINE)), rel=1e-6)


def test_an_update_with_one_moment_moves_five_numbers_in_place_of_seven():
    weights = weights_of(GPT, 1).of(FIRST, GPT)
    adam, sgd, lion = (
        costs.times_of(GPT, layout(optimizer=one), DGX).pipeline.update_s
        for one in (Optimizer.ADAM, Optimizer.SGD, Optimizer.LION)
    )
    assert adam - sgd == pytest.approx(8 * weights / MACHINE.memory_bytes_per_s)
    others = weights_of(GPT, 1).others_of(FIRST, GPT)
    assert lion - sgd == pytest.approx(8 * others / MACHINE.memory_bytes_per_s)


def test_newton_schulz():
    """``5*(4*m^2*n + 2*m^3)`` operations, whichever side is longer."""
    flops = 5 * (4 * 4096**2 * 16384 + 2 * 4096**3)
    assert newton_schulz_s(4096, 16384, MACHINE) == pytest.approx(flops / MACHINE.flops_per_s, rel=0.05)
    assert newton_schulz_s(16384, 4096, MACHINE) == newton_schulz_s(4096, 16384, MACHINE)


@pytest.mark.parametrize("data", [1, 4])
def test_muon_orthogonalizes_every_matrix(data: int):
    """Queries, keys and values apart; of 8 experts, those of one rank; replicas share them out."""
    sizes = {"data": data, "tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1}
    one = layout(**sizes, distributed_optimizer=data > 1, global_batch=8 * data)
    muon, lion = (
        costs.times_of(EXPERTS, replace(one, optimizer=kind), sized(DGX, gpus=one.gpus)).pipeline.update_s
        for kind in (Optimizer.MUON, Optimizer.LION)
    )
    rest_s = sum(newton_schulz_s(*shape, MACHINE) for shape in [(512, 1024), (128, 1024), (128, 1024), (1024, 512)])
    experts_s = 4 * sum(newton_schulz_s(*shape, MACHINE) for shape in [(512, 1024), (1024, 512)])
    assert muon - lion == pytest.approx(4 * (rest_s / data + experts_s / data))


def test_flags_and_rows():
    one = layout(optimizer=Optimizer.MUON)
    assert "--optimizer muon" in " ".join(layout_flags(GPT, one))
    assert "--optimizer" not in layout_flags(GPT, layout())
    row = {"model": "gpt-1.3b", "cluster": "dgx-h100", "gpus": 8, "pp": 2, "mbs": 1, "gbs": 16, "bf16": True}
    adam, muon, older = (predicted({**row, "optimizer": kind}) for kind in ("adam", "muon", "dist_muon"))
    needed = [one["stages"][0]["optimizer_bytes"] for one in (adam, muon, older)]
    assert needed[0] > needed[1] > needed[2]
    assert predicted({**row, "optimizer": "soap"})["notes"] == [
        "--optimizer: priced with Adam's state, a fifth of SOAP's"
    ]


def test_no_muon_in_fp16():
    message = "optimizer muon: Megatron has it in bf16 and fp32 alone; use bf16 or fp32, or optimizer adam"
    assert str(problem(GPT, layout(optimizer=Optimizer.MUON, precision=Precision.FP16))) == message
    with pytest.raises(PlanError, match=message):
        search(GPT, CLUSTERS["p3.16xlarge"], 16, Space(optimizer=Optimizer.MUON))
    space = Space(optimizer=Optimizer.MUON, precision=Precision.FP32)
    assert search(GPT, sized(CLUSTERS["p3.16xlarge"], gpus=8), 16, space).choices


def test_no_shards_of_muon_in_fp32():
    alone = layout(optimizer=Optimizer.MUON, precision=Precision.FP32, fused_attention=False, data=2, global_batch=16)
    assert problem(GPT, alone) is None
    assert str(problem(GPT, replace(alone, distributed_optimizer=True))) == (
        "distributed_optimizer with optimizer muon: Megatron has it in bf16 alone; switch it off, or use bf16"
    )
    space = Space(optimizer=Optimizer.MUON, precision=Precision.FP32)
    choices = search(GPT, sized(DGX, gpus=4), 16, space).choices
    assert choices
    assert not any(choice.layout.distributed_optimizer for choice in choices)


def test_a_plan_for_muon():
    plan = search(GPT, sized(DGX, gpus=4), 16, Space(optimizer=Optimizer.MUON))
    assert {choice.layout.optimizer for choice in plan.choices} == {Optimizer.MUON}
    by_adam = search(GPT, sized(DGX, gpus=4), 16)
    assert plan.best.iteration.time_s > by_adam.best.iteration.time_s


def test_the_error_bar_of_muon_is_assumed():
    large = MODELS["llama2-7b"]
    batches = {optimizer: costs.iteration(large, layout(optimizer=optimizer), DGX) for optimizer in Optimizer}
    assert [one for one, batch in batches.items() if "no run with Muon" in batch.error_source] == [Optimizer.MUON]


@pytest.mark.parametrize("model", ["gpt-2.2b", "deepseek-v3"])
@pytest.mark.parametrize("cluster", ["p3dn.24xlarge", "dgx-a100", "dgx-h100"])
def test_the_error_bars_of_what_no_published_run_is_like_are_assumed(model: str, cluster: str):
    run = layout(precision=Precision.FP32, fused_attention=False)
    sources = {
        optimizer: error_bar(CLUSTERS[cluster], MODELS[model], replace(run, optimizer=optimizer)).source
        for optimizer in (Optimizer.ADAM, Optimizer.MUON)
    }
    assert sources[Optimizer.ADAM] == "assumed: no run in fp32 was compared"
    assert sources[Optimizer.MUON].startswith("assumed: no run with Muon")


def test_a_plan_with_a_precision_aware_optimizer():
    """It is a distributed one, even of a single replica."""
    state = AdamState(first_moment="bf16", second_moment="bf16")
    plans = [search(GPT, sized(DGX, gpus=4), 16, Space(adam_state=one)) for one in (None, state)]
    usual, aware = (plan.choices[0] for plan in plans)
    assert {choice.layout.adam_state for choice in plans[1].choices} == {state}
    assert all(choice.layout.distributed_optimizer for choice in plans[1].choices)
    assert "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16" in " ".join(
        layout_flags(GPT, aware.layout)
    )
    assert aware.iteration.time_s <= usual.iteration.time_s


def test_what_an_update_of_a_state_in_16_bits_moves():
    """Per weight: 4 bytes less per moment; and weights are read, which with their remainder are no more to write.

    A moment in fp16 is copied to fp32, scaled, updated, looked through, scaled and copied back: 9 times 4 bytes.
    """
    shape = {"distributed_optimizer": True, "data": 1, "global_batch": 8}
    states = None, AdamState(first_moment="bf16", second_moment="bf16"), AdamState(first_moment="fp16")
    usual, halved, copied = (
        costs.times_of(GPT, layout(**shape, adam_state=state), DGX).pipeline.update_s for state in states
    )
    weight_s = weights_of(GPT, 1).of(FIRST, GPT) / MACHINE.memory_bytes_per_s
    assert usual - halved == pytest.approx((4 + 4 + 4 - 2) * weight_s)
    assert copied - usual == pytest.approx((9 * 4 - 4 - 4 + 2) * weight_s)
