"""A stand-in for Transformer Engine's FusedAdam: moments and main weights in the precision that is asked for."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim.adamw import adamw


def rounded(main: torch.Tensor) -> torch.Tensor:
    """``main``, in fp32, in bf16: halfway between two the one away from zero, where torch takes the even one.

    That is what is left of a weight when the last 16 bits are taken as a signed number and are kept apart.
    """
    bits = main.view(torch.int32)
    return ((bits + (1 << 15)) >> 16).to(torch.int16).view(torch.bfloat16)


def remainder(main: torch.Tensor) -> torch.Tensor:
    """What `rounded` leaves: (n,) in int16."""
    return main.view(torch.int32).to(torch.int16)


def joined(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The fp32 weight of which these are the parts."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)).view(torch.float32)


class FusedAdam(torch.optim.Optimizer):
    """AdamW as torch has it, on weights and moments in fp32 that are stored in other ways.

    Args:
        exp_avg_dtype: of the first moment, fp32 or bf16; ``exp_avg_sq_dtype`` of the second.
        master_weights: keep main weights beside those of ``params`` that are not in fp32.
        use_decoupled_grad: gradients are in ``decoupled_grad``.
        store_param_remainders: of main weights, keep what their bf16 weights do not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if not adam_w_mode or capturable or master_weight_dtype != torch.float32:
            raise NotImplementedError("no test has it")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self._has_main_weights = master_weights
        self.store_param_remainders = store_param_remainders
        self._gradient = "decoupled_grad" if use_decoupled_grad else "grad"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step for all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = getattr(parameter, self._gradient, None)
                if gradient is not None:
                    self._step(group, parameter, gradient.float())

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        """Zeros, and the weight as it is."""
        state = self.state[parameter]
        for name, dtype in self._dtypes.items():
            state[name] = torch.zeros_like(parameter, dtype=dtype)
        if self._has_main_weights:
            main = parameter.detach().float().clone()
            state["master_param"] = remainder(main) if store_param_remainders else main

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """In fp32, or what is kept of a main weight."""
        state = self.state[parameter][name]
        return state if state.dtype == torch.int16 else state.float()

    def set_scaled_state(self, parameter: torch.Tensor, name: str, unscaled_state: torch.Tensor) -> None:
        """What `get_unscaled_state` gave."""
        kept = name == "master_param" and self._keeps(parameter)
        assert unscaled_state.dtype == (torch.int16 if kept else torch.float32)
        if not self.state[parameter]:
            self.initialize_state(parameter, self._keeps(parameter))
        self.state[parameter][name].copy_(unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        """Torch's, in fp32."""
        saved = super().state_dict()
        for number, parameter in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if number in saved["state"]:
                saved["state"][number] = {
                    name: self.get_unscaled_state(parameter, name) for name in self.state[parameter]
                }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In the precision that is kept, where torch takes that of the weight."""
        super().load_state_dict(state_dict | {"state": {}})
        for number, parameter in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            for name, state in state_dict["state"].get(number, {}).items():
                self.set_scaled_state(parameter, name, state if state.dtype == torch.int16 else state.float())

    def main_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """In fp32: ``parameter`` itself if it is, whatever there is beside it."""
        main = parameter if parameter.dtype == torch.float32 else self.state[parameter]["master_param"]
        return joined(parameter.detach(), main) if main.dtype == torch.int16 else main

    def _keeps(self, parameter: torch.Tensor) -> bool:
        return self.store_param_remainders and parameter.dtype == torch.bfloat16

    def _step(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter, self._keeps(parameter))
        state, main = self.state[parameter], self.main_weight(parameter)
        moments = {name: state[name].float() for name in self._dtypes}
        adamw(
            *([main], [gradient], [moments["exp_avg"]], [moments["exp_avg_sq"]], []),
            [torch.tensor(group["step"] - 1.0)],
            foreach=True,
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in ("lr", "weight_decay", "eps")},
        )
        for name, moment in moments.items():
            state[name].copy_(moment)
        if self._keeps(parameter):
            state["master_param"].copy_(remainder(main))
        if main is not parameter:
            parameter.data.copy_(rounded(main) if self._keeps(parameter) else main)


def install() -> None:
    """Megatron takes it for Transformer Engine's, of a version that has all of this."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    if importlib.util.find_spec("transformer_engine") is None:  # Megatron looks at what it finds there, and no more.
        module = types.ModuleType("transformer_engine.pytorch.optimizers")
        module.FusedAdam = FusedAdam
        names = ("transformer_engine", "transformer_engine.pytorch")
        sys.modules.update({name: types.ModuleType(name) for name in names} | {module.__name__: module})
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    for place in (optimizer, optimizer_config):
        place.is_te_min_version = lambda version: True
