"""Keys and values of a row as Megatron's arguments have them, however a table spells them."""

from __future__ import annotations

import re
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.argument_flags import flag_of
from megatron_2bw.planner.flags.flags import SPELLED
from megatron_2bw.planner.rows.arguments import KEYS, OF_PRECISION, OURS
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Kind
from megatron_2bw.planner.spelling import attribute, misspelled
from megatron_2bw.schedule.registry import ALIASES, MEGATRON, SCHEDULES

_SAME = {"microbatches": "num_microbatches"}
_TEXTS = {"model", "cluster", "name"}
"""Keys whose values are texts, even if they look like numbers."""
_HEADINGS = {"Model", "Name", "Kind", "Data", "Context", "Schedule"}
"""What a table may have over remarks of its own."""
_SIZES = {
    "tensor": r"tensor(model)?parallel(ism)?(size|degree)?|tp(size|degree)",
    "pipeline": r"pipeline(model)?parallel(ism)?(size|degree)?|pp(size|degree)|(num)?pipelinestages|numstages",
    "context": r"contextparallel(ism)?(size|degree)?|cp(size|degree)",
    "expert": r"expert(model)?parallel(ism)?(size|degree)?|ep(size|degree)",
    "expert_tensor": r"experttensorparallel(ism)?(size|degree)?|etp(size|degree)",
    "data": r"dataparallel(ism)?(size|degree)?|dp(size|degree)",
    "chunks": r"virtualpipeline(parallel)?(size|stages)?|(num)?virtualstages|vpp?(size|degree)",
    "sequence_parallel": r"seq(uence)?parallel(ism)?",
    "gpus": r"(num|n|numberof|of)?gpus|gpucount|ngpu",
    "nodes": r"(num|n|numberof|of)?nodes|nodecount|nnode",
    "global_batch": r"globalbatch(size)?|trainbatchsize",
    "microbatch": r"microbatch(size)?|trainmicrobatchsizepergpu",
    "num_microbatches": r"(num|n|numberof|of)?microbatches",
    "seq_length": r"seq(uence)?len(gth)?",
    "num_layers": r"(num|n)?layers",
    "hidden_size": r"hidden(size|dim)",
    "num_attention_heads": r"(num|n)?(attention)?heads",
    "vocab_size": r"vocab(ulary)?size",
}
"""What tables call the sizes of a row, in small letters and digits without all else, over numbers."""
_UNCLEAR = re.compile(
    "b|batch(size)?|m|mp(size)?|modelparallel(ism)?(size)?|zero(stage|level)?|(activation|gradient)?checkpointing|"
    "recomputation|maxseq(uence)?len(gth)?|(num)?devices|depth|stages|trainbatch"
)
"""What a table could call a size or a choice of ours, and something else."""
_NOTHING_GIVEN = ("", "-", "n/a", "na")
"""What a table has where there is no value."""
_NUMBER = re.compile(r"[+-]?\d{1,30}(?:\.\d{0,30})?(?:e[+-]?\d{1,3})?")


def as_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """What ``row`` says, with keys as Megatron's arguments have them where they are flags or in capitals.

    >>> as_arguments({"--micro-batch-size": 2, "TP": "4", "Remark": "x", "vp": ""})
    {'micro_batch_size': 2, 'tp': 4, 'Remark': 'x'}

    Raises:
        PlanError: two keys contradict each other.
    """
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in row.items():
        if value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING_GIVEN):
            continue
        name = _name(key)
        if name not in _TEXTS:
            value = _meant(value)
        if name in _SIZES and name != _SAME.get(_spelled(key), _spelled(key)) and isinstance(value, str):
            raise PlanError(f"{key} {value!r}: give a number, or rename the key where it is a remark")
        if keys.setdefault(name, key) != key and found[name] != value:
            if _means_something(name):
                raise PlanError(f"{key} {value!r} and {keys[name]} {found[name]!r} disagree; leave out one of them")
            name = key
        found[name] = value
    return found


def _name(key: str) -> str:
    """What a key is called in Megatron's arguments, if it is one of them; or among our names, if it is a size.

    >>> _name("TP"), _name("# of GPUs"), _name("tensor_parallel"), _name("Context"), _name("tokens/s")
    ('tp', 'gpus', 'tensor', 'Context', 'tokens/s')
    """
    name = _spelled(key)
    if not _means_something(name):
        name = next((size for size, other in _SIZES.items() if re.fullmatch(other, _plain(key))), name)
    return _SAME.get(name, name)


def _spelled(key: str) -> str:
    name = attribute(key)
    return name.lower() if name.isupper() else name


def _plain(key: str) -> str:
    return re.sub("[^a-z0-9]", "", key.lower())


def _means_something(name: str) -> bool:
    if name in KEYS or name in OURS or name in OF_PRECISION or name in _SAME.values():
        return True
    return "--" + name.replace("_", "-") in SPELLED or flag_of(name) in SPELLED


def _is_an_answer(name: str, value: Any) -> bool:
    """Whether ``value`` could be meant as the ``name`` of a layout or a model."""
    if isinstance(value, str):
        return value.lower() in {"schedule": {MEGATRON, *SCHEDULES, *ALIASES}, "kind": set(Kind)}.get(name, ())
    return name in ("data", "context")


def _meant(value: Any) -> Any:
    """The number or truth value that a text is, where a table has become one of texts.

    >>> _meant("16"), _meant("1e2"), _meant("True"), _meant("16 GiB"), _meant(" E|t|L")
    (16, 100.0, True, '16 GiB', 'E|t|L')
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text.lower()):
        return float(text) if set(".eE") & set(text) else int(text)
    return text


def unclear(row: dict[str, Any]) -> list[str]:
    """A note per key that may say what nothing here reads.

    >>> unclear({"zero_stage": 1, "mp": 4, "tp": 2, "tokens_per_s": 3.5})
    ['zero_stage: nothing here reads it', 'mp: nothing here reads it']
    """
    unread = (key for key in row if not _means_something(key))
    return [f"{key}: nothing here reads it" for key in unread if _UNCLEAR.fullmatch(_plain(key))]


def check_spelling(row: dict[str, Any]) -> None:
    """Whether a key looks like one that means something.

    Raises:
        PlanError: it does.
    """
    for key in row.keys() - KEYS:
        name = _name(key.lower())
        is_remark = key in _HEADINGS and not _is_an_answer(name, row[key])
        if name != key and not is_remark and _means_something(name):
            raise PlanError(f"unknown key {key!r}; did you mean {name!r}?")
        is_spelled = _means_something(key) or hasattr(Layout, key)
        nearest = None if is_spelled else misspelled(key, KEYS - {"name"})
        if nearest is not None and nearest not in row:
            raise PlanError(f"unknown key {key!r}; did you mean {nearest!r}?")
