"""Which layers have experts, in the notation of ``--moe-layer-freq``."""

from __future__ import annotations

import ast
import re
from itertools import takewhile

from megatron_2bw.planner.errors import PlanError

_FREQUENCY = "--moe-layer-freq"
_MOST = 10_000
"""Layers of a pattern."""
_OTHERS = re.compile(r"[^\d\[\](),+*]")
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")


def pattern_of(dense: int, layers: int) -> str:
    """So many layers without experts, the others with.

    >>> pattern_of(3, 61)
    '([0]*3+[1]*58)'
    """
    return f"([0]*{dense}+[1]*{layers - dense})"


def dense_first(text: str, layers: int) -> int:
    """How many layers have no experts, if those are the first ones.

    Args:
        text: N, where every N-th layer has experts, or sums and products of lists: Megatron's ``moe_freq_type``.
        layers: that the pattern has to have.

    >>> dense_first("([0]*3+[1]*58)", 61), dense_first("1", 61)
    (3, 0)

    Raises:
        PlanError: the pattern is malformed, has another number of layers, or other layers are dense.
    """
    kinds = _kinds(text)
    if isinstance(kinds, int):
        if kinds == 1:
            return 0
        raise PlanError(
            f"{_FREQUENCY} {text}: the cost model covers dense layers only in front of all experts; give such a "
            "pattern, such as ([0]*1+[1]*23), or 1"
        )
    if len(kinds) != layers:
        raise PlanError(f"{_FREQUENCY} {text}: a pattern of {len(kinds)} layers, and there are {layers}; give {layers}")
    dense = sum(1 for _ in takewhile(lambda kind: kind == 0, kinds))
    if dense == len(kinds):
        raise PlanError(f"{_FREQUENCY} {text}: no layer has experts; leave out the experts")
    if any(kind != 1 for kind in kinds[dense:]):
        raise PlanError(
            f"{_FREQUENCY} {text}: the cost model covers dense layers only in front of all experts; give "
            f"{pattern_of(kinds.count(0), len(kinds))} in its place"
        )
    return dense


def has_experts(frequency: str | float | list[int], layers: int) -> list[bool]:
    """Of so many layers, those with experts.

    >>> has_experts("([0]*1+[1]*2)", 3), has_experts(2, 3)
    ([False, True, True], [True, False, True])

    Args:
        frequency: Megatron's, read or not.
        layers: that a number is for; a pattern has its own.

    Raises:
        PlanError: the pattern is malformed.
    """
    kinds = _kinds(frequency) if isinstance(frequency, str) else frequency
    if isinstance(kinds, list):
        return [kind == 1 for kind in kinds]
    return [layer % max(int(kinds), 1) == 0 for layer in range(layers)]


def _kinds(text: str) -> int | list[int]:
    words = text.replace(" ", "")
    problem = PlanError(f"{_FREQUENCY} {text}: give a whole number, or a pattern such as ([0]*3+[1]*58)")
    if _OTHERS.search(words):
        raise problem
    try:
        value = _value(ast.parse(_LEADING_ZEROS.sub("", words), mode="eval").body)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise problem from error
    if isinstance(value, list) != ("[" in words):
        raise problem
    return value


def _value(node: ast.expr) -> int | list[int]:
    """Of a number, a list of numbers, a sum or a product.

    Raises:
        TypeError: it is none of these, or adds or multiplies what does not go together.
        ValueError: it has too many layers.
    """
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.List(elements):
            values = list(map(_value, elements))
            if all(isinstance(value, int) for value in values):
                return values
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            factors = [_value(left), _value(right)]
            size = max(len(one) if isinstance(one, list) else 1 for one in factors)
            times = min((one for one in factors if isinstance(one, int)), default=1)
            if size * times > _MOST:
                raise ValueError("too many layers")
            return factors[0] * factors[1]
    raise TypeError(node)
