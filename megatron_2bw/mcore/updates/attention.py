"""Attention: the largest logits of a batch clip the weights of its update, or are logged.

Where a head's largest logit in a batch is above a threshold, QK-clip scales the weights of its queries and keys down
after the update, so that this logit would have been the threshold (Kimi K2, https://arxiv.org/abs/2507.20534, section
2.1). Under a delay it belongs to the update, as the biases of routers do: the logits of batch t are those of its weight
version, and they clip the newest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_2bw.runtime.host_copy import HostCopy


class _Reduced(NamedTuple):
    """Logits of a batch, of all replicas: (heads,) by attention."""

    logits: Sequence[torch.Tensor]
    copied: HostCopy
    """All of them, one after the other."""

    def read(self) -> Sequence[torch.Tensor]:
        """On the host; waits for them."""
        return self.copied.read().split([*map(len, self.logits)])


class AttentionLogits:
    """The largest ones of a stage's heads; forwards of the next batch are recorded apart from those of this one.

    Args:
        model: the stage; where its config asks for no logits there is nothing to do.

    Raises:
        ValueError: the config asks for them, and attention records none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config = get_model_config(model)
        self._threshold: float | None = config.qk_clip_threshold if config.qk_clip else None
        is_wanted = config.qk_clip or config.log_max_attention_logit
        # Those that Megatron clips: none of multi-token prediction.
        layers = get_attr_wrapped_model(model, "decoder").layers if is_wanted else ()
        found = (getattr(layer, "self_attention", None) for layer in layers)
        self._attentions: list[Any] = [attention for attention in found if hasattr(attention, "clip_qk")]
        for attention in self._attentions:
            if not hasattr(attention.core_attention, "current_max_attn_logits"):
                raise ValueError("attention records no logits to clip or log: use that of Transformer Engine >= 2.9")
        self.frozen = [
            parameter
            for attention in (self._attentions if self._threshold is not None else ())
            for parameter in attention.parameters()
            if not parameter.requires_grad
        ]
        """Not trained, but clipped all the same, as Megatron clips them: updates change these, too."""
        self._in_flight: dict[int, list[torch.Tensor | None]] = {}
        """By batch, and attention: (heads,), of this rank's."""
        self._captured = torch.empty(0)
        """Of all attentions, one after the other."""
        self._heads: list[int] = []
        """By attention."""
        self._reduced = self._updated = _Reduced([], HostCopy(torch.empty(0)))
        """Of the newest batch that is reduced, and of the one updated last."""
        if self._threshold is not None and self._attentions:
            _load_kernels(self._attentions[0])

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
        # Megatron 0.18 leaves them in the graph of their forward.
        self._in_flight[batch] = [
            logits.detach() if (logits := attention.core_attention.current_max_attn_logits) is not None else None
            for attention in self._attentions
        ]
        self.release()

    def capture(self, batch: int) -> None:
        """Keep the logits of ``batch``, which is complete, for its update."""
        if self._attentions:
            logits = self._in_flight.pop(batch)
            self._captured, self._heads = torch.cat(logits), list(map(len, logits))

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Megatron's, of the ranks that the logits are the largest of: one, or none."""
        return [parallel_state.get_data_parallel_group(with_context_parallel=True)] if self._attentions else []

    def reduce(self, replicas: dist.ProcessGroup | None) -> None:
        """Find the largest logits in the captured batch; on a GPU, only enqueues work.

        Args:
            replicas: our group of those that Megatron has; None for one.
        """
        if replicas is not None:
            dist.all_reduce(self._captured, op=dist.ReduceOp.MAX, group=replicas)
        self._reduced = _Reduced(self._captured.split(self._heads), HostCopy(self._captured))

    @torch.no_grad()
    def update(self) -> None:
        """Clip the weights that the model shows, and their main weights; whether the weights' update is skipped or not.

        Waits for the captured logits; where no head is above the threshold, the device is asked for nothing else.
        """
        self._updated = self._reduced
        if self._threshold is None:
            return
        on_device, on_host = self._updated.logits, self._updated.read()
        for attention, logits, here in zip(self._attentions, on_device, on_host, strict=True):
            if (here > self._threshold).any():
                attention.core_attention.current_max_attn_logits = logits
                attention.clip_qk()

    @property
    def largest(self) -> float:
        """On this stage, in the batch updated last; 0 before; what Megatron logs. Waits for that number."""
        return max([0.0, *(logits.max().item() for logits in self._updated.read())])

    def release(self) -> None:
        """Record from nothing, as Megatron leaves it to the next batch; the last call."""
        for attention in self._attentions:
            attention.core_attention.current_max_attn_logits = None


@torch.no_grad()
def _load_kernels(attention: Any) -> None:
    """Clip once, and undo it.

    On a GPU, kernels are loaded when they are first used, and that waits for all that runs there: at the first large
    logit, in the middle of a run, for whatever receives are posted by then.
    """
    weights = [tensor for parameter in attention.parameters() for tensor in (parameter, _main_weight(parameter))]
    before = [weight.detach().clone() for weight in weights]
    heads, large = attention.num_attention_heads_per_partition, 2.0 * attention.config.qk_clip_threshold
    attention.core_attention.current_max_attn_logits = torch.full((heads,), large, device=weights[0].device)
    attention.clip_qk()
    torch._foreach_copy_([weight.data for weight in weights], before)


def _main_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Or the parameter itself, where there is none beside it."""
    main = getattr(parameter, "main_param", None)
    return parameter if main is None else main
