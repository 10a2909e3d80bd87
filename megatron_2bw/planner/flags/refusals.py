"""What training under one of our schedules refuses of the flags: the table that training checks, asked of flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flag_table.conditions import CORRECTIONS, LEAD, sums_experts_over_wrong_ranks
from megatron_2bw.planner.flag_table.refused import REFUSED
from megatron_2bw.planner.flags.argument_flags import NEGATED, flag_of
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.specs.layout import Layout

BY_FLAGS = tuple(row for row in REFUSED if row.is_set is not sums_experts_over_wrong_ranks)
"""Rows that flags alone decide, without the Megatron that is installed."""
DEFAULTS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "moe_layer_freq": 1,
    "optimizer": "adam",
    "adam_beta1": 0.9,
    "sgd_momentum": 0.9,
    "muon_momentum": 0.9,
    "delay_lead": LEAD,
    "clip_grad": 1.0,
    "ckpt_format": "torch_dist",
    "rerun_mode": "validate_results",
}
"""Megatron's, and ours, where they are not the same as "off"."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What Megatron's parser makes of flags, as far as it is asked."""

    options: Options
    data_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    """Which several flags say, one of them by numbers of layers."""

    def __getattr__(self, name: str) -> Any:
        flag = flag_of(name)
        if name in NEGATED:
            return flag not in self.options
        words = self.options.values.get(flag)
        if words is None or not all(map(self.options.is_known, words)):
            return DEFAULTS.get(name)
        values = [_value(word) for word in words]
        return True if not values else values[0] if len(values) == 1 else values


def _value(word: str) -> str | float:
    try:
        return float(word)
    except ValueError:
        return word


def refusal(options: Options, layout: Layout) -> str | None:
    """Why a run with these flags would stop before training; None where it starts.

    Raises:
        PlanError: what a condition compares is no number.
    """
    options.choice("--delay-correction", CORRECTIONS, CORRECTIONS[0])
    for name in ("adam_beta1", "sgd_momentum", "muon_momentum"):
        options.real(flag_of(name), DEFAULTS[name], most=1)
    if not options.real("--delay-lead", LEAD):
        raise PlanError(f"--delay-lead {options.text('--delay-lead')}: give a number above 0")
    args = _Arguments(options, layout.data, layout.chunks if layout.chunks > 1 else None)
    return next((row.message(layout.schedule) for row in BY_FLAGS if row.applies(args, layout.schedule)), None)
