"""Routers of experts in an oracle, and their biases in a record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .shards import Shard


def biases(model: Any) -> Iterator[tuple[Shard, torch.Tensor]]:
    """With the names they have in an undivided model."""
    for path, router in _biased(model):
        name = path if path.startswith("mtp.") else f"decoder.layers.{router.layer_number - 1}.mlp.router"
        yield Shard(name=f"{name}.expert_bias", shape=tuple(router.expert_bias.shape)), router.expert_bias


def _biased(model: Any) -> list[tuple[str, Any]]:
    return [
        (path, module) for path, module in model.named_modules() if getattr(module, "expert_bias", None) is not None
    ]


class Routers:
    """Those of an undivided model: after a batch, each expert's bias moves by a fixed rate towards the mean load.

    Args:
        model: in the precision of forward and backward.
        args: Megatron's.
    """

    def __init__(self, model: Any, args: Any) -> None:
        self._model = model
        self._rate = args.moe_router_bias_update_rate
        for _, router in _biased(model):
            router._maintain_float32_expert_bias()
        self.names = [shard.name for shard, _ in biases(model)]
        self.biases = [bias for _, bias in biases(model)]
        """What the routers use, of any version."""
        self.newest = [bias.clone() for bias in self.biases]

    def begin_batch(self) -> None:
        """Nothing is counted yet."""
        for module in self._model.modules():
            for name in ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"):
                if getattr(module, name, None) is not None:
                    getattr(module, name).zero_()

    def update(self) -> None:
        """By what was counted in a batch, on all ranks."""
        for index, (_, router) in enumerate(_biased(self._model)):
            tokens = router.local_tokens_per_expert.clone()
            dist.all_reduce(tokens)
            missing = tokens.sum() / len(tokens) - tokens
            self.newest[index] = self.newest[index] + torch.sign(missing) * self._rate
