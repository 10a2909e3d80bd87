"""Products in 8 bits, and what Megatron's flags do beside them: prices by hand, rules, and published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_accuracy import is_as_stated

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import HOPPER_ATTENTION_EFFICIENCY, SUSTAINED, machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import read
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.memory import activations, memory
from megatron_2bw.planner.pipeline.stages import Contents
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.search.search import search
from megatron_2bw.planner.specs.cluster import CLUSTERS, GPUS
from megatron_2bw.planner.specs.inputs import sized
from megatron_2bw.planner.specs.kernels import gpu_problem
from megatron_2bw.planner.specs.layout import Fp8, Layout, Precision
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.space import Space
from tests.planner import measured_fp8

MODEL = Model(num_layers=24, hidden_size=4096, num_attention_heads=32, seq_length=2048, vocab_size=50257)
EXPERTS = replace(MODEL, num_experts=8, moe_router_topk=2, bias=False, ffn_hidden_size=1024)
LATENT = {"multi_latent_attention": True}
MIXTURE = {"num_experts": 8, "bias": False}
DGX = CLUSTERS["dgx-h100"]
RECIPES = [recipe for recipe in Fp8 if recipe is not Fp8.NONE]


def layout(**changes: object) -> Layout:
    fields = {"schedule": "megatron", "pipeline": 2, "data": 2, "tensor": 2, "microbatch": 2, "global_batch": 32}
    return Layout(**(fields | {"sequence_parallel": True, "distributed_optimizer": True} | changes))


def test_products_in_8_bits_are_as_much_faster_as_was_measured():
    machine = machine_of(DGX)
    half, quarter = (machine.product_s(8192, 8192, 8192, width=width) - machine.kernel_s for width in (2, 1))
    assert half / quarter == pytest.approx(1402.6 / 794.5)
    unknown = machine_of(replace(DGX, gpu=replace(DGX.gpu, name="new-gpu")))
    least, largest = 1402.6 / 1979, 271.2 / 312
    assert unknown.fp8_flops_per_s == pytest.approx(0.80 / largest * least * 1979e12), "as the least of those measured"
    slow = replace(machine, memory_bytes_per_s=1.0)
    assert slow.product_s(30, 50, 70, width=1) == pytest.approx(30 * 70 + 70 * 50 + 2 * 30 * 50), "sums have 16 bits"


@pytest.mark.parametrize(("cluster", "share"), [("dgx-h100", 0.48), ("p5en.48xlarge", 0.48), ("dgx-b200", 0.472)])
def test_fused_attention(cluster: str, share: float):
    machine, peak = machine_of(CLUSTERS[cluster]), CLUSTERS[cluster].gpu.peak_tflops
    assert machine.flash_flops_per_s == pytest.approx(share * peak * 1e12, rel=1e-3)


def test_blackwells_attention_loses_to_the_clock_what_hoppers_does():
    """NVIDIA's ten calls on an H200 (644 TFLOP/s forward, 541 backward) against our many."""
    of_ten_calls = 3.5 / (1 / 644 + 2.5 / 541) / 989
    assert HOPPER_ATTENTION_EFFICIENCY / of_ten_calls == pytest.approx(SUSTAINED, rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "per_input", "after_norm"),
    [(Fp8.DELAYED, 4, 0), (Fp8.MXFP8, 4, 4), (Fp8.TENSORWISE, 6, 4), (Fp8.BLOCKWISE, 4, 4)],
)
@pytest.mark.parametrize("transposes", [True, False], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_casts_of_a_layer(model: Model, transposes: bool, recipe: Fp8, per_input: int, after_norm: int):
    """Beside the products only casts take longer, forward of inputs and backward of outputs' gradients; and what goes
    into experts and out of them is copied, with as many tokens for each as products in 8 bits take.

    Products that take one copy for both directions spare a byte where one scale is that of a whole tensor."""
    if not transposes and recipe in (Fp8.DELAYED, Fp8.TENSORWISE):
        per_input, after_norm = per_input - 1, after_norm - 1
    machine = replace(machine_of(DGX), kernel_s=0.0, launch_s=0.0, transposes=transposes)
    one = layout(tensor=1, sequence_parallel=False, data=4)
    plain, cast = (works_of(model, Split.of(replace(one, fp8=fp8)), machine).layer for fp8 in (Fp8.NONE, recipe))
    tokens, hidden, routed = 2 * 2048, 4096, 2 if model.num_experts else 1
    normed, inside = (1 if model.num_experts else 2) * hidden, hidden + routed * model.ffn_hidden_size
    inside += routed * hidden if model.num_experts else 0
    padded = 4 * 2 * routed * hidden if model.num_experts else 0
    forward = tokens * (after_norm * normed + per_input * inside + padded)
    backward = tokens * (per_input * (3 * hidden + hidden + routed * (model.ffn_hidden_size + hidden)) + padded)
    moved = (
        (second.elementwise_s - first.elementwise_s) * machine.memory_bytes_per_s
        for first, second in ((plain.forward, cast.forward), (plain.backward, cast.backward))
    )
    assert tuple(moved) == pytest.approx((forward, backward))
    assert cast.forward.products_s < plain.forward.products_s


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [(Fp8.DELAYED, (2, 3), 0), (Fp8.MXFP8, (4, 4), 0), (Fp8.BLOCKWISE, (4, 4), 0), (Fp8.TENSORWISE, (6, 7), 4)],
)
def test_kernels_that_cast(recipe: Fp8, forward: tuple[int, int], backward: int):
    """Of four inputs, two of which norms write, or one with experts; gradients' own sum the bias' gradient, too. With
    experts, three that pad."""
    machine = replace(machine_of(DGX), memory_bytes_per_s=float("inf"), launch_s=0.0)
    for model, of_inputs, pads in zip((MODEL, EXPERTS), forward, (0, 3), strict=True):
        plain, cast = (works_of(model, Split.of(layout(fp8=fp8)), machine).layer for fp8 in (Fp8.NONE, recipe))
        more = cast.forward.elementwise_s - plain.forward.elementwise_s
        assert more == pytest.approx((of_inputs + pads) * machine.kernel_s)
        more = cast.backward.elementwise_s - plain.backward.elementwise_s
        assert more == pytest.approx((backward + pads) * machine.kernel_s)


def test_kernels_that_cast_latent_vectors_and_shared_experts():
    """Nine inputs, two of which norms write; nine gradients, four of which the kernels of bias gradients cast;
    three that pad."""
    latent = {"multi_latent_attention": True, "q_lora_rank": 512, "kv_lora_rank": 512, "qk_layernorm": True}
    model = replace(EXPERTS, **latent, moe_shared_expert_intermediate_size=1024)
    machine = replace(machine_of(DGX), memory_bytes_per_s=float("inf"), launch_s=0.0)
    for recipe, forward, backward in ((Fp8.DELAYED, 7 + 3, 5 + 3), (Fp8.TENSORWISE, 16 + 3, 14 + 3)):
        plain, cast = (works_of(model, Split.of(layout(fp8=fp8)), machine).layer for fp8 in (Fp8.NONE, recipe))
        more = cast.forward.elementwise_s - plain.forward.elementwise_s
        assert more == pytest.approx(forward * machine.kernel_s)
        more = cast.backward.elementwise_s - plain.backward.elementwise_s
        assert more == pytest.approx(backward * machine.kernel_s)


def test_activations_in_8_bits():
    """Per token and hidden size: two norms' inputs 4 and outputs 2, masks 2; Q, K, V 6, attention's output in both
    widths 3, into the activation function 8, out of it 4."""
    kept = activations.of_layer(MODEL, layout(fp8=Fp8.DELAYED)).kept
    assert kept / (2 * 2048 * 4096) == pytest.approx((8 + 6 + 3 + 8 + 4) / 2)


@pytest.mark.parametrize("recipe", [Fp8.TENSORWISE, Fp8.BLOCKWISE, Fp8.MXFP8])
def test_without_delay_outputs_of_attention_are_kept_once(recipe: Fp8):
    """And so is what a router and shared experts read."""
    shared = replace(EXPERTS, moe_shared_expert_intermediate_size=1024)
    for model, more in ((MODEL, 4096 / 2), (shared, 2 * 4096 / 2)):
        delayed, other = (activations.of_layer(model, layout(fp8=one)).kept for one in (Fp8.DELAYED, recipe))
        assert delayed - other == 2 * 2048 * more


def test_activations_of_latent_attention_in_8_bits():
    """Per token: two casts of what the first norm writes, in place of 2 bytes; latent vectors out of their norms and
    what goes into the MLP and out of its activation function have one byte less; attention's output one more."""
    latent = {"multi_latent_attention": True, "kv_lora_rank": 512, "qk_layernorm": True}
    alone = layout(tensor=1, data=4, sequence_parallel=False)
    for rank in (1536, 0):
        model = replace(MODEL, **latent, q_lora_rank=rank)
        in_16, in_8 = (activations.of_layer(model, replace(alone, fp8=fp8)).kept for fp8 in (Fp8.NONE, Fp8.DELAYED))
        per_token = 512 + rank + 4096 + model.ffn_hidden_size - model.output_size
        assert in_16 - in_8 == 2 * 2048 * per_token


def test_activations_of_experts_in_8_bits():
    """One norm's output, what goes into the experts, and what goes into their second product have one byte less;
    attention's output has one more."""
    in_16, in_8 = (activations.of_layer(EXPERTS, layout(fp8=fp8)).kept for fp8 in (Fp8.NONE, Fp8.DELAYED))
    per_token = 4096 / 2 + 2 * 4096 + 2 * 1024 / 2 - 4096 / 2
    assert in_16 - in_8 == 2 * 2048 * per_token


@pytest.mark.parametrize(("parameters", "copies"), [(False, 2), (True, 0)])
def test_copies_of_weights(parameters: bool, copies: int):
    stage = memory.stages(MODEL, layout(pipeline=4, data=1, fp8=Fp8.DELAYED, fp8_parameters=parameters))[1]
    assert stage.fp8_weights_bytes == copies * stage.weights_bytes / 2
    assert memory.stages(MODEL, layout())[0].fp8_weights_bytes == 0


def test_weights_are_cast_once_per_batch_and_gathered_in_8_bits():
    machine = machine_of(DGX)
    plain, cast, parameters = (
        costs.times_of(MODEL, layout(fp8=fp8, fp8_parameters=fp8_parameters), DGX).pipeline.update_s
        for fp8, fp8_parameters in ((Fp8.NONE, False), (Fp8.DELAYED, False), (Fp8.DELAYED, True))
    )
    weights = 12 * (MODEL.layer_parameters - 6 * 4096) // 2 + 12 * 6 * 4096
    assert cast - plain == pytest.approx(machine.elementwise_s(4 * weights), rel=0.01)
    assert parameters < cast
    expert_weights = 12 * EXPERTS.layer_parameters // 2
    plain, cast = (costs.times_of(EXPERTS, layout(fp8=fp8), DGX).pipeline.update_s for fp8 in (Fp8.NONE, Fp8.DELAYED))
    assert cast - plain == pytest.approx(machine.elementwise_s(4 * expert_weights), rel=0.01)
    blocks = layout(fp8=Fp8.MXFP8, fp8_parameters=True)
    b200 = CLUSTERS["dgx-b200"]
    gathered = [costs.times_of(MODEL, replace(blocks, fp8=fp8), b200).pipeline.update_s for fp8 in RECIPES]
    assert gathered[RECIPES.index(Fp8.MXFP8)] == max(gathered)


def test_embeddings_are_gathered_in_16_bits():
    machine, alone = machine_of(DGX), layout(pipeline=1, data=4)
    plain, cast = (
        costs.times_of(MODEL, replace(alone, fp8=fp8, fp8_parameters=fp8 is not Fp8.NONE), DGX).pipeline.update_s
        for fp8 in (Fp8.NONE, Fp8.DELAYED)
    )
    held = weights_of(MODEL, 2)
    whole = Contents(24, embedding=True, final_norm=True, loss=True)
    both = (held.of(whole, MODEL), 2), (held.of_layers(whole), 1)
    assert held.of_layers(whole) == 24 * held.layer
    whole_s, of_layers_s = (machine.reduce_scatter_s(width * weights, 4, 2) for weights, width in both)
    saved_s = of_layers_s - machine.reduce_scatter_s(0, 4, 2)
    gathered_s = cast - (plain - whole_s) - machine.elementwise_s(2 * 24 * held.layer)
    assert gathered_s == pytest.approx(whole_s - saved_s)


def test_weights_of_several_kinds_of_layers_in_8_bits():
    """Two copies of each, of dense layers in place of experts, and of layers that predict further tokens."""
    model = replace(EXPERTS, dense_layers=2, dense_ffn_hidden_size=2048, mtp_num_layers=1, learned_positions=False)
    held = weights_of(model, 2)
    of_layer = held.layer + held.experts
    needed = memory.stages(model, layout(fp8=Fp8.DELAYED))
    assert needed[0].fp8_weights_bytes == 2 * (2 * weights_of(model.dense, 2).layer + 10 * of_layer)
    assert needed[1].fp8_weights_bytes == 2 * (13 * of_layer + held.mtp)
    plain, cast = (costs.times_of(model, layout(fp8=fp8), DGX).pipeline.update_s for fp8 in (Fp8.NONE, Fp8.DELAYED))
    moved = 4 * (13 * of_layer + held.mtp)
    assert cast - plain == pytest.approx(machine_of(DGX).elementwise_s(moved))


def test_sequence_parallel_ranks_gather_in_8_bits():
    machine = replace(machine_of(DGX), collective_s=0.0)
    for model in (MODEL, replace(MODEL, multi_latent_attention=True, q_lora_rank=512)):
        plain, cast = (
            works_of(model, Split.of(layout(fp8=fp8)), machine).layer.forward.tensor_parallel_s
            for fp8 in (Fp8.NONE, Fp8.DELAYED)
        )
        assert cast == pytest.approx(0.75 * plain)


def test_collectives_beside_products():
    """All parts but the first are hidden, as far as products last."""
    machine = replace(machine_of(DGX), collective_s=0.0, launch_s=0.0)
    alone, beside = (
        works_of(MODEL, Split.of(layout(tensor=8, pipeline=1, data=1, overlap_tensor=on)), machine).layer
        for on in (False, True)
    )
    for one, other in ((alone.forward, beside.forward), (alone.backward, beside.backward)):
        assert other.tensor_parallel_s == pytest.approx(one.tensor_parallel_s / 8)
    slow = replace(machine, link_bytes_per_s=machine.link_bytes_per_s / 100)
    longer = works_of(MODEL, Split.of(layout(tensor=8, pipeline=1, data=1, overlap_tensor=True)), slow).layer
    never = works_of(MODEL, Split.of(layout(tensor=8, pipeline=1, data=1)), slow).layer.forward
    weights_s = sum(
        slow.product_s(4096, n, k, width=2) for n, k in ((1536, 4096), (4096, 512), (2048, 4096), (4096, 2048))
    )
    assert never.tensor_parallel_s - longer.forward.tensor_parallel_s == pytest.approx(weights_s)
    experts = [works_of(EXPERTS, Split.of(layout(overlap_tensor=on)), machine).layer.forward for on in (False, True)]
    hidden_s = experts[0].tensor_parallel_s - experts[1].tensor_parallel_s
    assert 0 < hidden_s < 0.5 * experts[0].tensor_parallel_s, "what experts exchange is beside no product"
    latent = replace(MODEL, multi_latent_attention=True)
    never, asked = (works_of(latent, Split.of(layout(overlap_tensor=on)), machine).layer for on in (False, True))
    assert never == asked, "Megatron switches it off"


def test_a_fused_loss():
    plain, fused = (layout(fused_loss=on) for on in (False, True))
    logits = 2 * 2048 * MODEL.padded_vocab_size(2) / 2
    machine = machine_of(DGX)
    times = [works_of(MODEL, Split.of(one), machine).loss for one in (plain, fused)]
    saved_s = times[0].forward_s + times[0].backward_s - times[1].forward_s - times[1].backward_s
    assert saved_s == pytest.approx((38 - 6 + 14 - 4) * logits / machine.memory_bytes_per_s + 5 * machine.kernel_s)
    kept = [activations.of_loss(MODEL, one).kept for one in (plain, fused)]
    assert kept[0] - kept[1] == 2 * logits


def test_gradients_in_bf16():
    half, whole = (memory.stages(MODEL, layout(gradients_in_bf16=on))[1] for on in (True, False))
    assert 2 * half.gradients_bytes == whole.gradients_bytes
    assert layout(gradients_in_bf16=True, precision=Precision.FP32).gradient_width == 4, "Megatron looks at it in bf16"
    pipelines = [costs.times_of(MODEL, layout(gradients_in_bf16=on), DGX).pipeline for on in (True, False)]
    assert pipelines[0].gradients_s < 0.6 * pipelines[1].gradients_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "2bw", "fp8": Fp8.DELAYED}, "fp8 delayed: 2bw changes weights whose copies"),
        ({"schedule": "chimera", "fp8": Fp8.DELAYED}, "fp8 delayed: chimera changes weights whose copies"),
        ({"schedule": "pipedream", "fp8": Fp8.DELAYED}, "fp8 delayed: pipedream changes weights whose copies"),
        ({"fp8_parameters": True}, "fp8_parameters needs fp8; use fp8 delayed"),
        (
            {"fp8": Fp8.DELAYED, "fp8_parameters": True, "distributed_optimizer": False},
            "fp8_parameters needs distributed_optimizer; switch it on",
        ),
        ({"fp8": Fp8.DELAYED, "precision": Precision.FP32}, "fp8 delayed beside fp32; use precision bf16"),
        ({"overlap_tensor": True, "sequence_parallel": False}, "overlap_tensor needs sequence_parallel; switch it on"),
        (
            {"overlap_tensor": True, "sequence_parallel": False, "tensor": 1, "data": 4},
            "overlap_tensor needs sequence_parallel and tensor above 1; leave it out",
        ),
    ],
)
def test_what_is_refused(changes: dict, message: str):
    assert message in str(problem(MODEL, layout(**changes)))


@pytest.mark.parametrize("schedule", ["megatron", "1f1b-flush", "gpipe", "inter-layer"])
def test_what_keeps_no_older_weights_runs(schedule: str):
    assert problem(MODEL, layout(schedule=schedule, fp8=Fp8.DELAYED)) is None


@pytest.mark.parametrize(
    ("sizes", "recipe", "message"),
    [
        ({"ffn_hidden_size": 16 * 1025}, Fp8.DELAYED, "ffn_hidden_size 16400 on 2 ranks is no multiple of 16; use 16"),
        ({"hidden_size": 4112, "kv_channels": 64}, Fp8.MXFP8, "hidden_size 4112 on 1 ranks is no multiple of 32"),
        ({"seq_length": 8 * 11}, Fp8.BLOCKWISE, "seq_length x microbatch 176 on 2 ranks is no multiple of 16"),
        (LATENT | {"kv_lora_rank": 100}, Fp8.DELAYED, "kv_lora_rank 100 on 1 ranks is no multiple of 16; use 96"),
        (LATENT | {"q_lora_rank": 100}, Fp8.DELAYED, "q_lora_rank 100 on 1 ranks is no multiple of 16; use 96"),
        (
            LATENT | {"num_attention_heads": 2, "num_query_groups": 2, "v_head_dim": 8},
            Fp8.DELAYED,
            "num_attention_heads x v_head_dim 16 on 2 ranks is no multiple of 16; use 32",
        ),
        (
            MIXTURE | {"moe_shared_expert_intermediate_size": 1000},
            Fp8.DELAYED,
            "moe_shared_expert_intermediate_size 1000 on 2 ranks is no multiple of 16; use 992",
        ),
        (
            MIXTURE | {"dense_layers": 1, "dense_ffn_hidden_size": 1000},
            Fp8.DELAYED,
            "dense_ffn_hidden_size 1000 on 2 ranks is no multiple of 16; use 992",
        ),
        (
            {"hidden_size": 4112, "kv_channels": 64, "mtp_num_layers": 1, "learned_positions": False},
            Fp8.DELAYED,
            "hidden_size 4112 on 2 ranks is no multiple of 16; use 4096",
        ),
    ],
)
def test_sizes_that_products_in_8_bits_do_not_take(sizes: dict, recipe: Fp8, message: str):
    model = replace(MODEL, **sizes)
    assert problem(model, layout()) is None
    assert message in str(problem(model, layout(fp8=recipe)))


@pytest.mark.parametrize(
    ("gpu", "takes"),
    [("a100-80gb", []), ("h100-80gb", ["delayed", "tensorwise", "blockwise"]), ("b200-180gb", list(map(str, RECIPES)))],
)
def test_gpus(gpu: str, takes: list[str]):
    refused = {recipe: gpu_problem(GPUS[gpu], Precision.BF16, fp8=recipe) for recipe in RECIPES}
    assert [recipe for recipe, reason in refused.items() if reason is None] == takes


def test_a_plan_in_8_bits():
    """All layouts have products in 8 bits, and 2bw says why it is none of them."""
    model, cluster = MODELS["llama3-8b"], sized(DGX, gpus=16)
    plan = search(model, cluster, 32, Space(fp8=Fp8.TENSORWISE), keep=20)
    assert {choice.layout.fp8 for choice in plan.choices} == {Fp8.TENSORWISE}
    assert "2bw" not in {choice.layout.schedule for choice in plan.choices}
    without = search(model, cluster, 32, Space(), keep=1)
    assert plan.best.iteration.time_s < without.best.iteration.time_s
    with pytest.raises(PlanError, match="fp8 delayed: 2bw changes weights whose copies in 8 bits would stay old"):
        search(model, cluster, 32, Space(fp8=Fp8.DELAYED, schedules=("2bw",)))
    with pytest.raises(PlanError, match="fp8 delayed: 2bw changes weights"):
        search(model, sized(DGX, gpus=8), 64, Space(fp8=Fp8.DELAYED, schedules=("2bw",)))
    with pytest.raises(PlanError, match="fp8 delayed beside fp32; use precision bf16"):
        search(model, sized(DGX, gpus=8), 64, Space(fp8=Fp8.DELAYED, precision=Precision.FP32))
    with pytest.raises(PlanError, match="a100-80gb has no products in 8 bits"):
        search(model, sized(CLUSTERS["dgx-a100"], gpus=16), 32, Space(fp8=Fp8.DELAYED))


def test_the_projection_of_further_tokens_in_8_bits():
    model = replace(MODEL, mtp_num_layers=1, learned_positions=False)
    machine = replace(machine_of(DGX), launch_s=0.0)
    for recipe in (Fp8.NONE, Fp8.TENSORWISE):
        works = works_of(model, Split.of(layout(fp8=recipe)), machine)
        usual = works.embedding, works.layer
        width, per_number, kernels = (2, 0, 0) if recipe is Fp8.NONE else (1, 6, 2)
        forward, backward = ([getattr(one, way) for one in usual] for way in ("forward", "backward"))
        projected_s = works.mtp.forward.products_s - sum(one.products_s for one in forward)
        assert projected_s == pytest.approx(machine.product_s(4096, 2048, 8192, width=width))
        back_s = works.mtp.backward.products_s - sum(one.products_s for one in backward)
        shapes = (4096, 8192, 2048), (8192, 2048, 4096)
        assert back_s == pytest.approx(sum(machine.product_s(*shape, width=width) for shape in shapes))
        others_s = works.mtp.forward.elementwise_s - sum(one.elementwise_s for one in forward)
        moved = 2 * (12 * 4096 * 2048 + 4096 * model.padded_vocab_size(2) / 2) + per_number * 2 * 4096 * 2048
        assert others_s == pytest.approx(machine.elementwise_s(moved, 6 + kernels))
        others_s = works.mtp.backward.elementwise_s - sum(one.elementwise_s for one in backward)
        moved = 2 * 16 * 4096 * 2048 + 2 * 4 * 8192 * 2048 + per_number * 4096 * 2048
        assert others_s == pytest.approx(machine.elementwise_s(moved, 9 + kernels))
        kept = activations.of_mtp(model, layout(fp8=recipe)) - activations.of_layer(model, layout(fp8=recipe)).kept
        assert kept == 4096 * 2 * (2 + width) * 4096 / 2


def test_flags_that_megatron_drops():
    words = "--micro-batch-size 1 --bf16 --tensor-model-parallel-size 2 --sequence-parallel".split()
    local = ["--fp8-format", "hybrid", "--transformer-impl", "local"]
    given = Options.parse([*words, "--tp-comm-overlap", *local])
    latent = replace(MODEL, multi_latent_attention=True)
    (note,) = read(given, gpus=2, model=MODEL).notes
    assert note == "--fp8-format: priced without, as Megatron's own layers have no products in 8 bits"
    notes = read(given, gpus=2, model=latent).notes
    assert notes[0] == "--tp-comm-overlap: priced without, as Megatron switches it off beside latent attention"


def test_rows():
    row = {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 64, "pipeline": 4, "tensor": 4, "global_batch": 128}
    ours = predicted({**row, "fp8": "tensorwise"})
    assert predicted({**row, "fp8": "e4m3", "fp8_recipe": "tensorwise"}) == ours
    assert predicted({**row, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}) == ours
    assert predicted({**row, "fp8": True}) == predicted({**row, "fp8": "delayed"}) != predicted({**row, "fp8": False})
    assert predicted({**row, "fp8": None}) == predicted(row)
    assert predicted({**row, "fp8": "none", "fp8_recipe": "mxfp8"}) == predicted(row)
    assert predicted({**row, "fp8_recipe": "mxfp8"}) == predicted(row), "without a format, as in Megatron"
    assert predicted({**row, "fp8_format": "e4m3", "fp8": "blockwise", "fp8_recipe": "blockwise"})
    te = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    assert predicted({**row, **te}) == predicted({**row, "fused_loss": True}) != predicted(row)
    assert predicted({**row, **te, "cross_entropy_loss_fusion": False}) == predicted(row)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fp8": "delayed", "fp8_recipe": "blockwise"}, "fp8 delayed: Megatron's arguments in the row say blockwise"),
        ({"fp8_format": "e5m2"}, "--fp8-format e5m2: choose one of hybrid, e4m3"),
        ({"fp8": "mxfp9"}, "fp8 'mxfp9': choose one of none, delayed"),
    ],
)
def test_rows_that_contradict_themselves(given: dict, message: str):
    row = {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 64, "pipeline": 4, "tensor": 4, "global_batch": 128}
    with pytest.raises(PlanError, match=message):
        predicted(row | given)


@pytest.mark.parametrize("rows", [measured_fp8.nemo, measured_fp8.long_sequences, measured_fp8.bridge])
def test_published_runs_are_within_what_is_stated(rows):
    """Nothing was fitted on them."""
    inside = [is_as_stated(row) for row in rows()]
    assert len(inside) >= 5
    assert sum(inside) >= 0.8 * len(inside)
