"""``--pipeline-model-parallel-layout``: what each stage holds, read and checked as Megatron does.

Rules: ``PipelineParallelLayerLayout`` in ``megatron/core/transformer/pipeline_parallel_layer_layout.py``, and
``validate_args``. Stages are virtual ones, in the order of the model: with d ranks, stage i is a chunk of rank i % d.
"""

from __future__ import annotations

import re
from functools import lru_cache

from megatron_2bw.planner.errors import PlanError, Problem
from megatron_2bw.planner.multiples import nearest_divisor

EMBEDDING, LAYER, MTP, LOSS = SYMBOLS = "EtmL"
"""One layer of the decoder, and of those that predict further tokens, each."""
COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""What spreads embedding and loss as if they were layers."""
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
"""First what is in parentheses, which do not nest, then single symbols."""
_MOST = 10_000
"""Symbols that a repetition may give."""


@lru_cache(maxsize=256)
def stages_of(text: str) -> tuple[str, ...]:
    """The symbols of every stage.

    >>> stages_of("Et*2|(tt|)*2,m|L")
    ('Ett', 'tt', 'tt', 'm', 'L')

    Raises:
        PlanError: a symbol that Megatron does not know, or too many.
    """
    symbols = text.replace(",", "")
    for pattern in _REPEATED:
        symbols = pattern.sub(lambda found: _repeated(text, *found.groups()), symbols)
    for symbol in symbols:
        if symbol not in SYMBOLS + "|":
            raise PlanError(
                f"pipeline_layout {text!r}: {symbol!r} is no layer; write E (embedding), t (layer), m (further token) "
                "and L (loss), | between stages, and repetitions such as t*3 or (tt|)*3"
            )
    return tuple(symbols.split("|"))


def _repeated(text: str, symbols: str, times: str) -> str:
    if len(times) > len(str(_MOST)) or len(symbols) * int(times) > _MOST:
        raise PlanError(f"pipeline_layout {text!r}: *{times} gives too many layers; use at most {_MOST}")
    return symbols * int(times)


def chunks_of(text: str, pipeline: int) -> int:
    """Stages per rank.

    >>> chunks_of("Et|tt|tt|tL", 2)
    2

    Raises:
        PlanError: the stages do not split over the ranks.
    """
    stages = len(stages_of(text))
    if stages % pipeline:
        raise PlanError(
            Problem(
                f"pipeline_layout {text!r} has {stages} stages, no multiple of pipeline {pipeline}",
                f"use pipeline {nearest_divisor(stages, pipeline)}, or add or remove |",
            )
        )
    return stages // pipeline


def layout_text(first: int, each: int, last: int, *, mtp: int, stages: int) -> str:
    """At least 2 stages, of which those between the ends have ``each`` layers.

    >>> layout_text(3, 4, 2, mtp=1, stages=4)
    'Ettt|(tttt|)*2ttmL'
    """
    middle = f"({LAYER * each}|)*{stages - 2}" if stages > 2 else ""
    return f"{EMBEDDING}{LAYER * first}|{middle}{LAYER * last}{MTP * mtp}{LOSS}"


def counted_layout(layers: int, mtp: int, stages: int, *, embedding: bool, loss: bool) -> str:
    """Equal stages, of which the first counts the embedding as a layer, the last the loss; empty for one stage.

    Megatron's ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``, which do not
    count further predicted tokens: ``get_num_layers_to_build``.

    >>> counted_layout(6, 1, 4, embedding=True, loss=True), counted_layout(7, 0, 4, embedding=True, loss=False)
    ('Et|(tt|)*2tmL', 'Et|(tt|)*2ttL')

    Raises:
        PlanError: so many do not split over the stages.
    """
    counted = layers + embedding + loss
    if counted % stages:
        flags = " and ".join(flag for flag, on in zip(COUNTED, (embedding, loss), strict=True) if on)
        nearest = nearest_divisor(counted, stages)
        raise PlanError(
            f"{flags}: {stages} stages do not divide {counted} layers, as they are then counted; use {nearest}"
        )
    each = counted // stages
    return "" if stages == 1 else layout_text(each - embedding, each, each - loss, mtp=mtp, stages=stages)


def predicts_early(stages: tuple[str, ...]) -> bool:
    """Whether a stage before the last one predicts further tokens."""
    return any(MTP in stage for stage in stages[:-1])


def has_an_empty_stage(stages: tuple[str, ...]) -> bool:
    """Whether a stage between the first and the last has no weights."""
    return any(not {LAYER, MTP}.intersection(stage) for stage in stages[1:-1])


def layout_problem(text: str, *, pipeline: int, num_layers: int, mtp_num_layers: int) -> Problem | None:
    """Why a model cannot be spread like that; None if it can.

    >>> print(layout_problem("Ett|tL", pipeline=2, num_layers=4, mtp_num_layers=0))
    pipeline_layout 'Ett|tL' has 3 layers (t), not num_layers 4; use 4

    Raises:
        PlanError: ``text`` is none, or has stages that do not split over the ranks.
    """
    chunks_of(text, pipeline)
    stages = stages_of(text)
    order = "".join(stages)
    found = _ends_problem(order) or _counts_problem(order, num_layers, mtp_num_layers)
    found = found or _mtp_problem(stages, order, pipeline)
    return None if found is None else Problem(f"pipeline_layout {text!r} {found.reason}", found.remedy)


def _ends_problem(order: str) -> Problem | None:
    for what, end, at in ((EMBEDDING, "begin", 0), (LOSS, "end", -1)):
        if order[at:][:1] != what:
            return Problem(f"does not {end} with {what}", f"{end} it with {what}")
        if order.count(what) > 1:
            return Problem(f"has {order.count(what)} {what}", "leave one")
    return None


def _counts_problem(order: str, num_layers: int, mtp_num_layers: int) -> Problem | None:
    wanted = (LAYER, "num_layers", num_layers), (MTP, "mtp_num_layers", mtp_num_layers)
    for symbol, field, count in wanted:
        if order.count(symbol) != count:
            return Problem(f"has {order.count(symbol)} layers ({symbol}), not {field} {count}", f"use {count}")
    return None


def _mtp_problem(stages: tuple[str, ...], order: str, pipeline: int) -> Problem | None:
    holding = [index for index, stage in enumerate(stages) if MTP in stage]
    if not holding:
        return None
    if LAYER in order[order.index(MTP) :]:
        return Problem(f"has a layer ({LAYER}) behind {MTP}", f"put {MTP} behind the last {LAYER}")
    first_of_last_chunks = len(stages) - pipeline
    if holding[0] < first_of_last_chunks:
        return Problem(
            f"has {MTP} on stage {holding[0]}, which is not the last one of its rank",
            f"put {MTP} on one of the stages {first_of_last_chunks} to {len(stages) - 1}",
        )
    if holding[1:]:
        return Problem(f"has {MTP} on {len(holding)} stages", "put all of them on one")
    return None
