"""Ranks that share sequences, and ranks that share experts: time, memory, rules, flags, and the search over them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.sizes import Sizes, Split
from megatron_2bw.planner.cost.speeds import A100, machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import layout_flags
from megatron_2bw.planner.flags.flags import read as read_flags
from megatron_2bw.planner.flags.model_flags import read_model
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.memory import activations, memory
from megatron_2bw.planner.multiples import divisors
from megatron_2bw.planner.naming import chosen, name
from megatron_2bw.planner.pipeline.stages import Contents
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.report.advice import advice
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.search.candidates import Candidates
from megatron_2bw.planner.search.search import search
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.inputs import sized
from megatron_2bw.planner.specs.layout import Dispatcher, Layout, Recompute
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.space import Space
from tests.planner.every import equal

GPT = Model(num_layers=8, hidden_size=1024, num_attention_heads=16, seq_length=16384, vocab_size=50257)
EXPERTS = replace(GPT, seq_length=2048, num_experts=8, bias=False)
DGX = CLUSTERS["dgx-a100"]
TWO_DGX = replace(DGX, nodes=2)
FIRST = Contents(4, embedding=True)
"""On the first stage of `layout`."""


def layout(**changes) -> Layout:
    return Layout(
        **({"schedule": "1f1b-flush", "pipeline": 2, "data": 1, "microbatch": 1, "global_batch": 8} | changes)
    )


def layer(model: Model, cluster=DGX, **changes):
    return works_of(model, Split.of(layout(**changes)), machine_of(cluster)).layer


def test_a_share_of_the_sequences_is_kept():
    """All weights and their gradients, but ``1/c`` of activations and logits; the optimizer is shared by more ranks."""
    model = replace(GPT, dropout=False)
    whole, shared = (memory.stages(model, layout(context=c, distributed_optimizer=True)) for c in (1, 4))
    for one, four in zip(whole, shared, strict=True):
        assert four.activations_bytes == one.activations_bytes / 4
        assert four.logits_bytes == one.logits_bytes / 4
        assert (four.weights_bytes, four.gradients_bytes) == (one.weights_bytes, one.gradients_bytes)
        assert four.optimizer_bytes == one.optimizer_bytes / 4


def test_a_layer_of_shared_sequences():
    """Each rank has ``1/c`` of the arithmetic; keys and values of the others cost nothing if they arrive in time."""
    whole, shared = layer(GPT), layer(GPT, context=4)
    for one, four in ((whole.forward, shared.forward), (whole.backward, shared.backward)):
        kernels_s = 16 * A100.kernel_s  # Do not get fewer.
        assert (four.products_s - kernels_s) * 4 < one.products_s < 4 * four.products_s
        assert four.context_parallel_s == 0
    assert (whole.forward.context_parallel_s, whole.forward.expert_parallel_s) == (0, 0)


def test_keys_and_values_that_are_late():
    """Over a slow network: c-1 turns of a ring over nodes, less the attention that hides a part of each."""
    slow = replace(TWO_DGX, inter_node_gb_s=1, gpus_per_node=1)  # All of its network is one GPU's.
    machine, keys_bytes = machine_of(slow), 2 * 8192 * 1024 * 2
    send_s = A100.collective_s + keys_bytes / machine.network_bytes_per_s
    late = layer(GPT, slow, context=2).forward
    attention_s = 0.5 * 4 * 8192 * 16384 * 1024 / machine.flash_flops_per_s + 2 * A100.kernel_s
    assert late.context_parallel_s == pytest.approx(send_s - attention_s / 2, rel=1e-6)
    again = layer(GPT, slow, context=2, recompute=Recompute.SELECTIVE).again
    assert again.context_parallel_s == late.context_parallel_s


def test_replicas_that_share_sequences_sum_gradients_too():
    """As replicas with sequences of their own do; transfers and embeddings are of a share."""
    shared, apart = layout(context=4, data=2, global_batch=16), layout(data=8, global_batch=64)
    of_shared, of_apart = (costs.times_of(GPT, one, TWO_DGX).pipeline for one in (shared, apart))
    assert of_shared.gradients_s == of_apart.gradients_s > 0
    assert of_shared.norm_s == of_apart.norm_s
    assert of_shared.update_s == of_apart.update_s
    start_s = A100.collective_s
    assert (of_shared.send_s - start_s) * 4 == pytest.approx(of_apart.send_s - start_s)


@pytest.mark.parametrize(("tensor", "expert_tensor"), [(1, 1), (2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize("expert", [1, 2, 4])
def test_every_expert_is_somewhere(tensor: int, expert_tensor: int, expert: int):
    held = weights_of(EXPERTS, tensor, expert=expert, expert_tensor=expert_tensor)
    assert held.experts * expert * expert_tensor == 8 * EXPERTS.mlp_parameters
    dense = weights_of(replace(EXPERTS, num_experts=0), tensor)
    router = 8 * EXPERTS.hidden_size
    assert held.layer == dense.layer - EXPERTS.mlp_parameters // tensor + router


def test_experts_have_other_replicas_than_the_rest():
    """8 GPUs per stage, 4 of which share the experts: each expert is there twice, everything else 8 times."""
    one = layout(data=8, expert=4, distributed_optimizer=True, global_batch=64)
    assert (one.replicas, one.expert_replicas) == (8, 2)
    first = memory.stages(EXPERTS, one)[0]
    weights = weights_of(EXPERTS, 1, expert=4)
    experts, rest = 4 * weights.experts, weights.of(FIRST, EXPERTS)
    assert first.weights_bytes == 2 * (experts + rest)
    assert first.gradients_bytes == 4 * (experts + rest)
    assert first.optimizer_bytes == 12 * (experts / 2 + rest / 8)
    split = layout(data=4, tensor=2, expert=8, expert_tensor=1, sequence_parallel=True, global_batch=64)
    assert (split.replicas, split.expert_replicas) == (4, 1)


def test_sums_of_experts_gradients():
    """Over the ranks with the same experts, which are further apart: here, one on each node."""
    four = replace(DGX, nodes=4)
    one = layout(data=16, expert=8, global_batch=64)
    machine, weights = machine_of(four), weights_of(EXPERTS, 1, expert=8)
    expected = machine.all_reduce_s(4 * weights.of(FIRST, EXPERTS), 16, 1)
    expected += machine.all_reduce_s(4 * 4 * weights.experts, 2, 8)
    assert costs.times_of(EXPERTS, one, four).pipeline.gradients_s == pytest.approx(expected)


def test_updates_of_experts():
    """Of fewer shards: Adam moves 28 bytes per weight of its own, and what is in bf16 and fp32."""
    one = layout(data=8, expert=4, distributed_optimizer=True, global_batch=64)
    machine, weights = machine_of(TWO_DGX), weights_of(EXPERTS, 1, expert=4)
    rest, experts = weights.of(FIRST, EXPERTS), 4 * weights.experts
    moved = (28 + 2 + 4) * (rest / 8 + experts / 2) + 4 * (rest + experts)
    expected = machine.elementwise_s(moved)
    expected += machine.reduce_scatter_s(2 * rest, 8, 1) + machine.reduce_scatter_s(2 * experts, 2, 4)
    assert costs.times_of(EXPERTS, one, TWO_DGX).pipeline.update_s == pytest.approx(expected)


def test_tokens_go_to_their_experts_and_back():
    """Two of a token's copies, out and back, and a tenth more for the busiest rank; 3/4 of what it sends leave it."""
    work = layer(EXPERTS, data=4, expert=4, global_batch=8)
    sent = 1.1 * 2048 * 2 * 1024 * 2 * 3 / 4
    link_bytes_per_s = A100.nvlink_efficiency * DGX.intra_node_gb_s * 1e9
    assert work.forward.expert_parallel_s == pytest.approx(2 * (A100.collective_s + sent / link_bytes_per_s))
    assert work.backward.expert_parallel_s == work.forward.expert_parallel_s
    assert layer(EXPERTS).forward.expert_parallel_s == 0


def test_tokens_to_other_nodes_share_their_network():
    machine = machine_of(TWO_DGX)
    over_nodes = machine.all_to_all_s(1e9, 16, 1)
    assert over_nodes == pytest.approx(1e9 / 2 * 8 / (A100.network_efficiency * 200e9), rel=0.01)
    assert machine.all_to_all_s(1e9, 8, 1) < over_nodes
    assert machine.all_to_all_s(1e9, 2, 8) == over_nodes  # Half of it stays, as with 16.
    assert machine.all_to_all_s(1e9, 1, 1) == 0


def test_experts_of_one_rank_each_compute_as_much():
    """Equally busy: as many rows in all, in fewer and larger products; split experts have narrower ones."""
    alone = layer(EXPERTS)
    shared, unsplit = layer(EXPERTS, data=8, expert=8), layer(EXPERTS, data=8, tensor=2, expert=8, expert_tensor=1)
    assert alone.forward.products_s < shared.forward.products_s < 1.1 * alone.forward.products_s
    split = layer(EXPERTS, data=8, tensor=2, expert=8)
    assert unsplit.forward.tensor_parallel_s < split.forward.tensor_parallel_s
    flops_s = (unsplit.forward.products_s - split.forward.products_s) / split.forward.products_s
    assert abs(flops_s) < 0.1


def test_only_ranks_that_split_experts_gather_their_tokens():
    """Where no ranks share the experts: none with whole ones, and as many as split one, even of several replicas."""
    machine = machine_of(DGX)

    def mlp_s(**more) -> float:
        work = layer(EXPERTS, global_batch=64, **more)
        assert work.forward.expert_parallel_s == 0
        reduced_s = machine.all_reduce_s(2 * 2048 * 1024, more.get("tensor", 1), 1)
        return work.forward.tensor_parallel_s - reduced_s

    of_tensor_parallel = {"tensor": 4, "sequence_parallel": True}
    assert mlp_s(**of_tensor_parallel) == pytest.approx(machine.all_reduce_s(2 * 2048 * 1024, 4, 1))
    assert mlp_s(**of_tensor_parallel, expert_tensor=1) == 0
    assert mlp_s(**of_tensor_parallel, expert_tensor=2) == pytest.approx(machine.all_reduce_s(2048 * 1024, 2, 1))
    assert mlp_s(data=4, expert_tensor=2) == pytest.approx(machine.all_reduce_s(2 * 2 * 2048 * 1024, 2, 1))


def test_what_goes_into_experts_is_kept_once():
    """Measured on 128 tokens, h = 64, top 2, of MoELayer: 32,768 bytes of fc1's input alone, or where four ranks split
    each expert, and a quarter where they split none.
    """
    model = replace(
        EXPERTS,
        seq_length=128,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        ffn_hidden_size=256,
    )
    dense = replace(model, num_experts=0)

    def into_experts(**more) -> float:
        kept = [activations.of_layer(one, layout(data=4, global_batch=4, **more)).kept for one in (model, dense)]
        # Of two experts a token has what goes into GELU and comes out, and that once more before it is weighted.
        tensor = more.get("tensor", 1)
        return kept[0] - kept[1] - 128 * 2 * (2 * 3 - 2) * 256 / tensor

    assert into_experts() == 32768
    assert into_experts(tensor=4, sequence_parallel=True) == 32768
    assert into_experts(tensor=4, expert_tensor=1, sequence_parallel=True) == 8192


def test_tokens_are_put_in_the_order_of_their_experts():
    """Read and written on the way there and back, and once more where a rank has several experts of those shared."""
    alone, one_each, two_each = (layer(EXPERTS, data=8, expert=e, global_batch=8) for e in (1, 8, 4))
    bytes_per_s = machine_of(DGX).memory_bytes_per_s
    once = 2048 * 2 * 1024 * 2 * 1.1 / bytes_per_s
    activations_s = 1.1 * 2 * 2048 * 2 * (4096 + 4096) / bytes_per_s  # Into GELU and out of it.
    plain_s = alone.forward.elementwise_s - 4 * once / 1.1 - activations_s / 1.1
    assert one_each.forward.elementwise_s == pytest.approx(plain_s + 4 * once + activations_s, rel=1e-6)
    assert two_each.forward.elementwise_s == pytest.approx(plain_s + 8 * once + activations_s, rel=1e-6)


def test_a_ring_over_nodes_has_one_cards_share_of_the_network():
    machine = machine_of(TWO_DGX)
    assert machine.pass_on_s(1e9, 16, 1) == pytest.approx(1e9 / (A100.network_efficiency * 25e9), rel=0.01)
    assert machine.pass_on_s(1e9, 8, 1) == machine.pass_on_s(1e9, 2, 4) < machine.pass_on_s(1e9, 2, 8)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (GPT, {"context": 3}, "context 3: seq_length 16384 is no multiple of 6; use 2"),
        (GPT, {"context": 2, "fused_attention": False}, "context 2 needs fused attention; use 1, or fused attention"),
        (replace(GPT, kind=Kind.BERT), {"context": 2}, "context 2: Megatron cuts no sequences of bert; use 1"),
        (
            GPT,
            {"context": 8192, "tensor": 4, "sequence_parallel": True},
            "tensor 4 does not divide seq_length / context 2; use 2",
        ),
        (GPT, {"expert": 2, "data": 2}, "expert 2: the model has no experts; leave it out"),
        (GPT, {"expert_tensor": 2}, "expert_tensor 2: the model has no experts; leave it out"),
        (EXPERTS, {"expert": 3, "data": 3, "global_batch": 9}, "expert 3 does not divide num_experts 8; use 1"),
        (EXPERTS, {"expert": 4, "data": 2}, "expert 4 does not divide the 2 ranks that hold experts; use 2"),
        (
            EXPERTS,
            {"expert": 2, "data": 2, "distributed_optimizer": True, "optimizer_instances": 2},
            "optimizer_instances 2 does not divide the 1 replicas of an expert; use 1",
        ),
        (
            EXPERTS,
            {"expert": 2, "data": 3, "global_batch": 9, "expert_tensor": 3},
            "expert_tensor 3 does not divide ffn_hidden_size 4096",
        ),
        (EXPERTS, {"tensor": 2, "expert_tensor": 1}, "tensor 2 with experts needs sequence_parallel"),
        (replace(EXPERTS, bias=True), {}, "experts with a bias are not priced"),
    ],
)
def test_what_cannot_be_shared(model: Model, changes: dict, message: str):
    assert str(problem(model, layout(**changes))).startswith(message)


def every_layout(model: Model, gpus: int, batch: int) -> Iterator[Layout]:
    """Without recomputation, written down without the search."""
    counts = divisors(gpus)
    for d, t, c in itertools.product(counts, repeat=3):
        if gpus % (d * t * c) or batch % (gpus // (d * t * c)):
            continue
        w = gpus // (d * t * c)
        shares = itertools.product(divisors(w * c * t), (t, 1), divisors(batch // w), ("2bw", "gpipe"), (False, True))
        for e, split, b, schedule, distributed in shares:
            if model.seq_length // c < 4096 and c > 1:
                continue
            one = Layout(
                schedule=schedule,
                pipeline=d,
                tensor=t,
                context=c,
                data=w,
                expert=e,
                expert_tensor=split,
                microbatch=b,
                global_batch=batch,
                sequence_parallel=t > 1,
                distributed_optimizer=distributed,
                overlap_gradients=w * c > 1 and schedule != "2bw",
                overlap_parameters=distributed and w * c > 1 and schedule != "2bw" and d == 1,
            )
            if problem(model, one) is None and (schedule != "2bw" or one.microbatches >= d):
                yield one


@pytest.mark.parametrize("memory_gb", [80, 7])
@pytest.mark.parametrize(
    "model",
    [
        replace(GPT, num_layers=4, dropout=False),
        replace(EXPERTS, num_layers=4),
        replace(
            EXPERTS,
            num_layers=4,
            dense_layers=2,
            dense_ffn_hidden_size=1024,
            mtp_num_layers=1,
            learned_positions=False,
            multi_latent_attention=True,
            moe_shared_expert_intermediate_size=512,
        ),
    ],
    ids=["gpt", "experts", "layers of several kinds"],
)
def test_nothing_beats_the_best(model: Model, memory_gb: float):
    machine = sized(DGX, gpus=4)
    machine = replace(machine, gpu=replace(machine.gpu, memory_gb=memory_gb))
    best, sharing = {}, set()
    for one in every_layout(model, 4, 8):
        if memory.largest(model, one).total_bytes <= machine.memory_bytes:
            time_s = costs.iteration(model, one, machine).time_s
            best[one.schedule] = min(time_s, best.get(one.schedule, math.inf))
            sharing.add((one.context, one.expert))
    space = equal(schedules=("2bw", "gpipe"), recomputes=(Recompute.NONE,), extra_in_flight=(0,), gradient_buffers=(2,))
    ours: dict[str, float] = {}
    for choice in search(model, machine, 8, space).choices:
        ours.setdefault(choice.layout.schedule, choice.iteration.time_s)
    assert ours == pytest.approx(best, rel=1e-12)
    assert len(sharing) > 1


def test_whole_experts_are_tried_where_ranks_split_attention():
    """Their tokens need no collective between those ranks."""
    best = search(EXPERTS, DGX, 64, Space(tensors=(2,), experts=(8,))).best.layout
    assert (best.tensor, best.expert, best.expert_tensor) == (2, 8, 1)
    assert (
        search(EXPERTS, DGX, 64, Space(tensors=(2,), experts=(4,), expert_tensors=(2,))).best.layout.expert_tensor == 2
    )


def test_short_sequences_are_shared_when_asked_for():
    machine = sized(DGX, gpus=8)
    short = replace(GPT, seq_length=2048)
    assert {choice.layout.context for choice in search(short, machine, 16, keep=500).choices} == {1}
    assert search(short, machine, 16, Space(contexts=(2,))).best.layout.context == 2
    with pytest.raises(PlanError, match="context 3"):
        search(short, machine, 16, Space(contexts=(3,)))


def test_a_long_sequence_fits_if_it_is_shared():
    """Of 128k tokens, on 8 GPUs; without that, not even with everything recomputed."""
    long = replace(MODELS["llama3-8b"], seq_length=2**17)
    node = CLUSTERS["dgx-h100"]
    assert search(long, node, 8).best.layout.context > 1
    with pytest.raises(PlanError, match="fits"):
        search(long, node, 8, Space(contexts=(1,), tensors=(1,)))


@pytest.mark.parametrize(
    "one",
    [
        layout(context=2, data=2, tensor=2, sequence_parallel=True),
        layout(expert=4, data=4),
        layout(expert=4, data=2, tensor=2, expert_tensor=1, sequence_parallel=True, distributed_optimizer=True),
    ],
    ids=name,
)
def test_names_and_flags_mean_the_layout(one: Layout):
    model = EXPERTS if one.expert > 1 else GPT
    machine = sized(DGX, gpus=one.gpus)
    fitting = Candidates(model=model, cluster=machine, global_batch=8, space=Space())
    assert replace(fitting.layout(chosen(name(one))), overlap_gradients=False, overlap_parameters=False) == one
    words = [*layout_flags(model, one), *FLAGS_OF[model.num_experts]]
    assert ("--moe-grouped-gemm" in layout_flags(model, one)) == (model is EXPERTS)
    options = Options.parse(words)
    assert read_model(options) == model
    assert read_flags(options, gpus=one.gpus, gpu=machine.gpu).layout == one
    assert all("nearly equally busy" in note for note in read_flags(options, gpus=one.gpus, gpu=machine.gpu).notes)


FLAGS_OF = {
    0: "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 16384 --vocab-size 50257".split(),
    8: (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257 "
        "--num-experts 8 --disable-bias-linear --moe-grouped-gemm"
    ).split(),
}


def test_other_dispatchers_are_noted():
    words = "--expert-model-parallel-size 2 --micro-batch-size 1 --bf16".split()
    notes = read_flags(Options.parse([*words, *FLAGS_OF[8]]), gpus=2, gpu=DGX.gpu).notes
    assert "--expert-model-parallel-size: priced with --moe-token-dispatcher-type alltoall" in notes


@pytest.mark.parametrize(
    ("more", "dispatcher"),
    [
        ("", Dispatcher.DEEPEP),
        ("--moe-flex-dispatcher-backend deepep", Dispatcher.DEEPEP),
        ("--moe-flex-dispatcher-backend hybridep", Dispatcher.HYBRIDEP),
    ],
)
def test_a_flexible_dispatcher_is_priced(more: str, dispatcher: Dispatcher):
    words = (
        f"--expert-model-parallel-size 2 --micro-batch-size 1 --bf16 --moe-token-dispatcher-type flex {more}".split()
    )
    run = read_flags(Options.parse([*words, *FLAGS_OF[8]]), gpus=2, gpu=DGX.gpu)
    assert run.layout.dispatcher is dispatcher
    assert all("nearly equally busy" in note for note in run.notes)
    printed = " ".join(layout_flags(run.model, run.layout))
    assert f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {dispatcher}" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "dispatcher deepep: no ranks share the experts; use alltoall"),
        (
            "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            "dispatcher deepep with expert_tensor 2 is not priced; use expert_tensor 1",
        ),
        (
            "--expert-model-parallel-size 2 --moe-flex-dispatcher-backend ncclep",
            "does not cover NCCL's own exchanges of tokens",
        ),
        (
            "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
            "overlap_exchanges needs chunks on 2 stages",
        ),
    ],
)
def test_a_flexible_dispatcher_is_refused(more: str, message: str):
    words = f"--micro-batch-size 1 --bf16 --moe-token-dispatcher-type flex {more}".split()
    with pytest.raises(PlanError, match=message):
        read_flags(Options.parse([*words, *FLAGS_OF[8]]), gpus=8, gpu=DGX.gpu)


def test_a_plan_with_a_flexible_dispatcher():
    model = replace(EXPERTS, num_experts=16, moe_router_topk=4)
    plans = [
        search(model, TWO_DGX, 64, Space(experts=(1, 16), dispatcher=dispatcher), keep=100) for dispatcher in Dispatcher
    ]
    for dispatcher, plan in zip(Dispatcher, plans, strict=True):
        found = {choice.layout.expert: choice.layout.dispatcher for choice in plan.choices}
        assert found == {1: Dispatcher.ALLTOALL, 16: dispatcher}
    fastest = [min(c.iteration.time_s for c in plan.choices if c.layout.expert == 16) for plan in plans]
    assert fastest[1] == fastest[2] < fastest[0]
    with pytest.raises(PlanError, match="dispatcher deepep: v100-16gb has no such kernels"):
        search(model, CLUSTERS["p3.16xlarge"], 64, Space(dispatcher=Dispatcher.DEEPEP))


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (12, 2), (16, 2), (32, 4)])
def test_one_copy_for_every_node_and_rank(ranks: int, nodes: int):
    """Of experts drawn at random, counted: how many nodes and ranks a token's are on."""
    model = replace(EXPERTS, num_experts=96, moe_router_topk=6)
    rng = random.Random(0)
    drawn = [rng.sample(range(96), 6) for _ in range(4000)]
    on_ranks, on_nodes = (
        sum(len({expert * groups // 96 for expert in chosen}) for chosen in drawn) / len(drawn)
        for groups in (ranks, nodes)
    )
    machine, local = replace(machine_of(DGX), collective_s=0.0), min(ranks, 8)
    split = Split.of(layout(expert=ranks, data=ranks, global_batch=ranks, dispatcher=Dispatcher.DEEPEP))
    sizes = Sizes(model, split)
    token_bytes = sizes.tokens * sizes.hidden * 2 * (sizes.routed / 6)
    inside_s = on_ranks * (local - 1) / local * token_bytes / machine.link_bytes_per_s
    outside_s = on_nodes * (nodes - 1) / nodes * token_bytes * 8 / machine.network_bytes_per_s
    assert sizes.exchanges_s(machine) == pytest.approx(2 * max(inside_s, outside_s), rel=0.02)
    every_copy = Sizes(model, split._replace(dispatcher=Dispatcher.ALLTOALL))
    assert sizes.exchanges_s(machine) < every_copy.exchanges_s(machine)
    assert sizes.sorted_bytes() < every_copy.sorted_bytes()


def test_exchanges_beside_computation():
    """What is longer than the other microbatch's computation is left; without it, nothing changes."""
    fields = {"expert": 16, "data": 16, "global_batch": 16}
    model = replace(EXPERTS, num_experts=16, moe_router_topk=4)
    for cluster in (TWO_DGX, replace(TWO_DGX, inter_node_gb_s=2)):
        alone, beside = (layer(model, cluster, **fields, overlap_exchanges=on) for on in (False, True))
        exchanges_s = alone.forward.expert_parallel_s + alone.backward.expert_parallel_s
        computed_s = alone.forward_s + alone.backward_s - exchanges_s
        assert beside.forward_s + beside.backward_s == pytest.approx(max(computed_s, exchanges_s))
    assert exchanges_s > computed_s


def test_a_plan_that_old_versions_of_megatron_get_wrong_says_so():
    for schedule, expert_tensor, needs in (("2bw", 1, True), ("2bw", 2, False), ("megatron", 1, True)):
        space = Space(schedules=(schedule,), experts=(1,), tensors=(2,), expert_tensors=(expert_tensor,))
        plan = search(EXPERTS, DGX, 64, space)
        assert any("needs megatron-core 0.19" in sentence for sentence in advice(plan)) == needs
