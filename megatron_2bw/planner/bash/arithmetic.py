"""Whole-number arithmetic of bash."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable


def _quotient(dividend: int, divisor: int) -> int:
    """Rounded towards zero, as in C."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _quotient,
    ast.Mod: lambda dividend, divisor: dividend - divisor * _quotient(dividend, divisor),
    ast.Pow: lambda base, exponent: base**exponent if 0 <= exponent < 64 else 0,
    ast.LShift: lambda number, places: number << places if 0 <= places < 64 else 0,
    ast.RShift: lambda number, places: number >> places if 0 <= places < 64 else 0,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SPELLINGS = (("&&", " and "), ("||", " or "), ("/", "//"))


def evaluate(expression: str, variable: Callable[[str], int | None]) -> int | None:
    """Value of ``expression``, its ``$`` filled in; None if it is not known or not understood.

    Args:
        expression: of numbers, names, ``+ - * / % ** << >>``, comparisons, ``&& || !`` and brackets.
        variable: value of a name.

    >>> evaluate("(nodes * 8) / 3", {"nodes": 2}.get)
    5
    """
    for bash, python in _SPELLINGS:
        expression = expression.replace(bash, python)
    expression = re.sub(r"!(?!=)", " not ", expression)
    expression = re.sub(r"\b0+(?=\d)", "", expression).strip()
    if not expression:
        return 0
    try:
        return _value(ast.parse(expression, mode="eval").body, variable)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr, variable: Callable[[str], int | None]) -> int:
    """Value of a node.

    Raises:
        ValueError: it is not known or not understood.
    """
    match node:
        case ast.Constant(value=int(value)):
            return int(value)
        case ast.Name(id=name):
            value = variable(name)
            if value is not None:
                return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, variable)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, variable))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, variable), _value(right, variable))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return int(_COMPARE[type(op)](_value(left, variable), _value(right, variable)))
        case ast.BoolOp(op=op, values=operands):
            values = [bool(_value(operand, variable)) for operand in operands]
            return int(all(values) if isinstance(op, ast.And) else any(values))
    raise ValueError(ast.unparse(node))
