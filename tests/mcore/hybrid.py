"""The small GPT as a model of Megatron's hybrid layers: each attention and each MLP is a layer of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from .gpt import reads_data, run, sample, summed_loss

__all__ = ["build", "reads_data", "run", "sample", "summed_loss"]


def build(args: Any, config: Any, **keywords: Any) -> Any:
    """One stage, of torch's layers: Megatron's own specs have those of Transformer Engine."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm  # Of the last layer.
    return HybridModel(
        config=config, hybrid_stack_spec=_stack(), hybrid_layer_pattern=args.hybrid_layer_pattern, **keywords
    )


def _stack() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    products = ColumnParallelLinear, RowParallelLinear
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=products[0], core_attention=DotProductAttention, linear_proj=products[1]
        ),
    )
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=products[0], linear_fc2=products[1]))
    # In a checkpoint, a norm belongs to the product behind it, as with Transformer Engine.
    attention_layer = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    mlp_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    layers = {
        "attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention_layer),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp_layer),
    }
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers))
