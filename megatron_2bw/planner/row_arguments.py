"""Keys of a row that are Megatron's arguments, as the flags that set them."""

from __future__ import annotations

import re
from typing import Any

from megatron_2bw.planner.accepted import GROUP
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags import SWITCHES

_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format", "microbatch_group_size_per_vp_stage": GROUP}
"""Of arguments that Megatron keeps under other names than their flags."""
_NEGATED = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "fp8_wgrad": "--no-fp8-wgrad",
}
"""Flags that set an argument to false."""
_ALIKE = ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "add_position_embedding", "pad_vocab_size")
"""Arguments that no price depends on, with names that look like flags on which prices do."""
_MEMBER = re.compile(r"[A-Z]\w*\.(\w+)")
"""Of an enumeration, as Python prints it."""


def flags_of(row: dict[str, Any]) -> dict[str, list[str]]:
    """Flags and the words behind each, as `Options` has them; what asks for nothing is left out.

    >>> flags_of({"hidden_dropout": 0, "swiglu": True, "add_bias_linear": False, "transformer_impl": None})
    {'--hidden-dropout': ['0'], '--swiglu': [], '--disable-bias-linear': []}

    Raises:
        PlanError: a switch that is neither true nor false, or two that contradict each other.
    """
    found: dict[str, tuple[str, list[str] | None]] = {}
    for key, value in row.items():
        if value is None or key in _ALIKE:
            continue
        flag = _NEGATED.get(key) or _FLAGS.get(key) or "--" + key.replace("_", "-")
        if flag in SWITCHES and not isinstance(value, bool):
            raise PlanError(f"{key} {value!r}: give true or false")
        words = _words(not value if key in _NEGATED else value)
        other, there = found.setdefault(flag, (key, words))
        if there != words:
            raise PlanError(f"{other} and {key} disagree; leave out one of them")
    return {flag: words for flag, (_, words) in found.items() if words is not None}


def _words(value: Any) -> list[str] | None:
    """What is typed behind a flag; None where the flag is not given."""
    if isinstance(value, bool):
        return [] if value else None
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return value or None
    member = _MEMBER.fullmatch(str(value))
    return [member[1] if member else str(value)] if value != "" else None
