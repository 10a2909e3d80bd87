"""Kernels and activations of one layer's attention, per tensor-parallel rank.

With multi-latent attention (DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1), products give latent vectors
first. Their weights are on all tensor-parallel ranks, and each multiplies tokens that it has: ``MLASelfAttention`` in
``megatron/core/transformer/multi_latent_attention.py``, with the ``duplicated`` ``TELinear`` of Transformer Engine.
Products that are split over the ranks then give queries, keys and values; two kernels turn them by their positions.

Where there are more ranks than query groups, the columns of a group are split over several of them, none of which has
a whole key: each gathers what all products gave, and takes its own heads' queries and its group's key and value, in
``SelfAttention.get_query_key_value_tensors`` of ``megatron/core/transformer/attention.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_2bw.planner.cost.work import Product
from megatron_2bw.planner.specs.model import Model


class Elementwise(NamedTuple):
    """Kernels that are no products, beyond those of plain attention with learned positions."""

    moved: float = 0.0
    """Numbers read or written."""
    kernels: int = 0


def products(model: Model, tokens: float, tensor: int, outside: int) -> tuple[Product, ...]:
    """Those with weights; ``outside``: ranks that share the tokens where no rank has a part of the heads."""
    hidden, outputs = model.hidden_size, model.output_size / tensor
    out = Product(tokens, hidden, outputs, scatters=True)
    if not model.multi_latent_attention:
        columns = model.query_size / tensor + 2 * (model.key_size / tensor)
        return Product(tokens, columns, hidden, gathers=True, after_norm=True), out
    sizes = model.q_lora_rank, model.kv_lora_rank + model.qk_pos_emb_head_dim
    down = [Product(tokens / outside, columns, hidden) for columns in sizes if columns]
    return *down, *up_products(model, tokens, tensor), out


def up_products(model: Model, tokens: float, tensor: int) -> tuple[Product, Product]:
    """Those that give queries, and keys and values, out of latent vectors."""
    rank, of_keys, normed = model.q_lora_rank, model.kv_lora_rank, model.qk_layernorm
    queries = model.query_size / tensor
    content = model.num_attention_heads * model.qk_head_dim / tensor + model.value_size / tensor
    return (
        Product(tokens, queries, rank or model.hidden_size, gathers=True, after_norm=normed and rank > 0),
        Product(tokens, content, of_keys, gathers=True, after_norm=normed),
    )


def regathered(model: Model, tensor: int) -> int:
    """Numbers per token that every rank gathers behind the product; 0 unless there are more ranks than query groups."""
    return model.query_size + 2 * model.key_size if tensor > model.num_query_groups else 0


def keys_and_values(model: Model, tensor: int) -> tuple[float, float]:
    """Channels of both that one rank attends to: those of a whole group, where several ranks share one."""
    if tensor > model.num_query_groups:
        return model.kv_channels, model.kv_channels
    return model.key_size / tensor, model.value_size / tensor


def weights(model: Model, tensor: int) -> float:
    """Of these products, on one rank."""
    if not model.multi_latent_attention:
        return model.hidden_size * (2 * (model.query_size / tensor) + 2 * (model.key_size / tensor))
    return model.down_parameters + (model.attention_matrices - model.down_parameters) / tensor


def gathered(model: Model, tensor: int, *, sequence_parallel: bool, backward: bool) -> tuple[int, ...]:
    """Numbers per token of each collective around what gives queries, keys and values; each half an all-reduce.

    With sequence parallelism, latent vectors are gathered in the forward and their gradients summed in the backward;
    without, the gradients are summed everywhere.
    """
    if tensor == 1 or not model.multi_latent_attention:
        return ()
    latents = model.q_lora_rank or model.hidden_size, model.kv_lora_rank
    if sequence_parallel:
        return *latents, model.qk_pos_emb_head_dim
    return (*latents, *latents) if backward else ()


def elementwise(model: Model, tokens: float, tensor: int, outside: int, *, backward: bool = False) -> Elementwise:
    """Norms, rotary positions; of latent vectors, in the backward the sum of both latent vectors' gradients.

    Two kernels turn queries and keys by rotary positions: ``fused_apply_rotary_pos_emb``. Where they come from latent
    vectors, only the channels of the position are read and written of queries; keys and values are written anew:
    ``fused_apply_mla_rope_for_q`` and ``fused_apply_mla_rope_for_kv``.
    """
    if not model.multi_latent_attention:
        passes, kernels = 0, 0
        if model.rotary and not model.learned_positions:
            passes, kernels = 2, 2
        if model.qk_layernorm:
            passes, kernels = passes + (3 if backward else 2), kernels + (4 if backward else 2)
        copied, copies = _copied(model, tensor, backward=backward)
        keys, _ = keys_and_values(model, tensor)
        return Elementwise(tokens * (passes * (model.query_size / tensor + keys) + copied), kernels + copies)
    turned = model.num_attention_heads * model.qk_pos_emb_head_dim / tensor
    content = model.num_attention_heads * model.qk_head_dim / tensor + model.value_size / tensor
    moved = 2 * turned + content + model.qk_pos_emb_head_dim + (model.key_size + model.value_size) / tensor
    kernels = 2
    sizes = [size for size in (model.q_lora_rank, model.kv_lora_rank) if size and model.qk_layernorm]
    moved += (3 if backward else 2) * sum(sizes) / outside
    kernels += (2 if backward else 1) * len(sizes)
    if backward:
        moved, kernels = moved + 3 * model.hidden_size / outside, kernels + 1
    return Elementwise(tokens * moved, kernels)


def _copied(model: Model, tensor: int, *, backward: bool) -> Elementwise:
    """Around what is gathered once more, per token.

    The forward puts the ranks' columns side by side (``_gather_along_last_dim``). The backward writes the gradient of a
    rank's queries into zeros for those of the group, that of the group into zeros for all groups, and puts the ranks'
    columns one behind the other (``_reduce_scatter_along_last_dim``, in ``megatron/core/tensor_parallel/mappings.py``).
    """
    everything, groups = regathered(model, tensor), model.num_query_groups
    if not everything:
        return Elementwise()
    if not backward:
        return Elementwise(2 * everything, 1)
    of_queries = model.query_size / groups + 2 * model.query_size / tensor
    return Elementwise(of_queries + everything + 2 * everything / groups + 2 * everything, 5)


def core_channels(model: Model) -> tuple[int, int]:
    """Per head: of queries and keys, and of values and outputs."""
    return model.query_size // model.num_attention_heads, model.output_size // model.num_attention_heads


def kept(model: Model, tensor: int, *, core_again: bool = False) -> float:
    """Numbers per token on one rank: queries, keys and values, and what norms of queries and keys read.

    Attention copies what is a view of a larger tensor (``get_qkv_layout`` in ``transformer_engine/pytorch/attention/
    dot_product_attention/utils.py``), and so do norms. With ``core_again``, the checkpoint before it keeps the view
    itself, and with it all that the product gave, or all that was gathered: of values, and where neither positions nor
    norms make new ones, of queries and keys.
    """
    queries, (keys, values) = model.query_size / tensor, keys_and_values(model, tensor)
    if model.multi_latent_attention:
        return queries + keys + values
    of_norms = queries + keys if model.qk_layernorm else 0
    if not core_again:
        return queries + keys + values + of_norms
    new = 0
    if model.qk_layernorm or (model.rotary and not model.learned_positions):
        new = queries + keys
    elif model.num_attention_heads > model.num_query_groups > tensor:
        new = queries  # Heads of several groups are put side by side, without the groups' keys and values between them.
    return new + (regathered(model, tensor) or queries + keys + values) + of_norms


def latents(model: Model) -> int:
    """Numbers per token of latent vectors."""
    return model.q_lora_rank + model.kv_lora_rank if model.multi_latent_attention else 0


def kept_latents(model: Model) -> int:
    """Numbers per token that no tensor-parallel rank has a part of: inputs of what gives queries, keys and values."""
    # What norms read and what they write. Queries that come from the layer's own norm have none.
    return latents(model) * (2 if model.qk_layernorm else 1)
