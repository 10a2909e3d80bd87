"""Corrections of updates whose gradients are one step old.

On a quadratic of curvature h, ``x' = x - lr * m`` with an average m of gradients (decay beta) is stable up to
``lr*h = 2(1+beta)/(1-beta)``; with gradients of one step before, only up to 1, whatever beta is. What is left of
momentum then has to be paid for with a smaller learning rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

MOMENTS = ("exp_avg", "momentum_buffer")
"""What torch's, Apex's and Transformer Engine's optimizers call the average of gradients: Adam, SGD."""


class MomentLead:
    """Updates with ``m(t) + c*(m(t) - m(t-1))``: the average of gradients, c steps ahead of time.

    The difference is ``(1-beta)/beta * (g(t) - m(t))``, so nothing more has to be kept: the update uses
    ``m + k*(g - m)``, ``k = c*(1-beta)/beta``, the form of quasi-hyperbolic Adam (Ma and Yarats, arXiv
    1810.06801). With gradients one step old, the largest stable ``lr*h`` for c = 2 is 2.9 at beta 0.9,
    5.4 at 0.95 and 13 at 0.98; without delay, and without lead, it is 38 at 0.9. Adam's m is corrected for
    its start from zero before it is compared with g, so a first update has no lead. Weight decay that an
    optimizer adds to the gradient by itself, as SGD does, has no lead, and stays in m ``1/(1-k)`` times as strong.

    Memory: none. Time: four passes over m and two over g per update. Communication: none.

    Args:
        lead: c, above 0.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    >>> MomentLead(0.5).attach(optimizer)
    >>> for gradient in (0.5, 1.0):
    ...     weight.grad = torch.tensor([gradient])
    ...     optimizer.step()
    >>> optimizer.state[weight]["momentum_buffer"].item(), weight.item()
    (1.25, -1.125)
    """

    def __init__(self, lead: float) -> None:
        self.lead = lead
        self._parts: dict[torch.optim.Optimizer, list[_Part]] = {}
        """During a step: what is corrected. Not what had no moment before, as in a first step."""

    @property
    def least_decay(self) -> float:
        """Up to here, nothing of the average is left in the corrected one."""
        return self.lead / (1 + self.lead)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Whether ``optimizer`` can be corrected.

        Raises:
            ValueError: a decay so small that the corrected average would no longer contain the old one.
        """
        for group in optimizer.param_groups:
            if _decay(group) <= self.least_decay:
                raise ValueError(
                    f"a lead of {self.lead:g} needs a decay of the first moment above "
                    f"{self.least_decay:g}, got {_decay(group):g}: raise it, or lower the lead"
                )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Correct every step of ``optimizer`` from here on.

        Raises:
            ValueError: as `check` does.
        """
        self.check(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _share(self, decay: float) -> float:
        """k."""
        return self.lead * (1 - decay) / decay if decay else 1.0

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Change m(t-1) so that the step makes the corrected average of it."""
        self._parts[optimizer] = list(_parts(optimizer))
        for part in self._parts[optimizer]:
            share = self._share(part.decay)
            torch._foreach_mul_(part.moments, 1 - share)
            torch._foreach_add_(part.moments, part.gradients, alpha=share * part.weight(part.steps))

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take m(t) out of the corrected average."""
        for part in self._parts.pop(optimizer):
            share = self._share(part.decay)
            torch._foreach_add_(part.moments, part.gradients, alpha=-share * part.weight(part.steps + 1))
            torch._foreach_div_(part.moments, 1 - share)


class _Part(NamedTuple):
    """Of the parameters of a group: those with as many steps behind them."""

    decay: float
    steps: int
    """Before this one."""
    moments: list[torch.Tensor]
    gradients: list[torch.Tensor]
    is_average: bool
    """Adam's; SGD's is a sum, ``1/(1-decay)`` times as large."""

    def weight(self, steps: int) -> float:
        """Of a gradient beside a moment after so many steps, for both to be of the same size."""
        return 1 - self.decay**steps if self.is_average else 1 / (1 - self.decay)


def _parts(optimizer: torch.optim.Optimizer) -> Iterator[_Part]:
    for group in optimizer.param_groups:
        by_steps: defaultdict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            moment = next((name for name in MOMENTS if state.get(name) is not None), None)
            if parameter.grad is not None and moment is not None:
                by_steps[_steps(group, state), moment].append(parameter)
        for (steps, moment), parameters in by_steps.items():
            yield _Part(
                decay=_decay(group),
                steps=steps,
                moments=[optimizer.state[parameter][moment] for parameter in parameters],
                gradients=[parameter.grad for parameter in parameters],
                is_average=moment == "exp_avg",
            )


def _steps(group: dict[str, Any], state: dict[str, Any]) -> int:
    """Done so far; torch keeps them per parameter, fused optimizers per group, and SGD has no use for them."""
    return int(state.get("step", group.get("step", 0)))


def _decay(group: dict[str, Any]) -> float:
    return group["betas"][0] if "betas" in group else group["momentum"]
