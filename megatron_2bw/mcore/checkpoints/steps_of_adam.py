"""What the distributed optimizer's checkpoints lack without Transformer Engine and Apex, on a GPU, too.

Torch's AdamW keeps a step per parameter, which Megatron's distributed optimizer reads and writes in one place less
than it would have to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def with_step_of_others(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """On a stage without experts, their optimizer has no weight and so no step: it says that of the stage's others."""

    @functools.wraps(state_dict)
    def wrapper(self: Any, *args: Any, **keywords: Any) -> Any:
        chained = [part.optimizer for part in self.chained_optimizers if not part.is_stub_optimizer]
        steps = [state["step"] for adam in chained for state in adam.state.values() if "step" in state]
        for adam in chained:
            adam.step_of_others = steps[0] if steps else torch.zeros(())
        return state_dict(self, *args, **keywords)

    return wrapper


def with_a_step(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron asks the state of an optimizer for its step.

    There is none without weights, nor, before it is loaded, in that of ``--optimizer-cpu-offload``.
    """

    @functools.wraps(state_dict)
    def wrapper(self: Any) -> Any:
        _begin(self.optimizer)
        state = self.optimizer.state
        if state or not hasattr(self.optimizer, "step_of_others"):
            return state_dict(self)
        state["no weight"] = {"step": self.optimizer.step_of_others}
        try:
            return state_dict(self)
        finally:
            del state["no weight"]

    return wrapper


def with_moments(get_parameter_state: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron writes those of each weight; in the format torch, before it asks for the step."""

    @functools.wraps(get_parameter_state)
    def wrapper(self: Any, *args: Any, **keywords: Any) -> Any:
        _begin(self.optimizer)
        return get_parameter_state(self, *args, **keywords)

    return wrapper


def _begin(adam: Any) -> None:
    """As its first step would, which may not have been: what is loaded replaces it; fp16 looks for a loss scale."""
    if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        return
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        if not adam.state.get(parameter):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.zeros(()), **moments}


def with_own_steps(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Megatron gives all parameters one and the same step tensor; each would advance it."""

    @functools.wraps(load_state_dict)
    def wrapper(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return wrapper


def without_step(set_states: Callable[..., None]) -> Callable[..., None]:
    """The step is loaded with the parameter groups; and writing to fp32 weights needs ``no_grad``."""

    @functools.wraps(set_states)
    def wrapper(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            set_states(self, model_param, {**tensors, "step": None})

    return wrapper
