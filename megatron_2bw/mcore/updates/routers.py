"""Routers of experts: what they count belongs to one batch, their biases to a weight version.

A bias on the score of every expert can take the place of an auxiliary loss (Wang et al. 2024,
https://arxiv.org/abs/2408.15664): after each batch it moves, by a fixed rate, up where an expert got fewer
tokens than the mean and down where it got more. Under a delay it is updated as weights are: batch t is routed
by the bias of its weight version, and its tokens move the newest one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.utils import get_model_config

_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")
"""Buffers that a router adds to in every forward, and that Megatron empties after every batch."""


class Routers:
    """Those of a stage; forwards of the next batch count apart from those of this one.

    Args:
        model: the stage; without experts there is nothing to do.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        held = [getattr(module, name, None) for module in modules for name in _COUNTERS]
        self._counters = [counter for counter in held if counter is not None]
        self._in_flight: dict[int, list[torch.Tensor]] = {}
        """Values of the counters, by batch."""
        self._biased = [module for module in modules if getattr(module, "expert_bias", None) is not None]
        for router in self._biased:
            router._maintain_float32_expert_bias()  # Else its first forward would, and part it from its versions.
        self.biases = [router.expert_bias for router in self._biased]
        """(experts,) each, float32; updates change them."""
        self._tokens = [router.local_tokens_per_expert for router in self._biased]
        self._captured: torch.Tensor | None = None
        self._moves = torch.stack([torch.zeros_like(bias) for bias in self.biases]) if self._biased else None
        self._config = get_model_config(model)

    def use(self, batch: int) -> None:
        """From here on, what is counted is of ``batch``."""
        if self._counters:
            held = self._in_flight.get(batch)
            if held is None:
                held = self._in_flight[batch] = [torch.zeros_like(counter) for counter in self._counters]
            for counter, data in zip(self._counters, held, strict=True):
                counter.data = data

    def capture(self, batch: int) -> None:
        """Keep the tokens of ``batch``, which is complete, for its update."""
        if self._counters:
            self.use(batch)
            del self._in_flight[batch]
        if self.biases:
            self._captured = torch.stack(self._tokens)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Find out how far the captured batch moves each bias, by Megatron's rule.

        Args:
            group: of the ranks whose tokens count together.
        """
        if self.biases:
            rate = self._config.moe_router_bias_update_rate  # A loop may change it, or freeze a router's bias.
            moved = get_updated_expert_bias(self._captured, torch.zeros_like(self._moves), rate, tp_dp_cp_group=group)
            for router, move in zip(self._biased, moved, strict=True):
                if getattr(router, "frozen_expert_bias", False):
                    move.zero_()
            self._moves.copy_(moved)

    def update(self) -> None:
        """Move the biases that the routers show; as in Megatron, whether the weights' update is skipped or not."""
        if self.biases:
            torch._foreach_add_(self.biases, list(self._moves))

    def release(self) -> None:
        """Count from zero, as Megatron leaves it to the next batch; the last call."""
        for counter in self._counters:
            counter.zero_()
