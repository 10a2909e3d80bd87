"""What Megatron's optimizers, one in the other, are asked about a stage's weights, gradients and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from megatron_2bw.mcore.symbols import replace
from megatron_2bw.mcore.updates.attention import AttentionLogits
from megatron_2bw.mcore.updates.routers import Routers
from megatron_2bw.runtime.weights import WeightVersions


def buffers_of(model: Any) -> list[Any]:
    """In which Megatron's DistributedDataParallel accumulates gradients: those of experts are apart."""
    return [*model.buffers, *model.expert_parallel_buffers]


def versions_of(
    inner: Any, model: torch.nn.Module, routers: Routers, logits: AttentionLogits, versions: int
) -> WeightVersions:
    """Weight versions of a stage; with the distributed optimizer, of the buffers that hold its weights."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = [*trained, *routers.biases, *logits.frozen]
    buffers = [buffer for buffer in buffers_of(model) if buffer.param_data is not None]
    views = [bucket.param_data for buffer in buffers for bucket in buffer.buckets]
    for optimizer in inner.chained_optimizers if buffers else ():
        if not is_layer_wise(optimizer):
            views += chain.from_iterable([*optimizer.shard_float16_groups, *optimizer.shard_fp32_groups])
    return WeightVersions(parameters, versions, buffers=[buffer.param_data for buffer in buffers], views=views)


def leaf_optimizers(inner: Any) -> list[Any]:
    """Of Megatron's chain, however deep: those that wrap one optimizer of torch's each."""
    nested = (part.chained_optimizers if is_layer_wise(part) else [part] for part in inner.chained_optimizers)
    return list(chain.from_iterable(nested))


def is_layer_wise(optimizer: Any) -> bool:
    """Whether each replica updates whole matrices, which need no shards of weights."""
    return isinstance(optimizer, LayerWiseDistributedOptimizer)


def statistics_group(optimizer: Any) -> dist.ProcessGroup:
    """Over which Megatron sums the squares of its gradients."""
    return dist.group.WORLD if is_layer_wise(optimizer) else optimizer.get_grad_stats_parallel_group()


def forget_shards_of_weights(model: torch.nn.Module) -> None:
    """Bucket groups remember views of their parameter buffers, which have moved to another version."""
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        replace(group, "cached_param_buffer_shard_list", [None] * len(group.buckets))


def scaler_of(optimizer: Any) -> Any:
    """Megatron's gradient scaler; None in fp32 and bf16."""
    return optimizer.grad_scaler if isinstance(optimizer, megatron_optimizer.MixedPrecisionOptimizer) else None


def gradient_name(optimizer: Any) -> str:
    """Where the parameters that it updates have their gradients; a precision-aware one reads them in any precision."""
    return "decoupled_grad" if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"


class Accumulated(NamedTuple):
    """What one of Megatron's optimizers updates with: views of accumulation buffers, in their precision."""

    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]
    """By the parameter that the optimizer updates."""
    for_norms: list[list[torch.Tensor]]
    """Those that count in the norm of each group."""


def norm_groups(inner: Any) -> tuple[str | None, ...]:
    """Groups of weights that are clipped by a norm of their own, the same on all ranks, which are asked once.

    None is that of all weights that are in no other. Megatron 0.18 has no other ones.
    """
    named = getattr(megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ())
    return None, *(name for name in named if inner.has_grad_norm_group(name))


def accumulated(inner: Any, model: torch.nn.Module, groups: Sequence[str | None]) -> list[Accumulated]:
    """Find the gradients of each chained optimizer; Megatron's own code says which these are.

    Args:
        inner: Megatron's optimizer (a ChainedOptimizer).
        model: the stage, wrapped in DistributedDataParallel.
        groups: see `norm_groups`.
    """
    with _accumulating_in_fp32(model) as buffered:
        return [_accumulated(optimizer, groups, buffered) for optimizer in inner.chained_optimizers]


def _accumulated(
    optimizer: Any, groups: Sequence[str | None], buffered: Callable[[torch.Tensor], torch.Tensor]
) -> Accumulated:
    if optimizer.is_stub_optimizer:
        return Accumulated([], [[] for _ in groups])
    if isinstance(optimizer, megatron_optimizer.MixedPrecisionOptimizer):
        optimizer._copy_model_grads_to_main_grads()
    else:
        optimizer.prepare_grads()
    name = gradient_name(optimizer)
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    found = ((parameter, getattr(parameter, name, None)) for parameter in parameters)
    gradients = [(parameter, buffered(gradient)) for parameter, gradient in found if gradient is not None]
    for_norms = [list(map(buffered, _gradients_for_norm(optimizer, group))) for group in groups]
    optimizer.zero_grad()
    return Accumulated(gradients, for_norms)


@contextmanager
def _accumulating_in_fp32(model: torch.nn.Module) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, all buffers seem to be in fp32, and Megatron copies nothing; yields what finds the true view.

    The stand-ins take memory before there are activations and moments.
    """
    buffers: dict[int, torch.Tensor] = {}

    def buffered(grad: torch.Tensor) -> torch.Tensor:
        buffer = buffers.get(grad.untyped_storage().data_ptr())
        if buffer is None:
            return grad
        return buffer.as_strided(grad.shape, grad.stride(), buffer.storage_offset() + grad.storage_offset())

    with ExitStack() as replaced:
        for buffer in buffers_of(model):
            data = buffer.grad_data
            if data.dtype == torch.float32:
                continue
            stand_in = torch.empty_like(data, dtype=torch.float32)
            buffers[stand_in.untyped_storage().data_ptr()] = data
            for parameter in buffer.params:
                grad = parameter.main_grad
                view = stand_in.as_strided(grad.shape, grad.stride(), grad.storage_offset() - data.storage_offset())
                replaced.enter_context(replace(parameter, "main_grad", view))
        yield buffered


def _gradients_for_norm(optimizer: Any, group: str | None) -> list[torch.Tensor]:
    if hasattr(optimizer, "get_grads_for_grad_norm"):
        return optimizer.get_grads_for_grad_norm(group)
    return optimizer.get_main_grads_for_grad_norm()  # Megatron 0.18.


def hyperparameters_of(group: dict[str, Any]) -> dict[str, float]:
    """What Megatron's scheduler changes from batch to batch."""
    return {name: group[name] for name in ("lr", "weight_decay")}
