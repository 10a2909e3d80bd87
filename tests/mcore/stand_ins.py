"""Stand-ins for kernels that a CPU does not have: same interface, same mathematics."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from .case import Case


def install(case: Case, args: Any) -> None:
    """Put those in place that ``case`` needs, after Megatron has validated its arguments."""
    if case.fused_gradients:
        from megatron.core.tensor_parallel import layers

        layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
            wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
        )
        layers._grad_accum_fusion_available = True
        args.gradient_accumulation_fusion = True  # The CPU backend has switched it off.
    if case.sequence_parallel:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        WrappedTorchNorm.__new__ = _sequence_parallel_norm
    if "--multi-latent-attention" in case.model:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        DotProductAttention.__init__ = _told_head_sizes(DotProductAttention.__init__)


def _add_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Apex's ``fused_weight_gradient_mlp_cuda``: accumulates where ``main_grad`` was at the forward."""
    main_grad.add_(grad_output.t().matmul(total_input))


def _sequence_parallel_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
) -> torch.nn.LayerNorm | torch.nn.RMSNorm:
    """Apex's norms: each rank normalizes its part of the sequence, and says that the gradients are partial sums."""
    kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    norm = kind(normalized_shape=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _told_head_sizes(initialize: Callable[..., None]) -> Callable[..., None]:
    """Transformer Engine's attention is told the head sizes that Megatron's own reads off its inputs.

    Values must have as many channels per head as the model otherwise has.
    """

    @functools.wraps(initialize)
    def wrapper(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **keywords: Any) -> None:
        initialize(self, *args, **keywords)

    return wrapper
