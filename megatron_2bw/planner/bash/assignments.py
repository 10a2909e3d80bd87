"""Variables that commands of a script set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_2bw.planner.bash.expand import compute, fields, text_of
from megatron_2bw.planner.bash.scope import Scope, Value, count, unknown
from megatron_2bw.planner.bash.tokens import Token

Hidden = dict[str, tuple[Value | None, bool]]
"""Values of variables, and whether they are exported, that others of the same name hide."""
DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_LOCAL = {"local", "declare", "typeset"}
_KEYED = re.compile(r"\[[^]]*\]\+?=")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[.*?\])?(\+?)=(.*)", re.DOTALL)


def assigns(token: Token) -> bool:
    return token.elements is not None or _ASSIGNMENT.fullmatch(token.text) is not None


def name_of(token: Token) -> str:
    """Of the variable that ``token`` assigns."""
    return token.text if token.elements is not None else _ASSIGNMENT.fullmatch(token.text)[1]


def assign(scope: Scope, parts: Sequence[Token], *, at_once: bool = False) -> None:
    """One after the other, or ``at_once``, as the words of a command."""
    expanded = ((token, _value(scope, token)) for token in parts)
    for token, value in list(expanded) if at_once else expanded:
        name, old = name_of(token), scope.get(name_of(token))
        _, element, append, _ = _ASSIGNMENT.fullmatch(token.text).groups() if token.elements is None else [""] * 4
        if element:
            compute(element[1:-1], scope)  # It may assign, too.
        if isinstance(value, list):
            before = old if token.append and old is not None else []
            scope.set(name, [*([before] if isinstance(before, str) else before), *value])
        elif element or (isinstance(old, list) and count(old) is None):
            scope.set(name, [unknown(f"${{{name}}}")])
        elif isinstance(old, list):
            scope.set(name, [(old[0] if append and old else "") + value, *old[1:]])
        else:
            scope.set(name, (old or "") + value if append else value)


def _value(scope: Scope, token: Token) -> Value:
    """What ``token`` assigns; unknown where it is an array with keys, which are not followed."""
    if token.elements is None:
        return text_of(_ASSIGNMENT.fullmatch(token.text)[4], scope)
    if any(map(_KEYED.match, token.elements)):
        return [unknown(f"${{{token.text}}}")]
    return [word for element in token.elements for word in fields(element, scope)]


def hide(scope: Scope, hidden: Hidden, name: str) -> None:
    hidden.setdefault(name, (scope.values.get(name), name in scope.exported))


def declare(scope: Scope, words: Sequence[str], assigning: Sequence[Token], *, hidden: Sequence[Hidden]) -> None:
    """``export``, ``local`` and the like.

    Args:
        scope: to change.
        words: of the command, expanded, without ...
        assigning: ... those that are assignments.
        hidden: per function under way, what its local variables hide.
    """
    options = "".join(word[1:] for word in words[1:] if word[:1] in ("-", "+"))
    if "f" in options and words[0] != "export":
        return
    operands = [word for word in words[1:] if word[:1] not in ("-", "+")]
    quoted = [found for word in operands if (found := _ASSIGNMENT.fullmatch(word))]
    bare = {word for word in operands if _ASSIGNMENT.fullmatch(word) is None}
    names = {*bare, *(found[1] for found in quoted), *map(name_of, assigning)}
    is_local = hidden and words[0] in _LOCAL and "g" not in options
    for name in names if is_local else ():
        hide(scope, hidden[-1], name)
    for name in bare if is_local else ():
        scope.unset(name)
    for found in quoted:
        scope.set(found[1], unknown(found[0]) if found[2] or found[3] else found[4])
    assign(scope, assigning, at_once=True)
    for name in names if set(options) & set("iulA") and words[0] != "export" else ():
        scope.set(name, [unknown(f"${{{name}}}")])  # They change what is assigned, now and later.
    if words[0] == "export" or "x" in options:
        scope.exported = scope.exported - names if "n" in options else scope.exported | names
