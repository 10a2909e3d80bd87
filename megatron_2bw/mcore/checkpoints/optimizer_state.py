"""What the state of Megatron's optimizers needs around a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch

from megatron_2bw.mcore.symbols import replace
from megatron_2bw.mcore.updates.stock_optimizer import leaf_optimizers


def let_state_be_saved(optimizer: Any) -> None:
    """Begin, as the first update would, the state of Transformer Engine's Adam, which Megatron writes in any case.

    Of torch's Adam, ``checkpoints.steps_of_adam`` does that.
    """
    for adam in (part.optimizer for part in leaf_optimizers(optimizer) if hasattr(part.optimizer, "initialize_state")):
        for parameter in chain.from_iterable(group["params"] for group in adam.param_groups):
            if not adam.state.get(parameter):
                keeps_remainder = adam.store_param_remainders and parameter.dtype is torch.bfloat16
                adam.initialize_state(parameter, keeps_remainder)


def let_state_be_loaded(optimizer: Any) -> None:
    """Give SGD's momentum a place in a torch_dist checkpoint that is being loaded; Megatron has none for it."""
    for part in leaf_optimizers(optimizer):
        if not part.is_stub_optimizer and part.init_state_fn is None:
            part.init_state_fn = _with_momentum


def has_updates(state: dict[str, Any] | None) -> bool:
    """Whether there were any before a checkpoint: in fp16, the first batches may all be skipped."""
    scheduler = (state or {}).get("opt_param_scheduler") or {}
    return scheduler.get("num_steps") != 0


@contextmanager
def without_new_state(optimizer: Any) -> Iterator[None]:
    """Inside, ask a torch_dist checkpoint for no moments: the first step makes them, and none has been saved."""
    with ExitStack() as stack:
        for part in leaf_optimizers(optimizer):
            if not part.is_stub_optimizer:
                stack.enter_context(replace(part, "init_state_fn", lambda *_: None))
        yield


def _with_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
