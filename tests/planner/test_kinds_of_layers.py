"""Latent attention, shared experts, dense first layers and further predicted tokens: time, memory, rules, flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_2bw.planner.cost import attention, costs, muon
from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import read
from megatron_2bw.planner.flags.model_flags import model_flags, read_model
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.memory import activations, memory
from megatron_2bw.planner.pipeline import batch
from megatron_2bw.planner.pipeline.stages import Contents, contents_of
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.inputs import sized
from megatron_2bw.planner.specs.layout import Fp8, Layout, Optimizer, Receives, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.patterns import dense_first
from tests.planner import measured_deepseek

V3 = MODELS["deepseek-v3"]
DGX = CLUSTERS["dgx-h100"]
MACHINE = machine_of(DGX)
MIXED = replace(
    V3, num_layers=12, hidden_size=1024, num_attention_heads=16, kv_channels=64, num_query_groups=16, num_experts=8
)
"""As DeepSeek-V3, smaller."""
PLAIN = replace(MIXED, dense_layers=0, dense_ffn_hidden_size=0, mtp_num_layers=0)
ALIKE = replace(PLAIN, moe_shared_expert_intermediate_size=0)


def layout(**changes) -> Layout:
    """Four stages."""
    return Layout(**({"schedule": "2bw", "pipeline": 4, "data": 1, "global_batch": 16} | changes))


def works(model: Model, **changes):
    return works_of(model, Split.of(layout(**changes)), MACHINE)


def test_published_numbers_of_parameters():
    """DeepSeek-AI, arXiv 2412.19437: 671B, 37B of them activated; arXiv 2405.04434, appendix B: 15.7B."""
    assert round(V3.parameters / 1e9) == 671
    assert round(replace(V3, num_experts=V3.moe_router_topk).parameters / 1e9) == 37
    assert round(MODELS["deepseek-v2-lite"].parameters / 1e9, 1) == 15.7


@pytest.mark.parametrize("tensor", [1, 4])
def test_products_of_latent_vectors(tensor: int):
    """Down on the tokens at hand, with all weights; up on all tokens, with a part of the heads."""
    tokens, sequence = 4096, tensor > 1
    split = {"tensor": tensor, "sequence_parallel": sequence}
    here, heads = tokens / tensor, 16 / tensor
    shapes = [
        (here, 1536, 1024),
        (here, 512 + 64, 1024),
        (tokens, heads * 192, 1536),
        (tokens, heads * 256, 512),
        (tokens, 1024, heads * 128),
    ]
    expected_s = sum(MACHINE.product_s(*shape, width=2) for shape in shapes)
    scores = tokens**2 * heads
    expected_s += MACHINE.kernel_s + 0.5 * 2 * scores * (192 + 128) / MACHINE.flash_flops_per_s
    forward = works(ALIKE, **split).layer.forward
    of_experts = [(tokens * 8 / 8, 4096 / tensor, 1024), (tokens * 8 / 8, 1024, 2048 / tensor)]
    expected_s += sum(MACHINE.product_s(*shape, width=2, count=8) for shape in of_experts)
    assert forward.products_s == pytest.approx(expected_s)


def test_a_fused_backward_has_three_products_with_channels_of_keys():
    """Scores again, gradients of queries and of keys; those of values and of probabilities have values' channels."""
    wider = replace(ALIKE, qk_head_dim=ALIKE.qk_head_dim + 64, v_head_dim=ALIKE.v_head_dim - 64)
    of_scores = 0.5 * 2 * 4096**2 * 16 * 64 / MACHINE.flash_flops_per_s

    def core_s(model: Model) -> tuple[float, float]:
        work = works(model, recompute=Recompute.SELECTIVE).layer
        weights = (model.query_size * 1536, model.num_attention_heads * (model.qk_head_dim + model.v_head_dim) * 512)
        return work.again.products_s, work.backward.products_s - 2 * 2 * 4096 * sum(weights) / MACHINE.flops_per_s

    (forward_s, backward_s), (wide_forward_s, wide_backward_s) = core_s(ALIKE), core_s(wider)
    assert wide_forward_s == pytest.approx(forward_s)
    out_s = 2 * 2 * 4096 * 1024 * 16 * 64 / MACHINE.flops_per_s
    assert wide_backward_s - backward_s == pytest.approx(of_scores - out_s, rel=0.02)


def test_latent_vectors_are_gathered_in_place_of_what_they_come_from():
    work = works(ALIKE, tensor=4, sequence_parallel=True, expert_tensor=1, expert=2, data=2).layer
    half = [MACHINE.reduce_scatter_s(2 * 4096 * count, 4, 1) for count in (1536, 512, 64, 1024)]
    assert work.forward.tensor_parallel_s == work.backward.tensor_parallel_s == pytest.approx(sum(half))
    dense = replace(ALIKE, num_experts=0)
    apart = works(dense, tensor=4)
    whole_s = MACHINE.all_reduce_s(2 * 4096 * 1024, 4, 1)
    latents_s = sum(MACHINE.all_reduce_s(2 * 4096 * count, 4, 1) for count in (1536, 512))
    assert apart.layer.forward.tensor_parallel_s == pytest.approx(2 * whole_s)
    assert apart.layer.backward.tensor_parallel_s == pytest.approx(latents_s + whole_s)


def test_kernels_of_latent_attention_that_are_no_products():
    """Per token of 4 ranks: of 4 heads' queries 64 channels read and written, keys and values of 128 each read, 64 of
    the positions, keys of 192 and values of 128 written; norms of 1536 and 512 on a share of the tokens; backward, a
    sum of both gradients of 1024.
    """
    inside = 4 * (2 * 64 + (128 + 128) + (192 + 128)) + 64
    forward = inside + 2 * (1536 + 512) / 4, 2 + 2
    backward = inside + 3 * (1536 + 512) / 4 + 3 * 1024 / 4, 2 + 2 * 2 + 1
    for numbers, is_backward in ((forward, False), (backward, True)):
        assert attention.elementwise(ALIKE, 10, 4, 4, backward=is_backward) == (10 * numbers[0], numbers[1])


def test_what_latent_attention_keeps():
    """Of a token of DeepSeek-V3, in bf16: queries and keys of 128 heads with 192 channels, values and outputs with 128,
    latent vectors before and after their norms; two inputs of norms and what those give, and of shared experts and
    their 2048 channels thrice.
    """
    model = replace(V3, dense_layers=0, mtp_num_layers=0, num_experts=0, ffn_hidden_size=18432)
    kept = 2 * (128 * 2 * (192 + 128) + 2 * (1536 + 512) + 4 * 7168 + 3 * 18432)
    assert activations.of_layer(model, layout()).kept == 4096 * kept
    unnormed = replace(model, qk_layernorm=False)
    assert activations.of_layer(unnormed, layout()).kept == 4096 * (kept - 2 * (1536 + 512))
    split = activations.of_layer(model, layout(tensor=8, sequence_parallel=True))
    assert split.kept == 4096 * kept / 8
    gradients = 2 * 128 * 2 * (192 + 128)
    assert activations.of_layer(model, layout()).working == 4096 * max(gradients, 2 * (3 * 18432 + 2 * 7168))
    assert activations.of_layer(model, layout(recompute=Recompute.FULL)).input == 4096 * 2 * 7168


def test_gradients_of_weights_on_every_tensor_parallel_rank_are_summed():
    sequence = layout(tensor=4, sequence_parallel=True, data=2)
    pipelines = [
        costs.times_of(model, sequence, DGX).pipeline for model in (PLAIN, replace(PLAIN, multi_latent_attention=False))
    ]
    weights = [weights_of(model, 4) for model in (PLAIN, replace(PLAIN, multi_latent_attention=False))]
    expected = MACHINE.all_reduce_s(4 * 3 * 1024 * (1536 + 512 + 64), 4, 1)
    for one in weights:
        expected_sum_s = MACHINE.all_reduce_s(4 * one.of(Contents(3, embedding=True), PLAIN), 2, 4)
        expected_sum_s += MACHINE.all_reduce_s(4 * 3 * one.experts, 2, 4)
        assert pipelines.pop(0).gradients_s == pytest.approx(expected_sum_s + expected)
        expected = 0.0


@pytest.mark.parametrize("tensor", [1, 2])
def test_shared_experts_are_one_more_mlp(tensor: int):
    split = {"tensor": tensor, "sequence_parallel": tensor > 1}
    with_them, without = works(PLAIN, **split).layer, works(ALIKE, **split).layer
    width = 2048 / tensor
    once_s = MACHINE.product_s(4096, 2 * width, 1024, width=2) + MACHINE.product_s(4096, 1024, width, width=2)
    assert with_them.forward.products_s - without.forward.products_s == pytest.approx(once_s)
    more_s = MACHINE.all_reduce_s(2 * 4096 * 1024, tensor, 1)
    assert with_them.forward.tensor_parallel_s - without.forward.tensor_parallel_s == pytest.approx(more_s)
    moved = 2 * 4096 * (3 * width + 3 * 1024 / tensor)
    gated = works(replace(PLAIN, moe_shared_expert_gate=True), **split).layer
    elementwise = [work.forward.elementwise_s for work in (without, with_them, gated)]
    assert elementwise[1] - elementwise[0] == pytest.approx(MACHINE.elementwise_s(moved, 2))
    assert elementwise[2] - elementwise[1] == pytest.approx(MACHINE.elementwise_s(2 * 4096 * 3 * 1024 / tensor, 3))
    back = [work.backward.elementwise_s for work in (without, with_them, gated)]
    moved = 2 * 4096 * (1.5 * 3 * width + 3 * 1024 / tensor) + 2 * 4 * 3 * 1024 * width
    assert back[1] - back[0] == pytest.approx(MACHINE.elementwise_s(moved, 2))
    assert back[2] - back[1] == pytest.approx(MACHINE.elementwise_s(2 * 4096 * 2 * 3 * 1024 / tensor, 6))
    unfused = [works(model, **split, fused_swiglu=False).layer for model in (ALIKE, PLAIN)]
    for times, more, way in ((elementwise, 2, "forward"), (back, 8, "backward")):
        both = [getattr(work, way).elementwise_s for work in unfused]
        kernels = 2 if way == "forward" else 3
        more_s = MACHINE.elementwise_s(2 * 4096 * more * width, kernels)
        assert both[1] - both[0] - (times[1] - times[0]) == pytest.approx(more_s)
    kept = [activations.of_layer(model, layout(**split)).kept for model in (ALIKE, PLAIN)]
    assert kept[1] - kept[0] == 4096 * 2 * 3 * width
    held = [weights_of(model, tensor, expert=4).layer for model in (ALIKE, PLAIN)]
    assert held[1] - held[0] == 3 * 1024 * width


def test_the_first_stage_has_the_dense_layers():
    model = replace(MIXED, mtp_num_layers=0)
    one, of = layout(), works(model)
    assert of.dense == works(model.dense).layer != of.layer
    pipeline = costs.times_of(model, one, DGX).pipeline
    assert pipeline.first.forward_s == pytest.approx(3 * of.dense.forward_s + of.embedding.forward_s)
    assert pipeline.middle.forward_s == pytest.approx(3 * of.layer.forward_s)
    needed = memory.stages(model, one)
    assert needed[0].weights_bytes == 2 * weights_of(model.dense, 1).of(Contents(3, embedding=True), model.dense)
    assert needed[1].weights_bytes == 2 * 3 * (weights_of(model, 1).layer + weights_of(model, 1).experts)
    dense = activations.of_layer(model.dense, one)
    assert needed[0].activations_bytes == 4 * 3 * dense.kept
    longer = replace(model, num_layers=16)
    kept = 4 * (3 * dense.kept + activations.of_layer(model, one).kept)
    assert memory.stages(longer, one)[0].activations_bytes == kept


def test_updates_and_sums_are_those_of_the_stage_that_holds_most():
    model = replace(MIXED, mtp_num_layers=0)
    one = layout(data=2)
    held = weights_of(model, 1)
    stages = [
        (held.of(one, model), held.experts_of(one)) for stage in range(4) for one in contents_of(model, layout(), stage)
    ]
    assert max(stages, key=sum) == stages[3] != stages[0]
    expected = sum(MACHINE.all_reduce_s(4 * count, 2, 1) for count in stages[3])
    assert costs.times_of(model, one, DGX).pipeline.gradients_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recompute_layers", "dense", "others"), [(1, 1, 0), (3, 3, 0), (4, 3, 1)], ids=["one", "dense", "all"]
)
def test_a_block_of_layers_begins_with_the_dense_ones(recompute_layers: int, dense: int, others: int):
    model = replace(MIXED, num_layers=16, mtp_num_layers=0)
    block = {"recompute": Recompute.FULL, "recompute_method": RecomputeMethod.BLOCK}
    one = layout(**block, recompute_layers=recompute_layers)
    of, pipeline = works(model, **block), costs.times_of(model, one, DGX).pipeline
    again_s = dense * of.dense.again_s + others * of.layer.again_s
    once_s = 3 * of.dense.backward_s + of.layer.backward_s + of.embedding.backward_s
    assert pipeline.first.backward_s == pytest.approx(once_s + again_s)
    kept = [activations.of_layer(kind, one) for kind in (model.dense, model)]
    expected = recompute_layers * kept[0].input + (3 - dense) * kept[0].kept + (1 - others) * kept[1].kept
    assert memory.stages(model, one)[0].activations_bytes == pytest.approx(4 * expected)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush", "gpipe"])
@pytest.mark.parametrize("m", [4, 7, 24])
@pytest.mark.parametrize("width", [256, 18432, 60000])
@pytest.mark.parametrize("link_gb_s", [450, 2])
def test_equals_the_simulator(schedule: str, m: int, width: int, link_gb_s: float):
    """With dense layers that take less time than those with experts, as long, or longer, a last stage that takes
    longest, and transfers that take as long as a stage.
    """
    slow = replace(DGX, intra_node_gb_s=link_gb_s)
    for mtp, vocabulary in ((0, 1024), (0, 129280), (1, 129280)):
        model = replace(MIXED, dense_ffn_hidden_size=width, mtp_num_layers=mtp, vocab_size=vocabulary)
        one = layout(schedule=schedule, global_batch=m, receives=Receives.EARLY)
        pipeline = costs.times_of(model, one, slow).pipeline
        assert batch.batch_s(one, pipeline) == pytest.approx(batch.simulated_s(one, pipeline), rel=1e-9)
        assert costs.least_s(model, one, slow) <= batch.batch_s(one, pipeline) * (1 + 1e-12)
        assert costs.work_s(model, one, slow) <= batch.batch_s(one, pipeline)


def test_one_more_token_on_the_last_stage():
    one, model = layout(tensor=2, sequence_parallel=True), replace(MIXED, dense_layers=0, dense_ffn_hidden_size=0)
    of = works(model, tensor=2, sequence_parallel=True)
    pipelines = [costs.times_of(kind, one, DGX).pipeline for kind in (model, replace(model, mtp_num_layers=0))]
    assert pipelines[0].first == pipelines[1].first
    forward_s, backward_s = of.mtp.forward_s + of.loss.forward_s, of.mtp.backward_s + of.loss.backward_s
    assert pipelines[0].last.forward_s - pipelines[1].last.forward_s == pytest.approx(forward_s)
    assert pipelines[0].last.backward_s - pipelines[1].last.backward_s == pytest.approx(backward_s)
    head_s = MACHINE.product_s(4096, 512, 2048, width=2)
    assert of.mtp.forward.products_s == pytest.approx(of.layer.forward.products_s + head_s)
    usual_s = sum(work.forward.tensor_parallel_s for work in (of.embedding, of.layer))
    gathered_s = sum(MACHINE.reduce_scatter_s(2 * 4096 * size, 2, 1) for size in (2048, 1024))
    assert of.mtp.forward.tensor_parallel_s == pytest.approx(usual_s + gathered_s)
    # The gradients of the embedding are summed over both ends, though it is not tied to the output layer.
    assert pipelines[0].norm_s > pipelines[1].norm_s
    parts = costs.iteration(model, one, DGX)
    assert sum(parts.parts.values()) == pytest.approx(parts.time_s)


def test_operations_of_layers_of_several_kinds():
    """Layers of both kinds with one output layer; one more token has a layer, a projection and an output layer more."""
    of = {layers: costs.model_flops(replace(PLAIN, num_layers=layers), 1) for layers in (1, 2, 9)}
    logits = 6 * 4096 * 129280 * 1024
    dense = costs.model_flops(replace(MIXED.dense, num_layers=3, mtp_num_layers=0), 1)
    assert costs.model_flops(replace(MIXED, mtp_num_layers=0), 1) == of[9] + dense - logits
    more = of[2] - of[1] + 6 * 4096 * 2 * 1024**2 + logits
    assert costs.model_flops(MIXED, 1) - costs.model_flops(replace(MIXED, mtp_num_layers=0), 1) == more


def test_muon_orthogonalizes_layers_of_several_kinds():
    plain = layout(optimizer=Optimizer.MUON, pipeline=4, pipeline_layout="Et*3|t|t*5|t*3L")
    more = replace(plain, pipeline_layout="Et*3|t|t*5|t*3mL")
    without = replace(MIXED, mtp_num_layers=0)
    first, layer_s, _, last_s = (muon.orthogonalized_s(without, plain, MACHINE, stage) for stage in range(4))
    assert first == muon.orthogonalized_s(without.dense, plain, MACHINE, 0)
    assert last_s == pytest.approx(3 * layer_s)
    more_s = muon.orthogonalized_s(MIXED, more, MACHINE, 3) - last_s
    assert more_s == pytest.approx(layer_s + muon.newton_schulz_s(1024, 2048, MACHINE))


@pytest.mark.parametrize("schedule", ["2bw", "gpipe"])
def test_memory_of_one_more_token(schedule: str):
    model, one = replace(MIXED, mtp_num_layers=2), layout(schedule=schedule)
    more, less = (memory.stages(kind, one)[-1] for kind in (model, replace(model, mtp_num_layers=0)))
    held = weights_of(model, 1)
    weights = 2 * (held.layer + held.experts + 2 * 1024**2 + 3 * 1024) + held.word_embedding
    assert more.weights_bytes - less.weights_bytes == 2 * weights
    assert more.optimizer_bytes - less.optimizer_bytes == 12 * weights
    losses, layer = 16 if schedule == "gpipe" else 1, activations.of_layer(model, one)
    kept = losses * 2 * (layer.kept + 4 * 4096 * 2 * 1024)
    assert more.activations_bytes - less.activations_bytes == pytest.approx(kept)
    softmaxes = losses * 2 * activations.of_loss(model, one).kept
    assert more.logits_bytes - less.logits_bytes == pytest.approx(softmaxes)
    full = replace(one, recompute=Recompute.FULL)
    more, less = (memory.stages(kind, full)[-1] for kind in (model, replace(model, mtp_num_layers=0)))
    assert more.activations_bytes - less.activations_bytes == losses * 2 * 2 * 4096 * 2 * 1024


def test_what_is_recomputed_of_further_tokens():
    """Uniformly, all of them with the projection; as a block, nothing."""
    model, of = replace(MIXED, dense_layers=0, dense_ffn_hidden_size=0), works(MIXED, recompute=Recompute.FULL)
    assert of.mtp.again_s > of.layer.again_s
    uniform = layout(recompute=Recompute.FULL)
    block = replace(uniform, recompute_method=RecomputeMethod.BLOCK, recompute_layers=3)
    last = [costs.times_of(model, one, DGX).pipeline.last.backward_s for one in (uniform, block)]
    assert last[0] - last[1] == pytest.approx(of.mtp.again_s)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MIXED, {"pipeline": 6}, "dense_layers 3: the cost model covers them on the first stage alone, which has 2"),
        (
            replace(MIXED, num_layers=16),
            {"schedule": "megatron", "chunks": 2},
            "dense_layers 3: the cost model covers them on the first chunk alone, which has 2 layers; use fewer stages",
        ),
        (replace(PLAIN, num_experts=0, mtp_num_layers=1), {"schedule": "gems"}, "mtp_num_layers 1: gems predicts no"),
        (MIXED, {"schedule": "pipedream", "global_batch": 1}, "mtp_num_layers 1: pipedream predicts no further tokens"),
        (MIXED, {"recompute": Recompute.FULL, "recompute_layers": 3}, "recompute_layers 3: with mtp_num_layers 1 Mega"),
        (
            replace(MIXED, dense_ffn_hidden_size=1025),
            {"tensor": 2, "sequence_parallel": True},
            "tensor 2 does not divide dense_ffn_hidden_size 1025; use 1",
        ),
        (
            replace(MIXED, moe_shared_expert_intermediate_size=1025),
            {"tensor": 2, "sequence_parallel": True},
            "tensor 2 does not divide moe_shared_expert_intermediate_size 1025; use 1",
        ),
    ],
)
def test_what_cannot_run(model: Model, changes: dict, message: str):
    assert str(problem(model, layout(**changes))).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_query_groups": 4}, "num_query_groups 4: multi_latent_attention has keys for each of 128 heads"),
        ({"dense_layers": 61}, "dense_layers 61 leave none of num_layers 61 for experts: use fewer, or num_experts 0"),
        ({"learned_positions": True}, "mtp_num_layers 1: Megatron predicts no further tokens with learned positions"),
        ({"kind": "bert"}, "multi_latent_attention True: Megatron has it for gpt alone, not bert"),
        ({"v_head_dim": -1}, "v_head_dim -1 is no count; give a whole number of at least 0"),
    ],
)
def test_what_no_model_is(changes: dict, message: str):
    with pytest.raises(PlanError, match=message):
        replace(V3, **changes)


@pytest.mark.parametrize(
    ("pattern", "layers", "dense"),
    [("1", 4, 0), ("[0,1,1]", 3, 1), ("[0]*2+[1]*2", 4, 2), ("(([0]*2)+[1]*(1+1))", 4, 2), ("[0, 1]", 2, 1)],
)
def test_patterns_of_layers(pattern: str, layers: int, dense: int):
    assert dense_first(pattern, layers) == dense


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("2", "--moe-layer-freq 2: the cost model covers dense layers only in front of all experts; give such"),
        ("[1,0,1,1]", "covers dense layers only in front of all experts; give ([0]*1+[1]*3) in its place"),
        ("[0,1]*2", "covers dense layers only in front of all experts; give ([0]*2+[1]*2) in its place"),
        ("[0]*4", "[0]*4: no layer has experts; leave out the experts"),
        ("[0]+[1]*2", "[0]+[1]*2: a pattern of 3 layers, and there are 4; give 4"),
        ("[1]*99999*99999", "give a whole number, or a pattern such as ([0]*3+[1]*58)"),
        ("[[1]]", "give a whole number, or a pattern"),
        ("[1", "give a whole number, or a pattern"),
        ("every", "give a whole number, or a pattern"),
        ("(" * 5000, "give a whole number, or a pattern"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str):
    with pytest.raises(PlanError) as refusal:
        dense_first(pattern, 4)
    assert message in str(refusal.value)


GIVEN = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 --disable-bias-linear "
    "--num-experts 8 --ffn-hidden-size 2048 --moe-ffn-hidden-size 256 --moe-layer-freq ([0]*1+[1]*7) "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 "
    "--multi-latent-attention --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --position-embedding-type rope "
    "--moe-shared-expert-intermediate-size 256 --moe-router-num-groups 4 --moe-router-group-topk 2"
)


def test_flags_are_printed_as_given():
    model = read_model(Options.parse(GIVEN.split()))
    assert " ".join(model_flags(model)) == f"{GIVEN.replace('--vocab-size 1000 ', '')} --max-position-embeddings 128"
    assert (model.dense_layers, model.dense_ffn_hidden_size, model.ffn_hidden_size) == (1, 2048, 256)
    assert (model.q_lora_rank, model.kv_lora_rank, model.qk_head_dim, model.v_head_dim) == (0, 32, 128, 128)
    assert (model.moe_shared_expert_intermediate_size, model.mtp_num_layers) == (256, 1)


def test_a_gate_is_printed():
    assert "--moe-shared-expert-gate" in model_flags(replace(PLAIN, moe_shared_expert_gate=True))
    assert "--moe-shared-expert-gate" not in model_flags(PLAIN)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("--moe-router-group-topk 2", "--moe-router-group-topk 2 needs --moe-router-num-groups; give it"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 2", "3 does not divide --num-experts 8; use [24]"),
        ("--moe-router-num-groups 2 --moe-router-group-topk 4", "4: there are 2 groups; use 2 or less"),
    ],
)
def test_groups_of_experts(groups: str, message: str):
    alone = (
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 --num-experts 8"
    )
    with pytest.raises(PlanError, match=message):
        read_model(Options.parse(f"{alone} {groups}".split()))


def test_flags_without_what_they_belong_to_mean_nothing():
    alone = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000"
    more = "--kv-lora-rank 512 --v-head-dim 64 --moe-shared-expert-intermediate-size 256 "
    assert read_model(Options.parse(f"{alone} {more}".split())) == read_model(Options.parse(alone.split()))


def test_notes():
    words = f"{GIVEN} --micro-batch-size 1 --moe-shared-expert-overlap --transformer-impl local --moe-grouped-gemm"
    notes = read(Options.parse(words.split()), gpus=1).notes
    assert "--moe-shared-expert-overlap: priced without that overlap" in notes
    assert "--multi-latent-attention: priced with Transformer Engine's layers" in notes
    with pytest.raises(PlanError, match="does not cover one layer that predicts several tokens"):
        read(Options.parse([*words.split(), "--mtp-use-repeated-layer"]), gpus=1)


def test_rows_with_megatrons_arguments():
    """As a dump of all of them has them, those that are not set included."""
    row = {
        "cluster": "dgx-h100",
        "gpus": 8,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "expert_model_parallel_size": 8,
        "bf16": True,
        "num_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "seq_length": 1024,
        "vocab_size": 1000,
        "ffn_hidden_size": 4096,
        "moe_ffn_hidden_size": 512,
        "num_experts": 8,
        "moe_router_topk": 2,
        "bias": False,
        "multi_latent_attention": False,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "mtp_num_layers": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_layer_freq": 1,
    }
    plain = predicted(row)
    assert predicted({**row, "moe_layer_freq": [0, 1, 1, 1]})["time_s"] != plain["time_s"]
    with pytest.raises(PlanError, match="a pattern of 61 layers, and there are 4; give 4"):
        predicted({**row, "moe_layer_freq": "([0]*3+[1]*58)"})
    assert predicted({**row, "multi_latent_attention": True})["time_s"] > plain["time_s"]
    assert predicted({**row, "moe_shared_expert_intermediate_size": 512})["time_s"] > plain["time_s"]
    assert predicted({**row, "mtp_num_layers": 1, "learned_positions": False})["time_s"] > plain["time_s"]
    by_name = {"cluster": "dgx-h100", "gpus": 512, "pp": 16, "ep": 32, "mbs": 1, "gbs": 512, "model": "deepseek-v3"}
    ends = {"first_stage_layers": 3, "last_stage_layers": 2, "recompute": "full", "distributed_optimizer": True}
    assert predicted({**by_name, **ends, "schedule": "2bw"})["time_s"] > 0


def test_a_plan_of_deepseek_v3():
    """671B parameters on 1,024 GPUs, for which dense layers have to be in the first stage."""
    from megatron_2bw.planner.search.search import search
    from megatron_2bw.planner.specs.space import Space

    space = Space(schedules=("2bw", "1f1b-flush"), pipelines=(16,), tensors=(1,), experts=(8,))
    plan = search(V3, sized(DGX, gpus=1024), 4096, space, keep=3)
    for choice in plan.choices:
        assert choice.layout.first_stage_layers >= V3.dense_layers
        assert choice.layout.recompute_method is RecomputeMethod.BLOCK or choice.layout.recompute_layers == 1


@pytest.mark.parametrize(("index", "time", "kept", "most"), [(0, 0.06, 0.06, 0.08), (1, 0.071, 0.09, 0.02)])
def test_megatrons_own_deepseek(index: int, time: float, kept: float, most: float):
    """Nothing was fitted on them.

    The second was 4% long while the gradients of both embeddings, 256,000 rows each, had no price, 6.6% with them, and
    is 7.1% long with the waits for what its chunks send; its loss is priced without the kernels that it fuses. Twice
    as many GPUs would have left another number of bytes between batches, and half as many could not have shared the
    experts of the second.
    """
    row, measured_bytes = measured_deepseek.times()[index], measured_deepseek.lasting_bytes()[index]
    assert problem(row.model, row.layout) is None
    assert costs.iteration(row.model, row.layout, row.cluster).time_s == pytest.approx(row.measured, rel=time)
    lasting = []
    for data in (row.layout.data, 2 * row.layout.data):
        last = memory.stages(row.model, replace(row.layout, data=data))[-1]
        lasting.append(last.weights_bytes + last.gradients_bytes + last.optimizer_bytes)
    assert lasting[0] == pytest.approx(measured_bytes, rel=kept)
    assert lasting[1] < 0.8 * measured_bytes
    needed = memory.stages(row.model, row.layout)[-1].allocated_bytes
    assert needed == pytest.approx(measured_deepseek.memory()[index].measured, rel=most)


LATENT = replace(
    MIXED,
    dense_layers=0,
    mtp_num_layers=0,
    num_experts=0,
    moe_shared_expert_intermediate_size=0,
    ffn_hidden_size=4096,
    multi_latent_attention=True,
    q_lora_rank=256,
    kv_lora_rank=128,
    qk_head_dim=64,
    qk_pos_emb_head_dim=32,
    v_head_dim=64,
)


def in_8_bits(tensor: int = 1) -> tuple[Layout, Layout]:
    """One layout without and with products in 8 bits."""
    plain = Layout(
        schedule="megatron",
        pipeline=1,
        data=1,
        tensor=tensor,
        microbatch=2,
        global_batch=2,
        sequence_parallel=tensor > 1,
    )
    return plain, replace(plain, fp8=Fp8.DELAYED)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("normed", [True, False])
def test_latent_vectors_in_8_bits(normed: bool, tensor: int):
    """Twice the hidden size and, without norms of their own, latent vectors are cast; what norms write is not cast
    again. Heads and MLP are split, all else is where sequence-parallel ranks have it."""
    model = replace(LATENT, qk_layernorm=normed)
    machine = replace(MACHINE, kernel_s=0.0, launch_s=0.0)
    plain, cast = (works_of(model, Split.of(one), machine).layer for one in in_8_bits(tensor))
    heads, tokens = 16, 2 * model.seq_length
    inputs = 2 * 1024 + (0 if normed else 256 + 128) + heads * 64 + model.ffn_hidden_size
    outputs = 256 + (128 + 32) + heads * (64 + 32) + heads * (64 + 64) + 2 * 1024
    outputs += (2 if model.swiglu else 1) * model.ffn_hidden_size
    for numbers, first, second in (
        (inputs, plain.forward, cast.forward),
        (outputs, plain.backward, cast.backward),
    ):
        moved = (second.elementwise_s - first.elementwise_s) * machine.memory_bytes_per_s
        assert moved == pytest.approx(4 * tokens * numbers / tensor)


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_latent_attention_keeps_in_8_bits(tensor: int):
    """The second norm's output, latent vectors and what goes into the MLP's second product have one byte less, what two
    products read of the first norm's one each, attention's output one more."""
    in_16, in_8 = (activations.of_layer(LATENT, one).kept for one in in_8_bits(tensor))
    less = 1024 + 256 + 128 + LATENT.ffn_hidden_size - 16 * 64
    assert in_16 - in_8 == pytest.approx(2 * LATENT.seq_length * less / tensor)


def test_shared_experts_in_8_bits():
    """Their input is cast once more than the router's, and kept; so is what goes into their second product."""
    shared = replace(LATENT, num_experts=8, moe_router_topk=2, moe_shared_expert_intermediate_size=512)
    routed = replace(shared, moe_shared_expert_intermediate_size=0)
    machine = replace(MACHINE, kernel_s=0.0, launch_s=0.0)
    tokens, moved, kept = 2 * LATENT.seq_length, [], []
    for model in (shared, routed):
        plain, cast = (works_of(model, Split.of(one), machine).layer.forward for one in in_8_bits())
        moved.append((cast.elementwise_s - plain.elementwise_s) * machine.memory_bytes_per_s)
        in_16, in_8 = (activations.of_layer(model, one).kept for one in in_8_bits())
        kept.append(in_8 - in_16)
    assert moved[0] - moved[1] == pytest.approx(4 * tokens * (1024 + 512))
    assert kept[0] - kept[1] == pytest.approx(tokens * (1024 - 512))
