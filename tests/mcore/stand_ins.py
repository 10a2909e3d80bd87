"""Stand-ins for what a machine does not have, same interface, same mathematics: kernels, and a GPU per rank.

And models of which a part is frozen, which no flag of Megatron says.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import attention, fused_adam, offload
from .case import Case


def install(case: Case, args: Any) -> None:
    """Put those in place that ``case`` needs, after Megatron has validated its arguments."""
    if case.device == "cuda":
        torch.use_deterministic_algorithms(True)
        if args.distributed_backend == "gloo":
            let_ranks_share_a_gpu()
    if case.fused_gradients:
        from megatron.core.tensor_parallel import layers

        args.gradient_accumulation_fusion = True  # No other case has it.
        if case.device == "cpu":
            layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
                wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
            )
            layers._grad_accum_fusion_available = True
    if case.moments:
        fused_adam.install()
    if case.offloaded and case.device == "cpu":
        offload.install()
    if case.sequence_parallel:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        WrappedTorchNorm.__new__ = _sequence_parallel_norm
    if case.clip_attention:
        attention.record_logits(args, case.clip_attention)
    if case.context_parallel > 1 and args.transformer_impl == "local":
        if case.kind != "gpt":
            raise NotImplementedError(f"context parallelism of {case.kind}: the stand-in's attention is causal")
        attend_across_ranks()
    if case.frozen:
        from . import model

        model.build_model = _with_frozen(model.build_model, case.frozen)
    if "--multi-latent-attention" in case.model:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        DotProductAttention.__init__ = _told_head_sizes(DotProductAttention.__init__)
    if case.device == "cpu":
        let_outputs_be_discarded()


def _with_frozen(build: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    from .model import global_parameters

    @functools.wraps(build)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        built = build(*args, **keywords)
        for name, parameter in global_parameters(built):
            if name.startswith(names):
                parameter.requires_grad_(False)
        return built

    return wrapper


def let_ranks_share_a_gpu() -> None:
    """Give gloo what it takes from NCCL's place, which needs a GPU for every rank."""
    from megatron.core.distributed import param_and_grad_buffer

    for name, staged in (("isend", _through_host), ("irecv", _into_device)):
        transfer = staged(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):  # A P2POp asks whether the one is the other's.
            setattr(module, name, transfer)
    param_and_grad_buffer._coalescing_manager = _one_by_one


def let_outputs_be_discarded() -> None:
    """Give Megatron's checkpoints that discard their output what they take from Transformer Engine and a compiler."""
    from megatron.core.tensor_parallel import random

    random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    random._get_share_storage = lambda: _take_data


def _take_data(empty: torch.Tensor, full: torch.Tensor) -> None:
    """As the storage of ``full``, and none of its bytes a change that autograd would see."""
    storage = full.untyped_storage()
    empty.untyped_storage().resize_(storage.nbytes())
    empty.untyped_storage().copy_(storage)


@contextlib.contextmanager
def _one_by_one(group: dist.ProcessGroup, async_ops: bool) -> Iterator[None]:
    """Gloo coalesces collectives of the host's tensors only."""
    if async_ops:
        raise NotImplementedError("overlapped collectives of ranks that share a GPU")
    yield


def _through_host(isend: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo sends tensors of the host only."""

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

    def wait(self, *timeout: timedelta) -> None:
        self._work.wait(*timeout)
        with torch.no_grad():  # Megatron receives into tensors that already want a gradient.
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


def attend_across_ranks() -> None:
    """Let Megatron's own attention be context parallel; Transformer Engine's is."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.__init__ = _of_any_sequence(DotProductAttention.__init__)
    DotProductAttention.forward = _with_all_keys(DotProductAttention.forward)


def _of_any_sequence(initialize: Callable[..., None]) -> Callable[..., None]:
    """Megatron's own attention refuses a part of a sequence; Transformer Engine's does not."""

    @functools.wraps(initialize)
    def wrapper(self: Any, config: Any, *args: Any, **keywords: Any) -> None:
        config = copy.copy(config)
        config.context_parallel_size = 1
        initialize(self, config, *args, **keywords)

    return wrapper


def _with_all_keys(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Causal attention of this rank's queries to the keys of all context-parallel ranks, gathered from them."""

    @functools.wraps(forward)
    def wrapper(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        from .model import of_rank

        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
        whole = torch.arange(len(key), device=key.device)
        positions = [of_rank(whole, rank, group.size(), dim=0) for rank in range(group.size())]
        hidden = positions[group.rank()][:, None] < torch.cat(positions)
        return forward(self, query, key, value, hidden.expand(1, 1, -1, -1))

    return wrapper
