"""What a rank keeps of a run, and the wrappers that collect it."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import offload
from .case import Case
from .fused_adam import FusedAdam
from .routers import biases
from .shards import Shard


@dataclass(slots=True)
class RankRecord:
    """Written to a file by every rank when its training has ended."""

    stage: int = 0
    replica: int = 0
    tensor_rank: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    """Mean loss per training microbatch, in order; empty but on the last stage."""
    seeds: list[torch.Tensor] = field(default_factory=list)
    """Gradient of every training microbatch's summed loss, in order; empty but on the last stage."""
    validation_losses: list[torch.Tensor] = field(default_factory=list)
    """Mean loss per validation microbatch."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, per batch; None where the update was skipped."""
    norms_apart: list[float | None] = field(default_factory=list)
    """Of the weights that are clipped by a norm of their own; 0 where there are none."""
    rates: dict[int, set[tuple[float, float]]] = field(default_factory=dict)
    """Per batch that was not skipped: learning rate and weight decay of every parameter group."""
    initial: dict[Shard, torch.Tensor] = field(default_factory=dict)
    final: dict[Shard, torch.Tensor] = field(default_factory=dict)
    """(1, elements), in the precision of forward and backward."""
    main: dict[Shard, torch.Tensor] = field(default_factory=dict)
    """(1, elements): final main weights, where they are kept beside the model's."""
    gradients: dict[Shard, list[torch.Tensor]] = field(default_factory=dict)
    """(elements,) per update: reduced, unscaled and clipped, as the optimizer's rule gets them."""
    actions: list[tuple[str, float, float]] = field(default_factory=list)
    """Text form, start and end in seconds of the machine's clock."""
    sleeps: list[tuple[float, float]] = field(default_factory=list)
    """Start and end, same clock."""
    output: str = ""
    """Standard output and error; filled in by the harness."""


def weights(model: Any) -> dict[Shard, torch.Tensor]:
    """A copy of the present weights, and of the biases of experts."""
    from .model import shards

    return {shard: tensor.detach().clone().view(1, -1) for shard, tensor in [*shards(model), *biases(model)]}


class Optimizers:
    """The torch optimizers of a rank: what reaches them, and the main weights they hold.

    Args:
        record: gets the learning rates and, if the case wants them, the gradients.
    """

    def __init__(self, case: Case, record: RankRecord) -> None:
        self._keeps_gradients = case.record_gradients
        self._record = record
        self._shards: dict[torch.Tensor, Shard] = {}
        self._seen: set[torch.optim.Optimizer] = set()
        register_optimizer_step_pre_hook(self._before_step)

    def know(self, pairs: Iterable[tuple[Shard, torch.Tensor]]) -> None:
        """Say what the tensors that an optimizer updates are."""
        self._shards |= {tensor: shard for shard, tensor in pairs}

    def main_weights(self) -> dict[Shard, torch.Tensor]:
        """A copy of what the optimizers hold."""
        return {shard: self._main_weight(tensor).detach().clone().view(1, -1) for tensor, shard in self._shards.items()}

    def _main_weight(self, tensor: torch.Tensor) -> torch.Tensor:
        for optimizer in self._seen:
            if isinstance(optimizer, FusedAdam) and tensor in optimizer.state:
                return optimizer.main_weight(tensor)
            if offload.is_hybrid(optimizer) and tensor in optimizer.param_to_inner_param:
                return optimizer.param_to_inner_param[tensor]
        return tensor

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        hybrids = [seen for seen in self._seen if offload.is_hybrid(seen)]
        if any(optimizer in hybrid.sub_optimizers for hybrid in hybrids) or offload.is_for_its_state(optimizer):
            return
        # The norm of a batch is recorded when its update is complete.
        self._seen.add(optimizer)
        rates = self._record.rates.setdefault(len(self._record.norms), set())
        for group in optimizer.param_groups:
            rates.add((group["lr"], group["weight_decay"]))
            for tensor in group["params"] if self._keeps_gradients else ():
                gradients = self._record.gradients.setdefault(self._shards[tensor], [])
                gradient = tensor.grad if tensor.grad is not None else tensor.decoupled_grad
                gradients.append(gradient.detach().clone().view(-1))


def record_updates(case: Case, record: RankRecord, models: list[Any]) -> Optimizers:
    """Keep what every update used: rates, gradients and norms.

    Args:
        models: gets the bare model before the optimizer is made.
    """
    optimizers = Optimizers(case, record)
    training = importlib.import_module("megatron.training.training")
    original = training.get_megatron_optimizer

    @functools.wraps(original)
    def make(config: Any, *args: Any, **kwargs: Any) -> Any:
        config.grad_norm_skip_threshold = case.norm_limit or math.inf
        made = original(config, *args, **kwargs)
        optimizers.know(_of_megatron(made, models[0]))
        return made

    training.get_megatron_optimizer = make
    if case.schedule in ("2bw", "pipedream"):
        from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer

        _keep_norms_of_delayed(DelayedOptimizer, record)
    else:
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        _keep_norms(ChainedOptimizer, record)
    return optimizers


def _of_megatron(optimizer: Any, model: Any) -> Iterator[tuple[Shard, torch.Tensor]]:
    from .model import shards

    named = {parameter: shard for shard, parameter in shards(model)}
    nested = (getattr(part, "chained_optimizers", [part]) for part in optimizer.chained_optimizers)
    for part in chain.from_iterable(nested):
        if hasattr(part, "shard_fp32_groups"):  # A distributed optimizer.
            yield from _of_distributed(part, named)
            continue
        updated = {tensor for group in part.param_groups for tensor in group["params"]}
        for parameter, shard in named.items():
            tensor = getattr(parameter, "main_param", parameter)
            if tensor in updated:
                yield shard, tensor


def _of_distributed(part: Any, named: dict[torch.nn.Parameter, Shard]) -> Iterator[tuple[Shard, torch.Tensor]]:
    is_apart = part.config.use_precision_aware_optimizer
    for parameters, mains in (
        (part.model_float16_groups, part.shard_float16_groups if is_apart else part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for parameter, main in zip(chain(*parameters), chain(*mains), strict=True):
            start = part._get_model_param_range_map(parameter)["param"].start
            yield replace(named[parameter], start=start), main


def record_actions(record: RankRecord) -> None:
    """Keep what the executor's recorder saw; ``--pipeline-trace`` switches it on."""
    from megatron_2bw.mcore.loop import session

    def keep(path: Any, schedule: Any, recorder: Any, *rest: Any) -> None:
        record.actions += [(str(action), start_s, end_s) for action, start_s, end_s in recorder.events()]

    session.write_trace = keep


def _keep_norm(record: RankRecord, optimizer: Any, norm: float | None) -> None:
    apart = getattr(optimizer, "grad_norms_by_group", {})  # Megatron 0.18 has one norm for all weights.
    if norm is None:  # By a limit, Megatron leaves out optimizers that have weights.
        record.rates.pop(len(record.norms), None)
    record.norms.append(None if norm is None else float(norm))
    record.norms_apart.append(None if norm is None else apart.get("mtp", 0.0))


def _keep_norms(cls: Any, record: RankRecord) -> None:
    step = cls.step

    def recording(self: Any) -> Any:
        successful, norm, zeros = step(self)
        _keep_norm(record, self, norm if successful else None)
        return successful, norm, zeros

    cls.step = recording


def _keep_norms_of_delayed(cls: Any, record: RankRecord) -> None:
    finish = cls.finish
    seen: set[int] = set()

    def recording(self: Any, batch: int) -> Any:
        outcome = finish(self, batch)
        if outcome is not None and outcome.batch not in seen:  # A batch may be finished twice.
            seen.add(outcome.batch)
            norm = outcome.grad_norm or 0.0  # PipeDream's stages have none.
            _keep_norm(record, self._inner, norm if outcome.successful else None)
        return outcome

    cls.finish = recording
