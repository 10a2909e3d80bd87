"""Routers of experts in an oracle, and their biases in a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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


@contextmanager
def _counting(counted: Callable[[torch.Tensor], torch.Tensor], replicas: int) -> Iterator[None]:
    """Let routers use what ``counted`` makes of their tokens per expert, and so many times their tokens."""
    from megatron.core.transformer.moe import router

    original = router.get_tokens_per_expert_and_token_count

    def count(*args: Any, **keywords: Any) -> tuple[torch.Tensor, Any, Any]:
        tokens, local, total = original(*args, **keywords)
        return counted(tokens), local, total * replicas

    with mock.patch.object(router, "get_tokens_per_expert_and_token_count", count):
        yield


class Routers:
    """Those of an undivided model: after a batch, each expert's bias moves by a fixed rate towards the mean load.

    Args:
        model: in the precision of forward and backward.
        args: Megatron's.
        replicas: whose batches the model computes one after the other.
    """

    def __init__(self, model: Any, args: Any, replicas: int) -> None:
        self._model = model
        self._rate = args.moe_router_bias_update_rate
        for _, router in _biased(model):
            router._maintain_float32_expert_bias()
        self.names = [shard.name for shard, _ in biases(model)]
        self.biases = [bias for _, bias in biases(model)]
        """What the routers use, of any version."""
        self.newest = [bias.clone() for bias in self.biases]
        counts = bool(args.num_experts) and "global_aux_loss" in args.moe_router_load_balancing_type
        self.count_over_replicas = counts and replicas > 1
        self._counts: dict[int, list[torch.Tensor]] = {}
        """By microbatch: the tokens per expert of all replicas, of the routers in their order."""

    def begin_batch(self) -> None:
        """Nothing is counted yet."""
        self._counts.clear()
        self._empty("local_tokens_per_expert")
        self.begin_replica()

    def begin_replica(self) -> None:
        """Each of them counts microbatches from the first one on."""
        self._empty("global_tokens_per_expert", "ga_steps")

    def _empty(self, *names: str) -> None:
        for module in self._model.modules():
            for name in names:
                if getattr(module, name, None) is not None:
                    getattr(module, name).zero_()

    @contextmanager
    def count(self, microbatch: int) -> Iterator[None]:
        """Inside, a forward of one of the replicas: keep what its routers count."""
        counts = self._counts.setdefault(microbatch, [])
        found: list[torch.Tensor] = []
        with _counting(lambda tokens: found.append(tokens) or tokens, replicas=1):
            yield
        self._counts[microbatch] = [sum(pair) for pair in zip(counts, found, strict=True)] if counts else found

    @contextmanager
    def show(self, microbatch: int, replicas: int) -> Iterator[None]:
        """Inside, a loss over the batch sees what all replicas have counted in ``microbatch``, as if they had met."""
        if not self.count_over_replicas:
            yield
            return
        counts = iter(self._counts[microbatch])
        with _counting(lambda _: next(counts), replicas):
            yield

    def update(self) -> None:
        """By what was counted in a batch, on all ranks."""
        for index, (_, router) in enumerate(_biased(self._model)):
            tokens = router.local_tokens_per_expert.clone()
            dist.all_reduce(tokens)
            missing = tokens.sum() / len(tokens) - tokens
            self.newest[index] = self.newest[index] + torch.sign(missing) * self._rate
