"""Keys of a row: fields of ours under all their names, and Megatron's arguments as the flags that set them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import DIST_MUON, MAIN_GRADIENTS, PRECISION_AWARE, STORED_IN
from megatron_2bw.planner.flags.argument_flags import NEGATED, flag_of
from megatron_2bw.planner.flags.flags import FIELDS, FP8_FORMATS, SPELLED, SWITCHES
from megatron_2bw.planner.papers.automatic import AUTO
from megatron_2bw.planner.specs.adam_state import TORCH_NAMES
from megatron_2bw.planner.specs.inputs import checked
from megatron_2bw.planner.specs.layout import Layout, Precision
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.spelling import attribute

OURS = {
    "global_batch_size": "global_batch",
    "data_parallel_size": "data",
    "pipeline_schedule": "schedule",
    "pipeline_model_parallel_layout": "pipeline_layout",
    "virtual_pipeline_model_parallel_size": "chunks",
    "world_size": "gpus",
    **{attribute(flag): name for flag, name in FIELDS.items()},
    "pp": "pipeline",
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "vp": "chunks",
    "vpp": "chunks",
    "sp": "sequence_parallel",
    "num_moe_experts": "num_experts",
    "dp": "data",
    "mbs": "microbatch",
    "gbs": "global_batch",
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "seq_len": "seq_length",
    "vocab": "vocab_size",
    "interleave_v": "chunks",
}
"""Our names for Megatron's, as its arguments spell them, and for those that tables of measurements have."""
_OF_RECOMPUTATION = ("recompute_granularity", "recompute_activations")
_MEGATRONS = {
    "num_query_groups": ("group_query_attention",),
    "ffn_hidden_size": ("moe_ffn_hidden_size", "moe_layer_freq"),
    "vocab_size": ("padded_vocab_size",),
    "recompute_modules": (*_OF_RECOMPUTATION, "moe_layer_recompute"),
    "recompute_method": _OF_RECOMPUTATION,
    "recompute_num_layers": _OF_RECOMPUTATION,
}
"""Names that mean what they do in Megatron where one of these is beside them."""
OF_PRECISION = ("bf16", "fp16", "fp32", "params_dtype")
_PRECISIONS = {"torch.bfloat16": Precision.BF16, "torch.float16": Precision.FP16, "torch.float32": Precision.FP32}
MODEL = {field.name for field in dataclasses.fields(Model) if field.name != "given_flags"}
LAYOUT = {field.name for field in dataclasses.fields(Layout) if field.name not in ("optimizer", "adam_state")}
"""Fields that a row may have. Megatron has more optimizers than ours; its flags say which one, and what it keeps."""
KEYS = {*MODEL, *LAYOUT, "optimizer", "adam_state", "model", "cluster", "nodes", "gpus"}
_NAMES_OF_VALUES = ("precision", "recompute", "recompute_granularity", "recompute_method", "fp8", "kind", "dispatcher")
"""Keys whose values tables have in capitals, too."""
_ALIKE = ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "add_position_embedding", "pad_vocab_size")
"""Arguments that no price depends on, with names that look like flags on which prices do."""
_MEMBER = re.compile(r"[A-Z]\w*\.(\w+)")
"""Of an enumeration, as Python prints it."""


def without(row: dict[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    """``row`` but the arguments that ``ignored`` flags set."""
    kept = {key: value for key, value in row.items() if not flags_that_set(key).intersection(ignored)}
    if any(key in row and key not in kept for key in OF_PRECISION):
        kept["precision"] = Precision.FP32  # As Megatron without them.
    return kept


def flags_that_set(key: str) -> set[str]:
    """Flags of Megatron that say what ``key`` does.

    >>> sorted(flags_that_set("tp")), flags_that_set("fp8")
    (['--tensor-model-parallel-size', '--tp'], {'--fp8-format'})
    """
    if key == "params_dtype":
        return {"--bf16", "--fp16"}
    names = {key, *(other for other, name in OURS.items() if name == OURS.get(key, key))}
    return {flag_of(name) for name in names}


def in_our_names(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``row`` as fields of ours, and what is left for Megatron's flags to say.

    Raises:
        PlanError: two keys contradict each other.
    """
    if row.get("use_layer_wise_distributed_optimizer") or row.get("optimizer") == DIST_MUON:
        row = {**row, "use_distributed_optimizer": True}  # Megatron says it in one of the two.
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def agree(name: str, value: Any, key: str) -> None:
        if sources.setdefault(name, key) == key:
            ours[name] = value
        elif ours[name] != value:
            raise PlanError(f"{key} {row[key]!r} and {sources[name]} {ours[name]} disagree; leave out one of them")

    for key, value in row.items():
        name = OURS.get(key, key)
        if name in _NAMES_OF_VALUES and isinstance(value, str):
            value = value.lower()
        if key == "fp8" and (isinstance(value, bool) or value in FP8_FORMATS):
            theirs[key] = FP8_FORMATS[0] if value is True else value
        elif key == "adam_state":
            theirs |= _stored(value, row)
        elif name not in KEYS or key == "optimizer" or any(other in row for other in _MEGATRONS.get(key, ())):
            theirs[key] = value
        elif name == "mixpipe_k" and value == AUTO:
            theirs[name] = value
        else:
            agree(name, value, key)
    for key, precision in _precisions(theirs):
        agree("precision", precision, key)
    if "recompute" in ours:
        for key in _OF_RECOMPUTATION:
            if theirs.get(key):
                agree("recompute", "selective" if theirs[key] is True else theirs[key], key)
    if "encoder_seq_length" in theirs:
        ours.setdefault("seq_length", theirs.pop("encoder_seq_length"))
    return ours, theirs


def _stored(adam_state: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Megatron's arguments for what `AdamState` has, as ``plan --json`` writes it."""
    if adam_state is None:
        return {}
    names = [*map(attribute, STORED_IN)]
    if not isinstance(adam_state, list | tuple) or len(adam_state) != len(names):
        raise PlanError(f"adam_state {adam_state!r}: give a list of what {', '.join(names)} are")
    said = {attribute(PRECISION_AWARE): True, **dict(zip(names, adam_state, strict=True))}
    for name, value in said.items():
        if row.get(name, value) != value:
            raise PlanError(f"{name} {row[name]!r} and adam_state {adam_state} disagree; leave out one of them")
    return said


def _precisions(theirs: dict[str, Any]) -> Iterator[tuple[str, Precision]]:
    """Of Megatron's arguments, which are taken out of the row, and the precision they ask for."""
    asked = [name for name in ("bf16", "fp16", "fp32") if name in theirs]
    on = [name for name in asked if checked(theirs.pop(name), bool, name)]
    if len(on) > 1:
        raise PlanError(f"{on[0]} and {on[1]} exclude each other; leave one out")
    if on or (asked and asked != ["fp32"]):
        yield (on or asked)[0], Precision(on[0]) if on else Precision.FP32
    if "params_dtype" in theirs:
        given = theirs.pop("params_dtype")
        if (precision := _PRECISIONS.get(f"torch.{str(given).removeprefix('torch.')}")) is None:
            raise PlanError(f"params_dtype {given!r}: choose one of {', '.join(_PRECISIONS)}")
        yield "params_dtype", precision


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
        flag = flag_of(key)
        if flag in SWITCHES:
            value = checked(value, bool, key)
        if flag in (MAIN_GRADIENTS, *STORED_IN):
            value = TORCH_NAMES.get(value, value) if isinstance(value, str) else value
        words = _words(not value if key in NEGATED else value)
        other, there = found.setdefault(flag, (key, words))
        if there != words and flag in SPELLED:
            raise PlanError(f"{other} and {key} disagree; leave out one of them")
    return {flag: words for flag, (_, words) in found.items() if words is not None}


def _words(value: Any) -> list[str] | None:
    """What is typed behind a flag; None where the flag is not given."""
    if isinstance(value, bool):
        return [] if value else None
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return value or None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    member = _MEMBER.fullmatch(str(value))
    return [member[1] if member else str(value)] if value != "" else None
