"""A stand-in for attention that records its largest logits, as Transformer Engine's does; and an oracle's QK-clip."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist


def record_logits(args: Any, threshold: float) -> None:
    """Let Megatron's own attention record them, and clip them to ``threshold``; after arguments were validated."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    args.qk_clip, args.qk_clip_threshold = True, threshold
    DotProductAttention.current_max_attn_logits = None
    DotProductAttention.forward = _recording(DotProductAttention.forward)


def _recording(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def wrapper(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *rest: Any, **keywords: Any
    ) -> torch.Tensor:
        # Part of the graph, as in Megatron 0.18; 0.19 takes it out.
        logits, before = _largest(query, key, mask), self.current_max_attn_logits
        self.current_max_attn_logits = logits if before is None else torch.max(before, logits)
        return forward(self, query, key, value, mask, *rest, **keywords)

    return wrapper


def _largest(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(heads,), of a query (positions, samples, heads, channels) and a key with as many groups as divide the heads."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    logits = torch.einsum("qbhc,kbhc->bhqk", query.float(), key.float()) / math.sqrt(query.shape[-1])
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    return logits.masked_fill(mask, -math.inf).amax(dim=(0, 2, 3))


class Clip:
    """The rule, for an undivided model or a tensor-parallel rank's part of it.

    Args:
        model: in the precision of forward and backward.
        threshold: 0 for none.
        sequences: ranks that have other parts of the same sequences.
    """

    def __init__(self, model: Any, threshold: float, sequences: dist.ProcessGroup) -> None:
        self._attentions = [layer.self_attention for layer in model.decoder.layers] if threshold else []
        self._threshold = threshold
        self._sequences = sequences
        self.clipped = 0
        """Attentions so far, one batch after the other."""

    def begin_batch(self) -> None:
        for attention in self._attentions:
            attention.core_attention.current_max_attn_logits = None

    def update(self, weights: Callable[[torch.nn.Parameter], Iterable[torch.Tensor]]) -> None:
        """By what a batch has recorded.

        Args:
            weights: all that stand for a parameter of the model after the update, such as its main weight.
        """
        for attention in self._attentions:
            logits = attention.core_attention.current_max_attn_logits.detach().clone()
            dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=self._sequences)
            if (logits > self._threshold).any():
                self.clipped += 1
                for parameter, factors in self._factors(attention, logits):
                    for weight in weights(parameter):
                        weight.mul_(factors[:, None])

    def _factors(self, attention: Any, logits: torch.Tensor) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """What each row of a weight is multiplied with, in fp32: halves of the surplus for queries and for keys."""
        config = attention.config
        alpha = config.qk_clip_alpha
        if not config.multi_latent_attention:
            groups = attention.num_query_groups_per_partition
            surplus = (self._threshold / logits.view(groups, -1).amax(dim=1)).clamp(max=1.0)
            channels = config.kv_channels
            heads = len(logits) // groups
            rows = torch.ones(groups, heads + 2, channels, device=logits.device)
            rows[:, :heads] = surplus.pow(alpha)[:, None, None]
            rows[:, heads] = surplus.pow(1 - alpha)[:, None]
            return [(attention.linear_qkv.weight, rows.flatten())]
        surplus = (self._threshold / logits).clamp(max=1.0)
        query = torch.empty(len(logits), config.qk_head_dim + config.qk_pos_emb_head_dim, device=logits.device)
        query[:, : config.qk_head_dim] = surplus.pow(alpha)[:, None]
        query[:, config.qk_head_dim :] = surplus[:, None]  # Of keys, all heads share the part with positions.
        key = torch.ones(len(logits), config.qk_head_dim + config.v_head_dim, device=logits.device)
        key[:, : config.qk_head_dim] = surplus.pow(1 - alpha)[:, None]
        projection = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
        return [(projection.weight, query.flatten()), (attention.linear_kv_up_proj.weight, key.flatten())]
