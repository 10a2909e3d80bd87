"""The table of flags, asked of Megatron-Core's configs: what a training loop without flags is refused for."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_2bw.mcore.monitoring.timers import CallTimers
from megatron_2bw.planner.flag_table.table import MAPPED, REFUSED
from megatron_2bw.schedule.registry import DELAYED

_DDP_NAMES = {
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "param_name_patterns_for_fp32_local_accumulation": "ddp_param_name_patterns_for_fp32_local_accumulation",
    "average_in_collective": "ddp_average_in_collective",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
}
"""Fields of DistributedDataParallelConfig that Megatron's flags call otherwise."""


def check_configs(schedule: str, model: torch.nn.Module, optimizer: Any) -> None:
    """Refuse what ``schedule`` does not work with.

    Args:
        schedule: registered name.
        model: in Megatron-Core's DistributedDataParallel.
        optimizer: Megatron-Core's.

    Raises:
        ValueError: a line for each field of a config: the flag that sets it, the reason and the remedy.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages < 2:
        raise ValueError(f"{schedule} needs at least 2 pipeline stages, got {stages}: one stage has no bubble")
    if not hasattr(model, "ddp_config"):
        raise ValueError(
            f"{schedule} needs a model in Megatron-Core's DistributedDataParallel, got {type(model).__name__}"
        )
    for timers in (get_model_config(model).timers, optimizer.config.timers):
        if schedule in DELAYED and getattr(timers, "_log_level", 0) > 0 and not isinstance(timers, CallTimers):
            raise ValueError(
                f"the timers of a config wait for the device inside a call, and {schedule} must not: use log level 0"
            )
    args = _as_flags(model, optimizer)
    problems = [
        f"what {row.flag} sets does not work with {schedule}: {row.reason}; {row.remedy}"
        for row in REFUSED
        if row.applies(args, schedule)
    ]
    problems += [
        f"what {row.flag} sets must be {row.becomes} with {schedule}: {row.reason}"
        for row in MAPPED
        if row.applies(args, schedule)
    ]
    if get_model_config(model).bf16 and not optimizer.config.bf16:
        problems.append("bf16 is set in the config of the model and not in that of the optimizer: set it in both")
    if problems:
        raise ValueError("\n".join(problems))


def _as_flags(model: torch.nn.Module, optimizer: Any) -> SimpleNamespace:
    """Megatron's arguments, as far as the three configs say what they would be."""
    args = _Unset(rerun_mode="disabled", timing_log_level=0)
    for config in (get_model_config(model), model.ddp_config, optimizer.config):
        for field in fields(config):
            name = _DDP_NAMES.get(field.name, field.name)
            setattr(args, name, getattr(args, name) or getattr(config, field.name))  # Some are in two configs.
    for name in ("has_cond_embedder", "flextron"):  # Megatron asks for them too, and they are no fields.
        setattr(args, name, getattr(get_model_config(model), name, None))
    bare = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    args.untie_embeddings_and_output_weights = not getattr(bare, "share_embeddings_and_output_weights", False)
    args.use_layer_wise_param_layout = bool(model.ddp_config.use_distributed_optimizer)
    args.grad_reduce_in_bf16 = args.bf16 and not args.accumulate_allreduce_grads_in_fp32
    return args


class _Unset(SimpleNamespace):
    """Flags that no config knows have no value."""

    def __getattr__(self, name: str) -> None:
        return None
