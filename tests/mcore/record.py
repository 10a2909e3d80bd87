"""What a rank keeps of a run, and the wrappers that collect it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .case import Case


@dataclass(slots=True)
class RankRecord:
    """Written to a file by every rank when its training has ended."""

    stage: int = 0
    replica: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    """Mean loss per training microbatch, in order; empty but on the last stage."""
    validation_losses: list[torch.Tensor] = field(default_factory=list)
    """Mean loss per validation microbatch."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm before clipping, per update."""
    rates: list[tuple[float, ...]] = field(default_factory=list)
    """Learning rate and weight decay of every parameter group, per update."""
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    actions: list[tuple[str, float, float]] = field(default_factory=list)
    """Text form, start and end in seconds of the machine's clock."""
    sleeps: list[tuple[float, float]] = field(default_factory=list)
    """Start and end, same clock."""


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the present weights under their global names."""
    from .model import global_parameters

    return {name: parameter.detach().clone() for name, parameter in global_parameters(model)}


def record_rates(record: RankRecord) -> None:
    """Keep the learning rates and weight decays that reach torch's optimizer."""

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        rates = [value for group in optimizer.param_groups for value in (group["lr"], group["weight_decay"])]
        record.rates.append(tuple(rates))

    register_optimizer_step_pre_hook(keep)


def record_actions(record: RankRecord) -> None:
    """Keep what the executor's recorder saw; ``--pipeline-trace`` switches it on."""
    from megatron_2bw.mcore import session

    def keep(path: Any, schedule: Any, recorder: Any, *rest: Any) -> None:
        record.actions += [(str(action), start_s, end_s) for action, start_s, end_s in recorder.events()]

    session.write_trace = keep


def record_norms(case: Case, record: RankRecord) -> None:
    """Keep the global gradient norm that every update used."""
    if case.schedule == "2bw":
        from megatron_2bw.mcore.optimizer import DelayedOptimizer

        _keep_norms_of_delayed(DelayedOptimizer, record)
    else:
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        _keep_norms(ChainedOptimizer, record)


def _keep_norms(cls: Any, record: RankRecord) -> None:
    step = cls.step

    def recording(self: Any) -> Any:
        successful, norm, zeros = step(self)
        record.norms.append(float(norm))
        return successful, norm, zeros

    cls.step = recording


def _keep_norms_of_delayed(cls: Any, record: RankRecord) -> None:
    finish = cls.finish

    def recording(self: Any, batch: int) -> Any:
        outcome = finish(self, batch)
        if outcome is not None and outcome.batch == len(record.norms):  # A batch may be finished twice.
            record.norms.append(float(outcome.grad_norm))
        return outcome

    cls.finish = recording
