"""Whole-number arithmetic of bash."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

_TOKEN = re.compile(
    r"0[xX][0-9a-fA-F]+|\d+(?![\w#])|[A-Za-z_]\w*(?!\w*\s*\[)"
    r"|<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&^|]=|[-+*/%<>=!~&^|?:(),]"
)
_CHANGED = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))")
_ASSIGNING = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "^=", "|=", "<<=", ">>="}
_BY_PRECEDENCE = (
    {","},
    _ASSIGNING,
    {"?"},
    {"||"},
    {"&&"},
    {"|"},
    {"^"},
    {"&"},
    {"==", "!="},
    {"<", "<=", ">", ">="},
    {"<<", ">>"},
    {"+", "-"},
    {"*", "/", "%"},
    {"**"},
)
_PRECEDENCE = {sign: level for level, signs in enumerate(_BY_PRECEDENCE, start=1) for sign in signs}
_FROM_THE_RIGHT = {*_ASSIGNING, "?", "**"}


def _quotient(dividend: int, divisor: int) -> int:
    """Rounded towards zero, as in C."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


def _power(base: int, exponent: int) -> int:
    """``base ** exponent`` in bash's 64 bits.

    Raises:
        ValueError: bash refuses it, or it has more than 64 bits.
    """
    if not 0 <= exponent < 64:
        raise ValueError(exponent)
    return base**exponent


_BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda dividend, divisor: dividend - divisor * _quotient(dividend, divisor),
    "**": _power,
    "<<": lambda number, places: number * _power(2, places),
    ">>": lambda number, places: number // _power(2, places),
    "&": operator.and_,
    "^": operator.xor,
    "|": operator.or_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    ",": lambda _, last: last,
}
_UNARY: dict[str, Callable[[int], int]] = {
    "+": operator.pos,
    "-": operator.neg,
    "~": operator.invert,
    "!": operator.not_,
}
_Node = int | str | tuple
"""A number, a name, or a sign with its operands."""


def evaluate(
    expression: str, variable: Callable[[str], int | None], assign: Callable[[str, str], object]
) -> int | None:
    """Value of ``expression``, its ``$`` filled in; None if it is not known or not understood.

    Args:
        expression: of whole numbers and names.
        variable: value of a name.
        assign: what to do with a name and its new value.

    >>> evaluate("(nodes * 8) / 3", {"nodes": 2}.get, print)
    5
    >>> evaluate("i++ ? j += 2 : 0", {"i": 1, "j": 3}.get, print)
    i 2
    j 5
    5
    """
    signs = _TOKEN.findall(expression)
    fails_unused = "**" in signs and {"&&", "||", "?"} & set(
        signs
    )  # A negative exponent fails even in what is skipped.
    if fails_unused or "".join(signs) != re.sub(r"\s", "", expression):
        return None
    try:
        return _Values(variable=variable, assign=assign).of(_Parser(signs).whole()) if signs else 0
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


def changed(expression: str) -> list[str]:
    """Names to which ``expression`` may give a value."""
    return ["".join(names) for names in _CHANGED.findall(expression)]


class _Parser:
    """Of the signs of an expression; each method raises ValueError where it is malformed."""

    def __init__(self, signs: list[str]) -> None:
        self.signs = signs[::-1]

    def whole(self) -> _Node:
        node = self.binary(1)
        if self.signs:
            raise ValueError(self.signs)
        return node

    def peek(self) -> str:
        return self.signs[-1] if self.signs else ""

    def next(self, wanted: str = "") -> str:
        if not self.signs or (wanted and self.signs[-1] != wanted):
            raise ValueError(wanted)
        return self.signs.pop()

    def binary(self, lowest: int) -> _Node:
        """An expression of operators that bind at least as tightly as ``lowest``."""
        left = self.unary()
        while (level := _PRECEDENCE.get(self.peek(), 0)) >= lowest:
            sign = self.next()
            if sign == "?":
                middle = self.binary(1)
                self.next(":")
                left = (sign, left, middle, self.binary(level))
            else:
                left = (sign, left, self.binary(level if sign in _FROM_THE_RIGHT else level + 1))
        return left

    def unary(self) -> _Node:
        sign = self.next()
        if sign in _UNARY:
            return sign, self.unary()
        if sign in ("++", "--"):
            return f"{sign[0]}=", self.next(), 1
        if sign == "(":
            inside = self.binary(1)
            self.next(")")
            return inside
        if sign[0].isdigit():
            return int(sign, 8 if sign.isdigit() and sign[0] == "0" else 0)
        if self.peek() in ("++", "--"):
            return "after", sign, self.next()
        return sign


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    variable: Callable[[str], int | None]
    assign: Callable[[str, str], object]

    def of(self, node: _Node) -> int:
        """Value of a node.

        Raises:
            ValueError: it is not known, or has more than 64 bits.
        """
        value = node if isinstance(node, int) else self.name(node) if isinstance(node, str) else self.operation(*node)
        if not -(2**63) <= value < 2**63:
            raise ValueError(value)
        return int(value)

    def name(self, name: str) -> int:
        value = self.variable(name) if name.isidentifier() else None
        if value is None:
            raise ValueError(name)
        return value

    def operation(self, sign: str, *operands: _Node) -> int:
        match sign, *operands:
            case "?", condition, first, second:
                return self.of(first if self.of(condition) else second)
            case "&&", left, right:
                return bool(self.of(left) and self.of(right))
            case "||", left, right:
                return bool(self.of(left) or self.of(right))
            case "after", str(name), str(step):
                return self.set(name, self.name(name), _BINARY[step[0]](self.name(name), 1))
            case "=", str(name), right:
                value = self.of(right)
                return self.set(name, value, value)
            case _, str(name), right if sign in _ASSIGNING:
                value = _BINARY[sign[:-1]](self.name(name), self.of(right))
                return self.set(name, value, value)
            case _, operand:
                return _UNARY[sign](self.of(operand))
            case _, left, right if sign in _BINARY:
                return _BINARY[sign](self.of(left), self.of(right))
        raise ValueError(sign)

    def set(self, name: str, value: int, new: int) -> int:
        """Assign ``new``; returns ``value``."""
        if not name.isidentifier():
            raise ValueError(name)
        self.assign(name, str(new))
        return value
