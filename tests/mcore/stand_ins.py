"""Stand-ins for what a machine does not have, same interface, same mathematics: kernels, and a GPU per rank."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .case import Case


def install(case: Case, args: Any) -> None:
    """Put those in place that ``case`` needs, after Megatron has validated its arguments."""
    if case.device == "cuda":
        torch.use_deterministic_algorithms(True)
        if args.distributed_backend == "gloo":
            dist.isend, dist.irecv = _through_host(dist.isend), _into_device(dist.irecv)
    if case.fused_gradients and case.device == "cpu":
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


def _through_host(isend: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo sends tensors of the host only, and NCCL needs a GPU for every rank."""

    @functools.wraps(isend)
    def wrapper(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        return isend(tensor.cpu(), *args, **keywords)

    return wrapper


def _into_device(irecv: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(irecv)
    def wrapper(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu")
        return _Received(irecv(host, *args, **keywords), host, tensor)

    return wrapper


class _Received:
    """A receive into the host's memory, on its way to the device."""

    def __init__(self, work: dist.Work, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._host)


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
