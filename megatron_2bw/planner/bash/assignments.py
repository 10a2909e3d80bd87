"""Variables that commands of a script set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_2bw.planner.bash.expand import Scope, Value, fields, text_of, unknown
from megatron_2bw.planner.bash.tokens import Token

DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_LOCAL = {"local", "declare", "typeset"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[.*?\]\+?=.*", re.DOTALL)


def assigns(token: Token) -> bool:
    return token.elements is not None or _ASSIGNMENT.fullmatch(token.text) is not None


def name_of(token: Token) -> str:
    """Of the variable that ``token`` assigns."""
    return token.text if token.elements is not None else _ASSIGNMENT.fullmatch(token.text)[1]


def assign(scope: Scope, parts: Sequence[Token]) -> None:
    for token in parts:
        if token.elements is not None:
            old = scope.values.get(token.text, []) if token.append else []
            scope.set(token.text, [*([old] if isinstance(old, str) else old), *_elements(scope, token)])
            continue
        name, append, raw = _ASSIGNMENT.fullmatch(token.text).groups()
        text, old = text_of(raw, scope), scope.get(name) if append else None
        scope.set(name, [old[0] + text, *old[1:]] if isinstance(old, list) and old else (old or "") + text)


def _elements(scope: Scope, token: Token) -> list[str]:
    """Of an array; unknown where they have keys, which are not followed."""
    if any(element.startswith("[") for element in token.elements):
        return [unknown(f"${{{token.text}}}")]
    return [word for element in token.elements for word in fields(element, scope)]


def assign_element(scope: Scope, word: str) -> bool:
    """Whether ``word`` assigns one element; the array is unknown then."""
    element = _ELEMENT.fullmatch(word)
    if element:
        scope.set(element[1], unknown(f"${{{element[1]}}}"))
    return element is not None


def declare(
    scope: Scope, words: Sequence[str], assigning: Sequence[Token], *, hidden: list[dict[str, Value | None]]
) -> None:
    """``export``, ``local`` and the like.

    Args:
        scope: to change.
        words: of the command, expanded.
        assigning: those of its words that are assignments.
        hidden: per function under way, what its local variables hide.
    """
    options = "".join(word[1:] for word in words[1:] if word.startswith("-"))
    bare = [word for word in words[1:] if not word.startswith("-") and _ASSIGNMENT.fullmatch(word) is None]
    names = {*bare, *map(name_of, assigning)}
    if hidden and words[0] in _LOCAL and "g" not in options:
        for name in names:
            hidden[-1].setdefault(name, scope.values.get(name))
        for name in bare:
            scope.values.pop(name, None)
    whole = set(map(name_of, assigning))
    for name, _, value in (found.groups() for word in words[1:] if (found := _ASSIGNMENT.fullmatch(word))):
        if name not in whole:  # Quoted as a whole, or out of a variable.
            scope.set(name, value)
            names.add(name)
    assign(scope, assigning)
    if words[0] == "export" or "x" in options:
        scope.exported = scope.exported - names if "n" in options else scope.exported | names
