"""Corrections of updates whose gradients are one step old.

On a quadratic of curvature h, ``x' = x - lr * m`` with an average m of gradients (decay beta) is stable up to
``lr*h = 2(1+beta)/(1-beta)``; with gradients of one step before, only up to 1, whatever beta is, and at most m/N where
that is N of m microbatches. What is left of momentum then has to be paid for with a smaller learning rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

MOMENTS = ("exp_avg", "momentum_buffer")
"""What optimizers call the average of gradients: Adam's and Lion's; SGD's and Muon's."""


class _Rule(Enum):
    """What a moment is."""

    AVERAGE_FROM_ZERO = auto()
    """Adam's, which Adam divides by ``1-decay**steps``."""
    AVERAGE = auto()
    """Muon's."""
    SUM = auto()
    """SGD's, ``1/(1-decay)`` times as large as an average."""

    @classmethod
    def of(cls, group: dict[str, Any]) -> _Rule:
        """That of the optimizer that a group of parameters belongs to.

        Raises:
            ValueError: an optimizer whose update is another function of its moment.
        """
        if "betas" in group and "eps" in group and "shampoo_beta" not in group:  # SOAP's is in axes of its own.
            return cls.AVERAGE_FROM_ZERO
        if "betas" not in group and "momentum" in group:
            return cls.SUM if "dampening" in group else cls.AVERAGE
        raise ValueError("a lead of the moment is for Adam, SGD and Muon: correct with a lead of the whole update")


class _Lead:
    """What looks some steps ahead, and one less while nothing is delayed.

    Args:
        lead: steps, above 0.
    """

    def __init__(self, lead: float) -> None:
        self.lead = lead
        self.delayed = True
        """Whether the next update is one of delayed training."""

    @property
    def steps_ahead(self) -> float:
        """Of the next update."""
        return self.lead if self.delayed else max(self.lead - 1, 0.0)


class MomentLead(_Lead):
    """Updates with ``m(t) + c*(m(t) - m(t-1))``: the average of gradients, c steps ahead of time.

    The difference is ``(1-beta)/beta * (g(t) - m(t))``, so nothing more has to be kept: the update uses
    ``m + k*(g - m)``, ``k = c*(1-beta)/beta``, the form of quasi-hyperbolic Adam (Ma and Yarats, arXiv
    1810.06801). With gradients one step old, the largest stable ``lr*h`` for c = 2 is 2.9 at beta 0.9,
    5.4 at 0.95 and 13 at 0.98, at 0.9 with half of them 6.2 and with a quarter 12.9; without delay, and without lead,
    it is 38 at 0.9. Adam's m is corrected for
    its start from zero before it is compared with g, so a first update has no lead. Weight decay that an
    optimizer adds to the gradient by itself, as SGD does, has no lead, and stays in m ``1/(1-k)`` times as strong.

    Muon orthogonalizes the corrected average. Its m is compared with g as it is, not corrected for its start: only the
    direction counts. Nesterov momentum, which Muon often comes with, is a lead of ``beta`` steps by itself; with both,
    the lead is ``beta*(1+c)``.

    Memory: none. Time: four passes over m and two over g per update. Communication: none.

    Args:
        lead: c, above 0.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    >>> detach = MomentLead(0.5).attach(optimizer)
    >>> for gradient in (0.5, 1.0):
    ...     weight.grad = torch.tensor([gradient])
    ...     optimizer.step()
    >>> optimizer.state[weight]["momentum_buffer"].item(), weight.item()
    (1.25, -1.125)
    """

    def __init__(self, lead: float) -> None:
        super().__init__(lead)
        self._parts: dict[torch.optim.Optimizer, list[_Part]] = {}
        """During a step: what is corrected. Not what had no moment before, as in a first step."""

    @property
    def least_decay(self) -> float:
        """Up to here, nothing of the average is left in the corrected one."""
        return self.lead / (1 + self.lead)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Whether ``optimizer`` can be corrected.

        Raises:
            ValueError: another optimizer than Adam, SGD and Muon, or a decay so small that the corrected average
                would no longer contain the old one.
        """
        for group in optimizer.param_groups:
            _Rule.of(group)
            if _decay(group) <= self.least_decay:
                raise ValueError(
                    f"a lead of {self.lead:g} needs a decay of the first moment above "
                    f"{self.least_decay:g}, got {_decay(group):g}: raise it, or lower the lead"
                )

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Correct every step of ``optimizer`` from here on; returns what ends that.

        Raises:
            ValueError: as `check` does.
        """
        self.check(optimizer)
        hooks = (optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after))
        return lambda: [hook.remove() for hook in hooks]

    def _share(self, decay: float) -> float:
        """k."""
        return self.steps_ahead * (1 - decay) / decay

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


class UpdateLead(_Lead):
    """Weights ``x(t) = y(t) + c*(y(t) - y(t-1))``: those of the optimizer, c updates ahead of time.

    The optimizer updates y, its main weights; forward and backward compute with x. From update to update x changes by
    ``d(t) + c*(d(t) - d(t-1))``, d the change of y: with c = 1 that is the error feedback of Zmushko
    et al. (arXiv 2606.30634), and the prediction of weights one step ahead, seen from x and from y. On a quadratic the
    largest stable steps are those of `MomentLead`; here the second moment and the orthogonalization of an update are
    ahead of time as well.

    Memory: one copy of what this rank updates (fp32), during the update only; nothing that lasts, as x is what the
    model has in its own precision, and y what the optimizer has. Time: three passes over y per update.
    Communication: none. Checkpoints have both without further ado. A skipped update changes neither. What is evaluated,
    and what other programs read as the weights of a checkpoint's model, is x.

    Args:
        lead: c, above 0.

    >>> y = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([y], lr=1.0)
    >>> lead = UpdateLead(2.0)
    >>> detach = lead.attach(optimizer)
    >>> y.grad = torch.ones(1)
    >>> optimizer.step()
    >>> with lead.shown(optimizer):
    ...     x = y.item()
    >>> x, y.item()
    (-3.0, -1.0)
    """

    def __init__(self, lead: float) -> None:
        super().__init__(lead)
        self._before: dict[torch.optim.Optimizer, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """From a step until x has been copied: y, and y before it."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer can be corrected whose weights are not the model's own."""

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Correct every step of ``optimizer`` from here on; returns what ends that."""
        return optimizer.register_step_pre_hook(self._keep).remove

    @contextmanager
    def shown(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the weights of ``optimizer`` are x, to be copied into the model; y if it has not stepped."""
        after, before = self._before.pop(optimizer, ([], []))
        present = [weight.data for weight in after]
        if after:
            torch._foreach_lerp_(before, present, 1 + self.steps_ahead)
        for weight, ahead in zip(after, before, strict=True):
            weight.data = ahead
        try:
            yield
        finally:
            for weight, data in zip(after, present, strict=True):
                weight.data = data

    def _keep(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._before.pop(optimizer, None)  # Of a step that nobody has shown, as loading takes one: it may be large.
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        self._before[optimizer] = weights, [weight.detach().clone() for weight in weights]


Correction = MomentLead | UpdateLead

CORRECTIONS: dict[str, type[Correction]] = {"lead": MomentLead, "update-lead": UpdateLead}
"""By the names that users type; each made from a number of steps."""


class _Part(NamedTuple):
    """Of the parameters of a group: those with as many steps behind them."""

    decay: float
    steps: int
    """Before this one."""
    moments: list[torch.Tensor]
    gradients: list[torch.Tensor]
    rule: _Rule

    def weight(self, steps: int) -> float:
        """Factor that brings a gradient to the scale of its moment after so many steps."""
        if self.rule is _Rule.SUM:
            return 1 / (1 - self.decay)
        return 1 - self.decay**steps if self.rule is _Rule.AVERAGE_FROM_ZERO else 1.0


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
                rule=_Rule.of(group),
            )


def _steps(group: dict[str, Any], state: dict[str, Any]) -> int:
    """Done so far; torch keeps them per parameter, fused optimizers per group, and SGD has no use for them."""
    return int(state.get("step", group.get("step", 0)))


def _decay(group: dict[str, Any]) -> float:
    return group["betas"][0] if "betas" in group else group["momentum"]
