"""Megatron's arguments in a row that say what fields of ours say in other words."""

from __future__ import annotations

from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags import ATTENTION_BACKENDS
from megatron_2bw.planner.inputs import checked
from megatron_2bw.planner.model_flags import DROPOUT, NORMALIZATIONS, POSITIONS

_SWITCHES = {
    "tied": {"untie_embeddings_and_output_weights": False},
    "bias": {"disable_bias_linear": False, "add_bias_linear": True},
    "fused_swiglu": {"no_bias_swiglu_fusion": False, "bias_swiglu_fusion": True},
}
"""By field: arguments, and what the field is where they are true."""
_IMPLEMENTATIONS = ("local", "transformer_engine", "inference_optimized")
_DROPOUT = tuple(flag[2:].replace("-", "_") for flag in DROPOUT)


def said(row: dict[str, Any]) -> dict[str, Any]:
    """Fields of Model and Layout that Megatron's arguments in ``row`` decide, as its flags would; null says nothing.

    Raises:
        PlanError: a value that Megatron does not know, or two arguments that contradict each other.
    """
    found: dict[str, Any] = {}
    for field, switches in _SWITCHES.items():
        given = {key: _switch(row, key) for key in switches if row.get(key) is not None}
        meant = {on is switches[key] for key, on in given.items()}
        if len(meant) > 1:
            raise PlanError(f"{' and '.join(given)} disagree; leave out one of them")
        found |= dict.fromkeys([field] * len(meant), *meant)
    if row.get("normalization") is not None:
        found["rmsnorm"] = _choice(row, "normalization", NORMALIZATIONS) == "RMSNorm"
    if row.get("position_embedding_type") is not None or _switch(row, "use_rotary_position_embeddings"):
        learned = _choice(row, "position_embedding_type", POSITIONS) == "learned_absolute"
        found["learned_positions"] = learned and not _switch(row, "use_rotary_position_embeddings")
    if _switch(row, "recompute_activations"):
        found["recompute"] = "selective"
    fused = _fused(row)
    if fused is not None:
        found["fused_attention"] = fused
    shares = [checked(row[key], float, key) for key in _DROPOUT if row.get(key) is not None]
    if len(shares) == len(_DROPOUT) or any(shares) or (shares and "model" not in row):
        found["dropout"] = any(shares) or len(shares) < len(_DROPOUT)  # Megatron's default is 0.1.
    return found


def _fused(row: dict[str, Any]) -> bool | None:
    """Whether attention is, by what goes first in Megatron; None where it decides by itself."""
    backend = _choice(row, "attention_backend", ATTENTION_BACKENDS)
    if _switch(row, "use_flash_attn"):
        return True
    if is_local(row):
        return False
    return None if backend == "auto" else backend not in ("unfused", "local")


def is_local(row: dict[str, Any]) -> bool:
    """Whether layers are Megatron's own."""
    return _choice(row, "transformer_impl", _IMPLEMENTATIONS[::-1]) == "local"


def _switch(row: dict[str, Any], key: str) -> bool:
    return row.get(key) is not None and checked(row[key], bool, key)


def _choice(row: dict[str, Any], key: str, values: tuple[str, ...]) -> str:
    """The value of ``key``, the first one where it has none; an enumeration's as Python prints it, too."""
    given = row.get(key)
    if given is None:
        return values[0]
    text = given.rpartition(".")[2] if isinstance(given, str) else given
    if text not in values:
        raise PlanError(f"{key} {given!r}: choose one of {', '.join(values)}")
    return text
