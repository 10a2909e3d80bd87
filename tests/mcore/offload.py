"""A stand-in for a GPU whose optimizer is Megatron's hybrid one: a part of the weights is updated on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Megatron's class splits weights by where they are; here all of them are on the host."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _split
    HybridDeviceOptimizer.dummy_step = _told(HybridDeviceOptimizer.dummy_step)


def is_hybrid(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Megatron's, of which others update parts."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer  # Slow; in ranks alone.

    return isinstance(optimizer, HybridDeviceOptimizer)


def is_for_its_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its present step is no update: before a state is loaded, one makes its tensors."""
    return getattr(optimizer, "_makes_its_state", False)


def _told(dummy_step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(dummy_step)
    def wrapper(self: Any) -> None:
        everyone = [self, *self.sub_optimizers]
        for optimizer in everyone:
            optimizer._makes_its_state = True
        dummy_step(self)
        for optimizer in everyone:
            optimizer._makes_its_state = False

    return wrapper


def _split(self: Any, offload_fraction: float) -> tuple[Any, ...]:
    """The first weights, up to so large a part, are copied as if from a device; all that are not in fp32 are, too."""
    left = offload_fraction * sum(parameter.numel() for group in self.param_groups for parameter in group["params"])
    offloaded, staying = [], []
    to_copy: dict[torch.Tensor, torch.Tensor] = {}
    to_fp32: dict[torch.Tensor, torch.Tensor] = {}
    for group in self.param_groups:
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for parameter in group["params"]:
            is_offloaded, main = left > 0, parameter
            if is_offloaded or parameter.dtype != torch.float32:
                main = parameter.detach().clone().float()
            if parameter.dtype != torch.float32:
                to_fp32[parameter] = main
            if is_offloaded:
                to_copy[parameter] = main
                left -= parameter.numel()
            parts[is_offloaded].append(main)
        group["fused"] = False  # Fused, torch's AdamW rounds in another way than the oracle's.
        for groups, part in zip((staying, offloaded), parts, strict=True):
            groups += [group | {"params": part}] if part else []
    return offloaded, staying, to_copy, {main: parameter for parameter, main in to_copy.items()}, to_fp32
