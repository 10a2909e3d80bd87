"""Attention: the largest logits of a batch clip the weights of its update, or are logged.

Where a head's largest logit in a batch is above a threshold, QK-clip scales the weights of its queries and keys down
after the update, so that this logit would have been the threshold (Kimi K2, https://arxiv.org/abs/2507.20534, section
2.1). Under a delay it belongs to the update, as the biases of routers do: the logits of batch t are those of its weight
version, and they clip the newest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config


class AttentionLogits:
    """The largest ones of a stage's heads; forwards of the next batch are recorded apart from those of this one.

    Args:
        model: the stage; where its config asks for no logits there is nothing to do.

    Raises:
        ValueError: the config asks for them, and attention records none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config = get_model_config(model)
        self._threshold = config.qk_clip_threshold if config.qk_clip else None
        is_wanted = config.qk_clip or config.log_max_attention_logit
        # Those that Megatron clips: none of multi-token prediction.
        layers = get_attr_wrapped_model(model, "decoder").layers if is_wanted else ()
        found = (getattr(layer, "self_attention", None) for layer in layers)
        self._attentions: list[Any] = [attention for attention in found if hasattr(attention, "clip_qk")]
        for attention in self._attentions:
            if not hasattr(attention.core_attention, "current_max_attn_logits"):
                raise ValueError("attention records no logits to clip or log: use that of Transformer Engine >= 2.9")
        self._in_flight: dict[int, list[torch.Tensor | None]] = {}
        """By batch, and attention: (heads,), of this rank's."""
        self._captured = self._on_host = torch.empty(0)
        """Of all attentions, one after the other."""
        self._sizes: list[int] = []
        """Heads by attention."""
        self._there: torch.cuda.Event | None = None
        """When ``_on_host`` is."""
        self.largest = 0.0
        """On this stage, in the batch updated last; what Megatron logs."""

    @contextmanager
    def computing(self, batch: int) -> Iterator[None]:
        """Inside, what attention records is of ``batch``; what it records outside, in an evaluation, is of none."""
        if not self._attentions:
            yield
            return
        held = self._in_flight.get(batch, [None] * len(self._attentions))
        for attention, logits in zip(self._attentions, held, strict=True):
            attention.core_attention.current_max_attn_logits = logits
        yield
        self._in_flight[batch] = [attention.core_attention.current_max_attn_logits for attention in self._attentions]
        self._forget()

    def capture(self, batch: int) -> None:
        """Keep the logits of ``batch``, which is complete, for its update."""
        if self._attentions:
            logits = self._in_flight.pop(batch)
            self._sizes = list(map(len, logits))
            self._captured = torch.cat(logits)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Megatron's, of the ranks that the logits are the largest of."""
        return [parallel_state.get_data_parallel_group(with_context_parallel=True)] if self._attentions else []

    def reduce(self, replicas: dist.ProcessGroup | None) -> None:
        """Find the largest logits in the captured batch; on a GPU, only enqueues work.

        Args:
            replicas: our group of those that Megatron has; None for one.
        """
        if replicas is not None:
            dist.all_reduce(self._captured, op=dist.ReduceOp.MAX, group=replicas)
        self._on_host = self._captured.to("cpu", non_blocking=True)
        self._there = torch.cuda.current_stream().record_event() if self._captured.is_cuda else None

    def update(self) -> None:
        """Clip the weights that the model shows, and their main weights; whether the weights' update is skipped or not.

        Where no head is above the threshold the device is not asked.
        """
        if not self._attentions:
            return
        if self._there is not None:
            self._there.synchronize()
        found, on_host = self._captured.split(self._sizes), self._on_host.split(self._sizes)
        self.largest = max([0.0, *(logits.max().item() for logits in on_host)])
        for attention, logits, here in zip(self._attentions, found, on_host, strict=True):
            if self._threshold is not None and (here > self._threshold).any():
                attention.core_attention.current_max_attn_logits = logits
                attention.clip_qk()

    def release(self) -> None:
        """Record from nothing, as Megatron leaves it to the next batch; the last call."""
        self._forget()

    def _forget(self) -> None:
        for attention in self._attentions:
            attention.core_attention.current_max_attn_logits = None
