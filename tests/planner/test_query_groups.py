"""More tensor-parallel ranks than query groups: time, memory and rules; see tests/mcore/test_regathered.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_2bw.planner.cost import attention
from megatron_2bw.planner.cost.layer import matrices, works_of
from megatron_2bw.planner.cost.sizes import Sizes, Split
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.memory import activations, memory
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Fp8, Layout, Recompute, RecomputeModule
from megatron_2bw.planner.specs.model import Model

DGX = CLUSTERS["dgx-h100"]
MACHINE = machine_of(DGX)
EIGHT = Model(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, seq_length=4096, vocab_size=32000
)
TWO = replace(EIGHT, num_query_groups=2)
TOKENS, CHANNELS = 4 * 4096, 128
ALL = 4096 + 2 * 2 * CHANNELS
"""Columns of queries, keys and values of both groups."""
GATHER_S = MACHINE.reduce_scatter_s(2 * TOKENS * ALL, 8, 1)


def layout(**changes: Any) -> Layout:
    """Eight ranks with a part of each layer."""
    base = {"schedule": "megatron", "pipeline": 1, "data": 1, "tensor": 8, "sequence_parallel": True, "microbatch": 4}
    return Layout(**(base | {"global_batch": 64} | changes))


def layer(model: Model, **changes: Any):
    return works_of(model, Split.of(layout(**changes)), MACHINE).layer


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": False}, {"fp8": Fp8.DELAYED}], ids=str)
def test_all_queries_keys_and_values_are_gathered_and_gradients_summed(changes: dict[str, Any]):
    """In 16 bits."""
    few, many = layer(TWO, **changes), layer(EIGHT, **changes)
    for one, other in ((few.forward, many.forward), (few.backward, many.backward)):
        assert one.tensor_parallel_s - other.tensor_parallel_s == pytest.approx(GATHER_S)
    collectives = [Sizes(model, Split.of(layout(**changes))).collectives for model in (TWO, EIGHT)]
    assert collectives[0] == collectives[1] + 1


def test_no_product_is_beside_it():
    wide = replace(TWO, ffn_hidden_size=65536)
    apart, beside = layer(wide), layer(wide, overlap_tensor=True)
    for one, other in ((apart.forward, beside.forward), (apart.backward, beside.backward)):
        assert one.tensor_parallel_s - other.tensor_parallel_s == pytest.approx(
            (one.tensor_parallel_s - GATHER_S) * 7 / 8
        )


def test_no_more_is_gathered_where_each_rank_has_a_group():
    assert attention.regathered(TWO, 2) == attention.regathered(EIGHT, 8) == 0
    assert attention.keys_and_values(TWO, 2) == (CHANNELS, CHANNELS)
    assert attention.regathered(TWO, 4) == attention.regathered(TWO, 8) == ALL


@pytest.mark.parametrize("changes", [{}, {"learned_positions": False}, {"qk_layernorm": True}], ids=str)
def test_copies_around_it(changes: dict[str, Any]):
    """Columns of ranks side by side; in the backward, apart, and twice a gradient into zeros, as of a part.

    Norms and positions are of the group's key: with eight groups, a rank has as many.
    """
    few, many = (layer(replace(model, **changes)) for model in (TWO, EIGHT))
    put_s = MACHINE.elementwise_s(2 * TOKENS * 2 * ALL, 1)
    assert few.forward.elementwise_s - many.forward.elementwise_s == pytest.approx(put_s)
    # Zeros and a gradient that is read and written, of 2 of 32 heads' queries and then of one of two groups.
    into_zeros = (4096 / 2 + 2 * 4096 / 8) + (ALL + 2 * ALL / 2)
    weights = 2 * 4 * 2 * (EIGHT.key_size - TWO.key_size) / 8 * 4096
    apart_s = MACHINE.elementwise_s(2 * TOKENS * (into_zeros + 2 * ALL) - weights, 5)
    assert few.backward.elementwise_s - many.backward.elementwise_s == pytest.approx(apart_s)


def test_attention_itself_is_the_same():
    """Each rank has as many heads' queries, and one key."""
    split = Split.of(layout())
    few, many = Sizes(TWO, split), Sizes(EIGHT, split)
    for passes in (1, 2):
        assert few.attention_s(MACHINE, passes) == many.attention_s(MACHINE, passes)
    assert few.products[0].columns == ALL / 8


def test_it_is_done_again_with_the_layer_and_not_with_attention_alone():
    full, core = layer(TWO, recompute=Recompute.FULL), layer(TWO, recompute=Recompute.SELECTIVE)
    assert full.again == full.forward
    assert core.again == layer(EIGHT, recompute=Recompute.SELECTIVE).again
    mlp = (RecomputeModule.MLP,)
    of_mlp = [layer(one, recompute=Recompute.SELECTIVE, recompute_modules=mlp).again for one in (TWO, EIGHT)]
    assert of_mlp[0] == of_mlp[1]


def test_context_parallel_ranks_pass_on_the_key_and_value_of_a_group():
    split = Split.of(layout(context=2))
    few, many = (Sizes(replace(model, hidden_size=64), split) for model in (TWO, EIGHT))
    slow = replace(MACHINE, link_bytes_per_s=1e9, network_bytes_per_s=1e9)
    assert few.waits_for_keys_s(slow, 1) == many.waits_for_keys_s(slow, 1) > 0


@pytest.mark.parametrize("changes", [{}, {"learned_positions": False}, {"qk_layernorm": True}], ids=str)
def test_what_is_kept(changes: dict[str, Any]):
    """The key and value of a group, as with eight groups; a checkpoint of attention keeps all that was gathered."""
    few, many = (replace(model, **changes) for model in (TWO, EIGHT))
    plain = [activations.of_layer(model, layout()).kept for model in (few, many)]
    assert plain[0] == plain[1]
    again = activations.of_layer(few, layout(recompute=Recompute.SELECTIVE)).kept
    # Of queries, keys and values no copy but what positions or norms write.
    gone = CHANNELS if changes else 4096 / 8 + 2 * CHANNELS
    assert again - plain[0] == 2 * TOKENS * (ALL - gone)
    full = [activations.of_layer(model, layout(recompute=Recompute.FULL)).input for model in (few, many)]
    assert full[0] == full[1]


def test_memory_while_it_is_gathered():
    """Twice all of it, a share, and the residual's gradient; what attention behind it and the MLP keep is not there."""
    narrow = replace(TWO, ffn_hidden_size=512)
    of_layer = activations.of_layer(narrow, layout())
    # Bytes of two norms' inputs, two masks, and what the product reads.
    before = (2 * 2 + 2 + 2) * 4096 / 8
    expected = before + 2 * (2 * ALL + ALL / 8 + 4096 / 8)
    assert (of_layer.kept + of_layer.working) / TOKENS == pytest.approx(expected)
    assert of_layer.working > activations.of_layer(replace(narrow, num_query_groups=8), layout()).working
    wide, other = (activations.of_layer(model, layout()).working for model in (TWO, EIGHT))
    assert wide == other, "a wide MLP takes more"


def test_a_checkpoint_of_attention_that_keeps_more_is_not_what_saves_most():
    """Modules without it fit where all together do not."""
    model = replace(TWO, bias=False, learned_positions=False)
    modules = (RecomputeModule.MLP,)
    fits = layout(recompute=Recompute.SELECTIVE, recompute_modules=modules)
    needed = memory.largest(model, fits).total_bytes
    with_attention = replace(fits, recompute_modules=(RecomputeModule.CORE_ATTN, *modules))
    assert memory.largest(model, with_attention).total_bytes > needed
    assert not memory.needs_more(model, layout(), needed, recompute=Recompute.SELECTIVE)


def test_muon_takes_a_part_of_a_group_as_one_matrix():
    """Megatron splits a weight only if a rank has whole groups of its rows."""
    split = Split.of(layout())
    assert next(iter(matrices(TWO, split))) == (((ALL / 8, 4096),), 1, False)
    assert next(iter(matrices(EIGHT, split)))[0] == ((512, 4096), (128, 4096), (128, 4096))


def test_ranks_share_the_columns():
    """``divide`` in ``ColumnParallelLinear``."""
    odd = replace(EIGHT, num_query_groups=1, kv_channels=3)
    assert str(problem(odd, layout())) == "tensor 8 does not divide 2 x num_query_groups x kv_channels 6; use 2"
    assert problem(replace(odd, kv_channels=4), layout()) is None
