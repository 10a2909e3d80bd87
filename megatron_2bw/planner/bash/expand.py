"""What a word becomes when bash expands it."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_2bw.planner.bash.braces import braces
from megatron_2bw.planner.bash.folders import FINDS, printed
from megatron_2bw.planner.bash.patterns import matches
from megatron_2bw.planner.bash.scope import (
    GONE,
    Scope,
    Value,
    count,
    element,
    is_gone,
    is_known,
    settled,
    shown,
    unknown,
    unset,
)
from megatron_2bw.planner.bash.syntax import sequence
from megatron_2bw.planner.bash.tokens import part_end

_PARAMETER = re.compile(
    r"(?P<length>#(?=.))?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^]]*)\])?(?P<change>.*)", re.DOTALL
)
_DEFAULT = re.compile(r"(?P<empty_too>:?)(?P<operator>[-=+?])(?P<word>.*)", re.DOTALL)
_SUBSTRING = re.compile(r":([^:?]+)(?::([^:?]+))?")
_COMMENT = re.compile(r"\s*(?:#[^\n]*)?\s*")
"""A command that does nothing, which explains lines of a longer one."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_ROOT = re.compile(r" from [A-Za-z_]\w*=.*", re.DOTALL)
"""Where what is unknown comes from."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}


class _Piece(NamedTuple):
    """What a part of a word becomes."""

    value: Value
    quoted: bool = False
    splits: bool = False
    """At blanks, into words."""


def fields(raw: str, scope: Scope) -> list[str]:
    """The words that ``raw`` becomes.

    >>> scope = Scope(values={"ARGS": ["--bf16", "--lr"], "TP": "8", "X": "a b"})
    >>> fields('${ARGS[@]}', scope), fields('$X"$X"$TP', scope), fields('"${DP:-$((TP/2))}"', scope)
    (['--bf16', '--lr'], ['a', 'ba b8'], ['4'])
    """
    return [word for one in braces(raw) for word in _split(_pieces(one, scope), scope)]


def _split(pieces: Iterator[_Piece], scope: Scope) -> list[str]:
    words: list[str] = []
    grows = False
    for value, _, splits in pieces:
        if splits and scope.get("IFS") in (None, " \t\n"):
            text = " ".join(value) if isinstance(value, list) else value
            parts, starts, ends = text.split(), text[:1].isspace(), text[-1:].isspace()
        elif splits:
            values = value if isinstance(value, list) else [value]
            parts, starts, ends = [_separated(one, scope) for one in values if one], False, False
        else:
            parts, starts, ends = value if isinstance(value, list) else [value], False, False
        if splits:
            parts = [part if is_known(part) or settled(part) != "" else part + GONE for part in parts]
        grows = grows and not starts
        for index, part in enumerate(parts):
            if grows and index == 0:
                drops = is_gone(words[-1]) and is_gone(part)
                words[-1] = (words[-1] + part) if drops else (words[-1] + part).replace(GONE, "")
            else:
                words.append(part)
        grows = not ends if parts else grows
    return words


def _separated(text: str, scope: Scope) -> str:
    """``text`` where IFS is set; unknown where that separates words in it, which is not followed."""
    return unknown(text) if set(text) & set(scope.get("IFS") or "") or not is_known(text) else text


def text_of(raw: str, scope: Scope) -> str:
    """What ``raw`` becomes where it is not split into words, as in an assignment."""
    return "".join(_text(piece.value) for piece in _pieces(raw, scope)).replace(GONE, "")


def pattern_of(raw: str, scope: Scope, escape: Callable[[str], str] = glob.escape) -> str:
    """The pattern that ``raw`` becomes; quoted characters stand for themselves."""
    return "".join(escape(_text(piece.value)) if piece.quoted else _text(piece.value) for piece in _pieces(raw, scope))


def regex_of(raw: str, scope: Scope) -> str:
    """The regular expression that ``raw`` becomes."""
    return pattern_of(raw, scope, re.escape)


def document_of(raw: str, scope: Scope) -> str:
    """What the text of a here-document becomes; quotes are no special characters there."""
    raw = re.sub(r'\\([\\$`\n])|\\"', lambda found: found[0] if found[1] else '\\\\"', raw)
    return "".join(_text(piece.value) for piece in _pieces(raw, scope, quoted=True))


def compute(expression: str, scope: Scope) -> int | None:
    """Value of ``(( expression ))``, whose assignments are done; None, also in what it assigns, where it is unknown."""
    pieces = _pieces(expression, scope, quoted=True)
    return scope.compute("".join(_text(piece.value) for piece in pieces).replace('"', "").replace(GONE, ""))


def _text(value: Value, between: str = " ") -> str:
    """One word, also of several; one that is unknown stands for as many as it may be."""
    return value if isinstance(value, str) else between.join(itertools.filterfalse(is_gone, value))


def _pieces(raw: str, scope: Scope, *, quoted: bool = False, splits: bool = False) -> Iterator[_Piece]:
    """What the parts of ``raw`` become; with ``splits``, blanks outside of quotes separate words."""
    special = "\\`$\x01\x02" + ("" if quoted else "'\"")
    at = 0
    if not quoted and raw[:1] == "~":
        at = next((index for index, character in enumerate(raw) if character in "/:" or character in special), len(raw))
        home = scope.get("HOME") if at == 1 else None
        yield _Piece(unknown(raw[:at]) if home is None else home, quoted=True)
    while at < len(raw):
        if raw[at] not in special or (quoted and raw.startswith("$'", at)):
            end = next((index for index in range(at + 1, len(raw)) if raw[index] in special), len(raw))
            yield _Piece(raw[at:end], quoted, splits)
        else:
            end = part_end(raw, at)
            yield from _special(raw[at:end], scope, quoted=quoted)
        at = end


def _special(part: str, scope: Scope, *, quoted: bool) -> Iterator[_Piece]:
    match part[0]:
        case "\\" if part[1:] == "\n" and not quoted:
            return  # The line goes on.
        case "\\":
            character = part[1:]
            kept = quoted and character not in '$`"\\\n'
            yield _Piece("" if character == "\n" else part if kept or not character else character, quoted=True)
        case "'":
            yield _Piece(part[1:-1], quoted=True)
        case '"':
            yield from _pieces(part[1:-1], scope, quoted=True) if part[1:-1] else [_Piece("", quoted=True)]
        case "\x01" | "\x02":
            yield _Piece(part, quoted, not quoted)
        case "`":
            yield _Piece("" if _COMMENT.fullmatch(part[1:-1]) else _output(part, scope), quoted, not quoted)
        case _ if part.startswith("$'"):
            yield _Piece(_unescaped(part), quoted=True)
        case _:
            value = _parameter(part, scope) if part.startswith("${") else _expansion(part, scope)
            if isinstance(value, _Default):
                word = re.sub(r'(\\.)|"', r"\1", value.word, flags=re.DOTALL) if quoted else value.word
                yield from _pieces(word, scope, quoted=quoted, splits=not quoted)
            else:
                yield _Piece(_joined(part, value, scope) if quoted else value, quoted, not quoted)


def _unescaped(part: str) -> str:
    """The text of ``$'...'``."""
    escapes = re.findall(r"\\(.)", part, re.DOTALL)
    if not set(escapes) <= _ESCAPES.keys():
        return unknown(part)
    return re.sub(r"\\(.)", lambda found: _ESCAPES[found[1]], part[2:-1], flags=re.DOTALL)


def _joined(part: str, value: Value, scope: Scope) -> Value:
    """``"$*"`` and ``"${A[*]}"`` are one word."""
    is_one = part.startswith(("$*", "${*")) or "[*]" in part
    if not is_one or isinstance(value, str):
        return value
    between = scope.get("IFS")
    return _text(value, " " if between is None else between[:1])


def _expansion(part: str, scope: Scope) -> Value:
    if (part.startswith("$((") and part.endswith("))")) or part.startswith("$["):
        number = compute(part[3:-2] if part.startswith("$((") else part[2:-1], scope)
        return _derived(part, scope) if number is None else str(number)
    if part.startswith("$("):
        return _output(part, scope)
    if part == "$":
        return part
    value = scope.seek(part[1:])
    if isinstance(value, list) and part[1:] not in ("@", "*"):
        value = value[0] if value else None
    return unset(part) if value is None else value


def _derived(part: str, scope: Scope) -> str:
    """A stand-in for what ``part`` makes of variables that are unknown; names the one at their root."""
    for name in _NAME.findall(part):
        value = scope.values.get(name, "")
        text = value if isinstance(value, str) else " ".join(value)
        if settled(text) is None:
            found = _ROOT.search(shown(text))
            return unknown(part + (found[0] if found else f" from {name}={shown(text)}"))
    return unknown(part)


def _output(part: str, scope: Scope) -> str:
    """What the command within ``$(...)`` or backquotes prints; known where that is a folder of the script."""
    text, inner = part.removeprefix("$")[1:-1], scope.copy()
    commands = sequence(text) if FINDS.match(text) else []
    found = [[word for token in command.words for word in fields(token.text, inner)] for command in commands]
    is_plain = commands and all(words and all(map(is_known, words)) for words in found)
    value = printed(found, scope.here()) if is_plain else None
    return unknown(part) if value is None else value


class _Default(NamedTuple):
    """What stands in for a parameter that is not set, as written."""

    word: str


def _parameter(part: str, scope: Scope) -> Value | _Default:
    """Value of ``${...}``."""
    parameter = _PARAMETER.fullmatch(part[2:-1])
    if parameter is None or (parameter["name"] == "!" and parameter["change"]):
        return unknown(part)
    value = _element(scope.seek(parameter["name"]), parameter, scope)
    if parameter["length"]:
        return count("" if value is None else value) or _derived(part, scope)
    change = parameter["change"]
    if default := _DEFAULT.fullmatch(change):
        return _defaulted(value, default, parameter["name"], scope)
    if value is None:
        return unset(part) + GONE * (parameter["index"] == "@")
    if not change:
        return value
    changed = _changed(value, change, scope) if isinstance(value, str) and is_known(value) else None
    return _derived(part, scope) if changed is None else changed


def _element(value: Value | None, parameter: re.Match[str], scope: Scope) -> Value | None:
    index = parameter["index"]
    if index in ("@", "*") or (index is None and parameter["name"] in ("@", "*")):
        return [value] if isinstance(value, str) else value
    if value is None or (index is None and isinstance(value, str)):
        return value
    position = compute(index, scope) if index else 0
    if position is None:
        return unknown(f"${{{parameter[0]}}}")
    return element([value] if isinstance(value, str) else value, position, f"${{{parameter[0]}}}")


def _defaulted(value: Value | None, default: re.Match[str], name: str, scope: Scope) -> Value | _Default:
    text = value if isinstance(value, str) else "".join((value or [])[:2])
    is_set = value not in (None, []) and not (default["empty_too"] and settled(text) == "")
    match default["operator"]:
        case "+" if is_set and count(value) is None:
            return unknown(f"${{{name}{default[0]}}}")
        case "+":
            return _Default(default["word"] if is_set else "")
        case "?":
            return value if is_set else unset(f"${name}")
    if is_set:
        return value
    if default["operator"] == "=":
        scope.set(name, text_of(default["word"], scope))
    return _Default(default["word"])


def _changed(value: str, change: str, scope: Scope) -> str | None:
    """``value`` without a beginning or end, in the other case, replaced or cut; None for other changes."""
    if change[0] in "#%":
        return _cut(value, change, scope)
    if change in ("^^", ",,"):
        return value.upper() if change == "^^" else value.lower()
    if change[0] == "/":
        everywhere = change[1:2] == "/"
        raw, *new = re.split(r"(?<!\\)/", change[1 + everywhere :], maxsplit=1)
        old, new = text_of(raw, scope), text_of("".join(new), scope)
        is_plain = old and is_known(old + new) and not set(pattern_of(raw, scope)) & set("*?[") and old[0] not in "#%"
        return value.replace(old, new, -1 if everywhere else 1) if is_plain and "&" not in new else None
    if substring := _SUBSTRING.fullmatch(change):
        start, length = (compute(one or str(len(value)), scope) for one in substring.groups())
        if start is not None and length is not None and length >= 0:
            return value[start:][:length] if start >= -len(value) else ""
    return None


def _cut(value: str, change: str, scope: Scope) -> str | None:
    """``value`` without what a pattern matches at its beginning or end."""
    greedy = change[1:2] == change[0]
    pattern = pattern_of(change[1 + greedy :], scope)
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if greedy else lengths:
        at = length if change[0] == "#" else len(value) - length
        parts = value[:at], value[at:]
        cut, rest = parts if change[0] == "#" else parts[::-1]
        found = matches(cut, pattern)
        if found is not False:
            return rest if found else None
    return value
