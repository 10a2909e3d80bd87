"""What Megatron does where tensor-parallel ranks are more than query groups, and what the planner counts there; and
what it keeps of queries, keys and values, there and elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_2bw.planner.cost import attention
from megatron_2bw.planner.specs.layout import Layout, Precision, Recompute
from megatron_2bw.planner.specs.model import Model

from .test_planned_weights import rank_of

MODEL = Model(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=16,
    seq_length=32,
    vocab_size=1000,
    bias=False,
    dropout=False,
    learned_positions=False,
)
LAYOUT = Layout(
    schedule="megatron",
    pipeline=1,
    data=1,
    tensor=8,
    sequence_parallel=True,
    microbatch=3,
    global_batch=3,
    precision=Precision.FP32,
)
TOKENS = 3 * 32


class _Core(torch.autograd.Function):
    """Keeps what Transformer Engine's attention does: contiguous copies, and what it gives."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.contiguous() for one in (query, key, value))
        output = torch.zeros_like(query).flatten(2)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones_like(one) for one in ctx.saved_tensors[:3])


class Core(torch.nn.Module):
    """In place of ``TEDotProductAttention``."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.shapes = [tuple(one.shape) for one in (query, key, value)]
        return _Core.apply(query, key, value)


class _Norm(torch.autograd.Function):
    """Keeps what Transformer Engine's norms do: a contiguous copy of what they read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Norm(torch.nn.Module):
    """In place of ``TENorm``."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Norm.apply(x)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Numbers in the larger tensor of each collective along the last dimension."""
    from megatron.core.tensor_parallel import mappings, random

    sizes: dict[str, list[int]] = {"gathered": [], "scattered": []}

    def gathering(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
            whole = original(x, group)
            sizes["gathered"].append(whole.numel())
            return whole

        return gather

    def scattering(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
            sizes["scattered"].append(x.numel())
            return original(x, group)

        return scatter

    for name, wrapped in (("_gather_along_last_dim", gathering), ("_reduce_scatter_along_last_dim", scattering)):
        monkeypatch.setattr(mappings, name, wrapped(getattr(mappings, name)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(random, "_get_all_rng_states", tuple)
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *_: None)
    monkeypatch.setattr(random, "_fork_rng", nullcontext)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return sizes


def built(model: Model, layout: Layout) -> Any:
    """Attention of a layer."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        add_bias_linear=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        qk_layernorm=model.qk_layernorm,
        recompute_granularity="selective" if layout.recompute is Recompute.SELECTIVE else None,
        recompute_modules=["core_attn"],
    )
    norm = Norm if model.qk_layernorm else None
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=Core,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return SelfAttention(config, submodules, layer_number=1, pg_collection=groups)


def kept_by(module: Any, model: Model, tensor: int) -> tuple[float, torch.Tensor]:
    """Bytes that a forward keeps, weights and angles apart, and what it gives."""
    storages = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    angles = None if model.learned_positions else torch.zeros(model.seq_length, 1, 1, model.kv_channels)
    hidden = torch.randn(model.seq_length // tensor, 3, model.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output, _ = module(hidden, torch.ones(1), rotary_pos_emb=angles)
    others = {one.untyped_storage().data_ptr() for one in module.parameters()}
    of_tokens = [one.nbytes() for at, one in storages.items() if at not in others and one.nbytes() % (TOKENS * 4) == 0]
    return sum(of_tokens), output


RECOMPUTE = pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE])
NEW_QUERIES = [{}, {"learned_positions": True}, {"qk_layernorm": True}]
"""By their positions, by norms, or not."""


def expected(model: Model, layout: Layout) -> float:
    """Bytes, of what products read, too."""
    numbers = attention.kept(model, layout.tensor, core_again=layout.recompute is Recompute.SELECTIVE)
    return 4 * TOKENS * (numbers + (model.hidden_size + model.output_size) / layout.tensor)


@RECOMPUTE
@pytest.mark.parametrize(
    "changes",
    [
        *NEW_QUERIES,
        {"num_attention_heads": 16, "num_query_groups": 1},
        {"learned_positions": True, "qk_layernorm": True},
    ],
    ids=str,
)
def test_all_queries_keys_and_values_are_gathered_and_a_whole_group_is_kept(
    changes: dict[str, Any], recompute: Recompute, moved: dict[str, list[int]]
) -> None:
    model, layout = replace(MODEL, **changes), replace(LAYOUT, recompute=recompute)
    with rank_of(layout, 5):
        module = built(model, layout)
        kept, output = kept_by(module, model, layout.tensor)
        output.backward(torch.ones_like(output))
    whole = attention.regathered(model, layout.tensor)
    assert whole == layout.tensor * module.linear_qkv.weight.shape[0]
    assert moved == {"gathered": [TOKENS * whole], "scattered": [TOKENS * whole]}
    heads = [model.num_attention_heads // layout.tensor, 1, 1]
    assert module.core_attention.shapes == [(32, 3, count, 16) for count in heads]
    assert kept == expected(model, layout)


@RECOMPUTE
@pytest.mark.parametrize("changes", NEW_QUERIES, ids=str)
@pytest.mark.parametrize(("tensor", "groups"), [(1, 2), (2, 2), (2, 4), (2, 8)])
def test_a_checkpoint_of_the_core_keeps_all_that_the_product_gave(
    tensor: int, groups: int, changes: dict[str, Any], recompute: Recompute, moved: dict[str, list[int]]
) -> None:
    """Attention would have copied the values out of it."""
    model = replace(MODEL, num_query_groups=groups, **changes)
    sizes = {"tensor": tensor, "expert_tensor": tensor, "sequence_parallel": tensor > 1}
    layout = replace(LAYOUT, recompute=recompute, **sizes)
    with rank_of(layout, 0):
        kept, _ = kept_by(built(model, layout), model, tensor)
    assert moved == {"gathered": [], "scattered": []}
    assert kept == expected(model, layout)
