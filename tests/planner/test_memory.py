"""Memory per stage: against measurements and the papers' formulas, and by component."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_2bw.planner.memory import activations, memory
from megatron_2bw.planner.pipeline.stages import chunks_in_flight, contents_of
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.layout import Fp8, Layout, Precision, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.registry import build
from megatron_2bw.schedule.simulate import simulate

from . import measured, measured_vocabularies
from .interleaved import interleaved

MODEL = Model(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=1024, vocab_size=50257)
HALVED = AdamState(first_moment="bf16", second_moment="bf16")
LLAMA = replace(
    MODEL, num_query_groups=4, ffn_hidden_size=5504, swiglu=True, rmsnorm=True, bias=False, dropout=False, tied=False
)


def layout(**changes) -> Layout:
    """Some layout on 8 GPUs."""
    base = {"schedule": "1f1b-flush", "pipeline": 4, "data": 2, "tensor": 1, "microbatch": 2, "global_batch": 64}
    return Layout(**(base | changes))


@pytest.mark.parametrize("row", measured.memory(), ids=lambda row: row.name)
def test_measured(row: measured.Row):
    stages = memory.stages(row.model, row.layout)
    needed = stages[row.stage] if row.stage is not None else max(stages, key=lambda stage: stage.allocated_bytes)
    if measured.SCRATCH in row.name:  # Its experts are not nearly equally busy.
        assert 0.85 < needed.allocated_bytes / row.measured < 0.95
    else:
        bar = {measured.LLAMA: 0.035, "Mixtral": 0.05}.get(row.group, 0.025)
        assert needed.allocated_bytes == pytest.approx(row.measured, rel=bar)


@pytest.mark.parametrize("row", measured_vocabularies.memory(), ids=lambda row: row.name)
def test_pipelines_with_large_vocabularies(row: measured.Row):
    """None is said to fit in less than torch had allocated."""
    needed = max(stage.allocated_bytes for stage in memory.stages(row.model, row.layout))
    assert needed == pytest.approx(row.measured, rel=0.05)
    assert row.measured <= memory.largest(row.model, row.layout).total_bytes <= row.cluster.memory_bytes


@pytest.mark.parametrize("row", measured.mixtral_times(), ids=lambda row: row.name)
def test_gpus_of_mixtral(row: measured.Row):
    """Half as many, or twice, would have left another number of bytes allocated between batches."""
    (source,) = (
        one
        for one in measured.read("megatron_core_v0.19_golden_values.csv")
        if one["test_case"] in row.name and one["device"] == "H100"
    )
    lasting = {}
    for factor in (1, 2, 4):
        more = replace(row.layout, data=row.layout.data * factor // 2)
        if problem(row.model, more):
            continue
        last = memory.stages(row.model, more)[-1]
        lasting[factor] = last.weights_bytes + last.gradients_bytes + last.optimizer_bytes
    measured_bytes = float(source["mem_allocated_bytes_max"])
    assert lasting[2] == pytest.approx(measured_bytes, rel=0.06)
    assert all(abs(lasting[factor] / measured_bytes - 1) > 0.15 for factor in lasting.keys() - {2})


@pytest.mark.parametrize("row", measured.read("megatron_memory_estimator_checks.csv")[:4], ids=lambda row: row["tp"])
def test_the_model_of_a_source_is_the_one_of_its_own_estimates(row: dict[str, str]):
    """NVIDIA/Megatron-LM pull request 482, tools/get_training_info/get_training_info.py, ``get_megatron_info``."""
    wide, deep, tensor, b = (int(row[name]) for name in ("dp", "pp", "tp", "mbs"))
    (one, *_) = (known for known in measured.memory() if known.group == measured.LLAMA)
    s, h, f, v = one.model.seq_length, 4096, one.model.ffn_hidden_size, one.model.padded_vocab_size(tensor)
    weights = v * h / tensor + s * h + (7 * h + (4 * h * h + 3 * f * h) / tensor + 2 * f) * 32 / deep
    kept = (32 / deep * ((5 * s * h * b + 4 * s * b * f) / tensor + 5 * s * h * b) + 1.5 * s * b * h) * deep
    loss = 5 * s * b * v / tensor if deep == 1 else 0
    needed = 2 * max(weights * (5 + 2 / wide), weights * (3 + 6 / wide) + kept + loss)
    assert needed / 2**30 == pytest.approx(float(row["peak_estimated_gb"]), abs=0.21 if wide == 8 else 0.05)


def test_what_ran_fits():
    rows = [*measured.vtrain("multi_node"), *measured.vtrain("single_node"), *measured.korthikanti()]
    assert len(rows) == 220
    for row in rows:
        assert memory.largest(row.model, row.layout).total_bytes < row.cluster.memory_bytes, row


@pytest.mark.parametrize(
    ("changes", "per_sbh"),
    [
        ({}, 34 + 5 * 16 * 1024 / 2048),
        ({"tensor": 4}, 10 + 24 / 4 + 5 * 16 * 1024 / 2048 / 4),
        ({"tensor": 4, "sequence_parallel": True}, (34 + 5 * 16 * 1024 / 2048) / 4),
        ({"tensor": 4, "recompute": Recompute.SELECTIVE}, 10 + 24 / 4),
        ({"tensor": 4, "sequence_parallel": True, "recompute": Recompute.SELECTIVE}, 34 / 4),
        ({"tensor": 4, "fused_attention": True}, 10 + 24 / 4),
        ({"tensor": 4, "fused_attention": True, "fused_swiglu": False}, 10 + 24 / 4),
    ],
    ids=str,
)
def test_activations_of_a_layer_are_those_of_table_2(changes: dict, per_sbh: float):
    """Korthikanti et al., arXiv 2205.05198."""
    kept = activations.of_layer(MODEL, layout(**({"fused_attention": False} | changes))).kept
    assert kept == pytest.approx(per_sbh * 1024 * 2 * 2048)


def test_activations_of_a_llama_layer():
    """Norm inputs and outputs 8, Q, K, V and the projection's input 2 + 2/4*2 + 2, the MLP 3 times 2.6875, doubled."""
    kept = activations.of_layer(LLAMA, layout()).kept
    assert kept / (1024 * 2 * 2048) == pytest.approx(8 + 2 * (2 + 2 * 4 / 16) + 2 * 3 * 5504 / 2048)
    unfused = activations.of_layer(LLAMA, layout(fused_swiglu=False)).kept
    assert unfused - kept == 2 * (1024 * 2 * 5504), "the result of SiLU"


def test_full_recomputation_keeps_inputs():
    tokens, count = 1024 * 2, 6
    one = tokens * 2048
    whole = activations.of_layer(MODEL, layout()).kept
    embedding = one  # Its dropout mask.
    cases = {
        (RecomputeMethod.UNIFORM, 1): count * 2 * one,
        (RecomputeMethod.UNIFORM, 4): 2 * 2 * one,
        (RecomputeMethod.BLOCK, 2): 2 * 2 * one + 4 * whole,
        (RecomputeMethod.BLOCK, 9): count * 2 * one,
    }
    for (method, layers), per_forward in cases.items():
        full = layout(recompute=Recompute.FULL, recompute_method=method, recompute_layers=layers)
        first = memory.stages(MODEL, full)[0]
        assert first.activations_bytes == pytest.approx(4 * (per_forward + embedding)), (method, layers)
        at_once = layers if method is RecomputeMethod.UNIFORM else int(layers >= count)
        assert (at_once + 1) * whole > first.working_bytes > at_once * whole


def test_recomputing_a_layer_takes_no_more_memory_than_recomputing_none():
    """Those behind it have given back what they kept before it computes again."""
    none, one = (layout(recompute=choice, recompute_method="block") for choice in (Recompute.NONE, Recompute.FULL))
    for without, computed_again in zip(memory.stages(MODEL, none), memory.stages(MODEL, one), strict=True):
        assert computed_again.total_bytes < without.total_bytes


def test_a_layer_that_is_recomputed_may_take_more_than_those_behind_it_gave_back():
    """A wide dense layer in front of narrow ones with experts."""
    experts = {"num_experts": 4, "moe_router_topk": 1, "ffn_hidden_size": 512, "bias": False}
    model = replace(MODEL, **experts, num_layers=2, dense_layers=1, dense_ffn_hidden_size=65536)
    one = layout(pipeline=1, recompute=Recompute.FULL, recompute_method="block")
    dense, behind = (activations.of_layer(each, one) for each in (model.dense, model))
    (stage,) = memory.stages(model, one)
    assert dense.kept > 2 * behind.kept
    assert stage.working_bytes == dense.working + dense.kept - behind.kept


@pytest.mark.parametrize("method", RecomputeMethod)
def test_more_layers_to_recompute_than_there_are(method: RecomputeMethod):
    """All of a chunk are recomputed: ``checkpointed_forward`` in ``megatron/core/recompute.py`` stops at the last."""
    chunks = layout(schedule="megatron", chunks=2, recompute=Recompute.FULL, recompute_method=method)
    most, more = (replace(chunks, recompute_layers=layers) for layers in (3, 5))
    assert memory.stages(MODEL, more) == memory.stages(MODEL, most)


def test_a_short_stage_recomputes_no_more_layers_than_it_has():
    uneven = layout(
        pipeline=3, recompute=Recompute.FULL, recompute_layers=9, first_stage_layers=4, last_stage_layers=10
    )
    first, middle, _ = memory.stages(MODEL, uneven)
    more_layers = 9 - 4
    assert middle.working_bytes - first.working_bytes == more_layers * activations.of_layer(MODEL, uneven).kept


@pytest.mark.parametrize("name", ["2bw", "1f1b-flush", "gpipe", "inter-layer"])
def test_in_flight_is_what_the_simulator_counts(name: str):
    for stages, microbatches, extra in itertools.product(range(1, 6), (1, 4, 8), (0, 1)):
        if (extra and name != "2bw") or (name == "2bw" and microbatches < (1 + extra) * (stages - 1)):
            continue
        programs = build(name, stages=stages, microbatches=microbatches, extra_in_flight=extra)
        timeline = simulate(programs, Durations(forward_s=1, backward_s=2), 4)
        planned = layout(
            schedule=name, pipeline=stages, data=1, microbatch=1, global_batch=microbatches, extra_in_flight=extra
        )
        assert tuple(chunks_in_flight(planned, stage) for stage in range(stages)) == timeline.peak_in_flight


@pytest.mark.parametrize(
    ("name", "microbatches", "options"),
    [
        ("pipedream", 1, {}),
        ("gems", 6, {}),
        ("chimera", 4, {}),
        ("mixpipe", 4, {"k": 2, "gamma": 1}),
        ("mixpipe", 12, {}),
    ],
)
def test_in_flight_of_the_others(name: str, microbatches: int, options: dict[str, int]):
    programs = build(name, stages=4, microbatches=microbatches, **options)
    timeline = simulate(programs, Durations(forward_s=1, backward_s=2), 4)
    changes = {f"mixpipe_{option}": value for option, value in options.items()}
    planned = layout(schedule=name, pipeline=4, data=1, microbatch=1, global_batch=microbatches, **changes)
    assert tuple(chunks_in_flight(planned, stage) for stage in range(4)) == timeline.peak_in_flight


def test_every_older_version_of_pipedream():
    stages = memory.stages(MODEL, layout(schedule="pipedream", global_batch=2 * 2))
    assert [stage.older_weights_bytes / stage.weights_bytes for stage in stages] == [3, 2, 1, 0]
    assert all(stage.captured_gradients_bytes == 0 for stage in stages)


def test_a_rank_with_two_stages_keeps_one_optimizer():
    """The other stage's weights and gradients, and a buffer for this one's from the other rank."""
    flush, both = (memory.stages(MODEL, layout(schedule=name)) for name in ("1f1b-flush", "chimera"))
    for stage, (one, two) in enumerate(zip(flush, both, strict=True)):
        other = flush[3 - stage]
        assert two.optimizer_bytes == one.optimizer_bytes
        expected = other.weights_bytes + other.gradients_bytes + one.gradients_bytes
        assert two.mirrored_bytes == pytest.approx(expected)
        assert one.mirrored_bytes == 0
    assert both[0].logits_bytes == both[-1].logits_bytes == flush[-1].logits_bytes
    assert memory.largest(MODEL, layout(schedule="chimera")) == max(both, key=lambda stage: stage.total_bytes)


def test_losses_that_are_open_at_once():
    """Where a rank starts several microbatches of the last stage before the first one's backward."""
    shape = {"data": 1, "microbatch": 1, "schedule": "mixpipe", "pipeline": 6, "global_batch": 6}
    one = memory.stages(MODEL, layout(**shape))[0].logits_bytes
    two = memory.stages(MODEL, layout(**shape, mixpipe_k=2, mixpipe_gamma=2))[0].logits_bytes
    assert two - one == pytest.approx(4 * 1024 * MODEL.padded_vocab_size(1) + 2 * 1024 * 2 * 2048)


def test_in_flight_of_the_interleaved_schedule():
    for ranks, groups, chunks in itertools.product((2, 3, 4), (1, 2, 4), (2, 3)):
        microbatches = ranks * groups
        timeline = simulate(interleaved(ranks, microbatches, chunks), Durations(forward_s=1, backward_s=2), 1)
        planned = layout(
            schedule="megatron", pipeline=ranks, data=1, microbatch=1, global_batch=microbatches, chunks=chunks
        )
        assert tuple(chunks_in_flight(planned, stage) for stage in range(ranks)) == timeline.peak_in_flight


def test_interleaving_keeps_more():
    """``1 + (d-1)/(d*v)`` times what 1F1B keeps on the first stage, section 4.2.3."""
    plain = memory.stages(MODEL, layout(schedule="megatron"))[0]
    more = memory.stages(MODEL, layout(schedule="megatron", chunks=3))[0]
    of_layers = [stage.activations_bytes - 4 * 1024 * 2 * 2048 for stage in (plain, more)]
    assert of_layers[1] / of_layers[0] == pytest.approx(1 + 3 / (4 * 3), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "bytes_per_weight"),
    [
        ({}, (2, 0, 4, 0, 12)),
        ({"distributed_optimizer": True}, (2, 0, 4, 0, 6)),
        ({"schedule": "2bw"}, (2, 2, 4, 4, 12)),
        ({"schedule": "2bw", "gradient_buffers": 1}, (2, 2, 4, 0, 12)),
        ({"schedule": "2bw", "distributed_optimizer": True}, (2, 2, 4, 2, 6)),
        (
            {"schedule": "2bw", "data": 4, "distributed_optimizer": True, "optimizer_instances": 2},
            (2, 2, 4, 2, 6),
        ),
        ({"schedule": "2bw", "gradients_in_bf16": True}, (2, 2, 2, 2, 12)),
        ({"schedule": "2bw", "gradients_in_bf16": True, "distributed_optimizer": True}, (2, 2, 2, 1, 6)),
        ({"distributed_optimizer": True, "adam_state": AdamState()}, (2, 0, 4, 0, 5)),
        ({"schedule": "2bw", "adam_state": HALVED, "gradients_in_bf16": True}, (2, 2, 2, 2, 6)),
        ({"precision": Precision.FP16, "adam_state": HALVED}, (2, 0, 2, 0, 8)),
        ({"adam_state": AdamState("fp16", "fp8", "fp16")}, (2, 0, 4, 0, 5)),
        ({"precision": Precision.FP32}, (4, 0, 4, 0, 8)),
        ({"schedule": "2bw", "precision": Precision.FP32}, (4, 4, 4, 4, 8)),
        ({"precision": Precision.FP16}, (2, 0, 2, 0, 12)),
        ({"precision": Precision.FP16, "gradients_in_fp32": True}, (2, 0, 4, 0, 12)),
        ({"schedule": "2bw", "precision": Precision.FP16}, (2, 2, 4, 4, 12)),
    ],
    ids=str,
)
def test_weights_gradients_and_optimizer(changes: dict, bytes_per_weight: tuple[float, ...]):
    middle = memory.stages(MODEL, layout(**changes))[1]
    weights = 6 * MODEL.layer_parameters
    found = (
        middle.weights_bytes,
        middle.older_weights_bytes,
        middle.gradients_bytes,
        middle.captured_gradients_bytes,
        middle.optimizer_bytes,
    )
    assert tuple(size / weights for size in found) == bytes_per_weight


def test_all_weights_are_somewhere():
    """A tied embedding is on both ends of the pipeline; tensor-parallel ranks repeat norms and some biases."""
    for model, tensor in itertools.product((MODEL, LLAMA, replace(LLAMA, num_experts=4)), (1, 4)):
        for stages in (1, 2, 4):
            spread = layout(pipeline=stages, tensor=tensor)
            weights = weights_of(model, tensor)
            held = [one for stage in range(stages) for one in contents_of(model, spread, stage)]
            total = sum(weights.of(one, model) for one in held)
            total += model.num_layers * weights.experts
            padded = replace(model, vocab_size=model.padded_vocab_size(tensor))
            twice = model.padded_vocab_size(tensor) * model.hidden_size if model.tied and stages > 1 else 0
            if tensor == 1:
                assert total == padded.parameters + twice
            else:
                assert 1 <= tensor * total / (padded.parameters + twice) < 1.01


def test_the_loss_counts_once_or_for_every_microbatch():
    logits = 1024 * 2 * MODEL.padded_vocab_size(1)
    inputs = 2 * 1024 * 2 * 2048 * 2
    last = memory.stages(MODEL, layout())[-1]
    assert last.logits_bytes == pytest.approx((4 + 2) * logits + inputs)
    assert last.working_bytes == 0
    every = memory.stages(MODEL, layout(schedule="gpipe"))[-1]
    assert every.logits_bytes == pytest.approx(16 * (4 * logits + inputs) + 2 * logits)
    assert all(stage.logits_bytes == 0 for stage in memory.stages(MODEL, layout())[:-1])


def test_the_largest_is_the_largest():
    options = itertools.product(
        ["2bw", "1f1b-flush", "gpipe", "megatron"], [1, 2, 4, 8], Recompute, [(0, 0), (2, 2), (0, 3)], [1, 2]
    )
    for schedule, stages, recompute, (first, last), chunks in options:
        if (chunks > 1 and (schedule != "megatron" or stages == 1)) or ((first or last) and stages != 4):
            continue
        if chunks > 1 and (24 // stages % chunks or first or last):
            continue
        spread = layout(schedule=schedule, pipeline=stages, recompute=recompute, chunks=chunks)
        spread = replace(spread, first_stage_layers=first, last_stage_layers=last)
        stages_bytes = [stage.total_bytes for stage in memory.stages(MODEL, spread)]
        assert memory.largest(MODEL, spread).total_bytes == max(stages_bytes), spread


def test_components_add_up():
    for stage in memory.stages(MODEL, layout(schedule="2bw", recompute=Recompute.FULL)):
        assert stage.total_bytes == pytest.approx(stage.allocated_bytes + stage.reserve_bytes)
        computing = stage.activations_bytes + stage.logits_bytes + stage.working_bytes
        assert stage.reserve_bytes == pytest.approx(memory.CONTEXT_BYTES + memory.FRAGMENTED_SHARE * computing)
        assert stage.allocated_bytes > stage.weights_bytes + stage.optimizer_bytes


def test_copies_of_gradients_beside_activations():
    """2bw copies gradients in bf16 to fp32 for the norm, while the stage computes, and again for the update."""
    for schedule, at_once in (("2bw", True), ("pipedream", False)):
        shape = {"schedule": schedule, "recompute": Recompute.FULL}
        if schedule == "pipedream":
            shape |= {"data": 1, "microbatch": 1, "global_batch": 1}
        half, whole = (memory.stages(MODEL, layout(**shape, gradients_in_bf16=on))[1] for on in (True, False))
        copied = 4 * 6 * MODEL.layer_parameters
        expected = max(whole.working_bytes, copied) + (copied if at_once else 0)
        assert half.working_bytes == pytest.approx(expected)
        assert half.activations_bytes == whole.activations_bytes


def test_copies_of_moments_for_the_update():
    """Two moments in bf16 are read as they are, and so are gradients; but for 2bw's norm."""
    mixed = AdamState("fp32", "bf16", "fp16")
    for state, in_update, in_norm in ((AdamState(), 0, 4), (HALVED, 0, 4), (mixed, 8, 4)):
        shape = {"schedule": "2bw", "recompute": Recompute.FULL, "adam_state": state}
        half, whole = (memory.stages(MODEL, layout(**shape, gradients_in_bf16=on))[1] for on in (True, False))
        weights = 6 * MODEL.layer_parameters
        computing = memory.stages(MODEL, layout(**shape | {"adam_state": None}))[1].working_bytes
        assert whole.working_bytes == pytest.approx(max(computing, in_update * weights))
        assert half.working_bytes - whole.working_bytes == pytest.approx(in_norm * weights)


def test_the_gradient_of_a_large_embedding():
    """All rows of it, when the activations of its own forward are given back."""
    for schedule, in_flight in (("1f1b-flush", 4), ("2bw", 4), ("gpipe", 32)):
        shape = {"schedule": schedule, "recompute": Recompute.FULL, "global_batch": 128}
        large = replace(MODEL, vocab_size=1_000_000)
        first = memory.stages(large, layout(**shape))[0]
        assert memory.stages(MODEL, layout(**shape))[0].activations_bytes == first.activations_bytes
        gradient = 2 * large.padded_vocab_size() * large.hidden_size
        assert first.working_bytes == pytest.approx(gradient - first.activations_bytes / in_flight)


@pytest.mark.parametrize(("fp8", "of_state", "of_update"), [(Fp8.DELAYED, 6, 0), (Fp8.MXFP8, 8, 4)])
def test_megatron_keeps_whole_main_weights_beside_some_recipes(fp8: Fp8, of_state: int, of_update: int):
    """And copies gradients to fp32, as without a precision-aware optimizer."""
    states = memory.state_bytes_per_weight(layout(adam_state=HALVED, gradients_in_bf16=True, fp8=fp8), 2)
    assert (states.optimizer, states.update) == (of_state, of_update)


def test_fp16_copies_gradients_for_the_update():
    """Where activations leave no room that is free again by then."""
    half = replace(layout(precision=Precision.FP16, microbatch=1, recompute=Recompute.FULL), global_batch=2)
    middle = memory.stages(replace(MODEL, seq_length=32), half)[1]
    copied = middle.activations_bytes + middle.working_bytes
    assert copied == pytest.approx(4 * 6 * MODEL.layer_parameters)
    whole = memory.stages(replace(MODEL, seq_length=32), replace(half, gradients_in_fp32=True))[1]
    assert whole.activations_bytes + whole.working_bytes < 0.1 * copied
    old = memory.stages(MODEL, layout(precision=Precision.FP16, keeps_main_gradients=True))[1]
    new = memory.stages(MODEL, layout(precision=Precision.FP16))[1]
    assert old.optimizer_bytes - new.optimizer_bytes == 4 * 6 * MODEL.layer_parameters
    assert memory.stages(MODEL, layout(keeps_main_gradients=True)) == memory.stages(MODEL, layout())


def test_of_an_interleaved_last_stage_one_chunk_predicts_further_tokens():
    """Its backward comes at once."""
    plain, one = replace(MODEL, learned_positions=False), layout(schedule="megatron", chunks=2)
    more, less = (memory.stages(replace(plain, mtp_num_layers=n), one)[-1].activations_bytes for n in (1, 0))
    assert more - less == pytest.approx(activations.of_mtp(replace(plain, mtp_num_layers=1), one))


def test_a_rank_with_two_stages_keeps_forwards_of_the_larger():
    uneven = layout(schedule="chimera", first_stage_layers=2, last_stage_layers=10, data=1, global_batch=8)
    even = replace(uneven, first_stage_layers=0, last_stage_layers=0)
    found, usual = (memory.stages(MODEL, one)[0].activations_bytes for one in (uneven, even))
    assert found - usual == pytest.approx(chunks_in_flight(uneven, 0) * 4 * activations.of_layer(MODEL, uneven).kept)


def test_a_stage_that_only_predicts_further_tokens_computes_a_layer():
    small = replace(MODEL, num_layers=4, learned_positions=False, vocab_size=128, mtp_num_layers=1)
    layouts = (layout(schedule="megatron", pipeline=2, pipeline_layout=text) for text in ("Ett|ttmL", "Etttt|mL"))
    both, alone = (memory.stages(small, one)[-1].working_bytes for one in layouts)
    assert both == alone > 0
