"""Variables of a script, and what a word becomes when they are filled in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron_2bw.planner.bash.arithmetic import evaluate
from megatron_2bw.planner.bash.tokens import part_end

Value = str | list[str]

_PARAMETER = re.compile(
    r"(?P<length>#(?=.))?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^]]*)\])?(?P<change>.*)", re.DOTALL
)
_DEFAULT = re.compile(r"(?P<empty_too>:?)(?P<operator>[-=+?])(?P<word>.*)", re.DOTALL)
_SUBSTRING = re.compile(r":\s*(?P<start>\d+|\s-\d+)(?::(?P<length>\d+))?")
_STEP = re.compile(
    r"\s*(?:(?P<before>\+\+|--)\s*(?=\w+\s*$))?(?P<name>[A-Za-z_]\w*)\s*"
    r"(?(before)|(?:(?P<after>\+\+|--)|(?P<operator>[-+*/%]|<<|>>|)=(?!=)(?P<value>.*)))\s*",
    re.DOTALL,
)
"""An assignment within arithmetic."""
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))")
"""A name that arithmetic gives a value."""
_UNKNOWN, _UNSET, _END, _BLANK = "\x01", "\x02", "\x03", "\x04"
"""Before what cannot be known without running the script and before what nothing sets; after both; a blank in them."""


def unknown(text: str) -> str:
    """A stand-in for the value of ``text``, which only running it would tell; stays one word."""
    return _UNKNOWN + re.sub(r"\s", _BLANK, text) + _END


def unset(text: str) -> str:
    """A stand-in for the value of ``text``, which nothing sets."""
    return _UNSET + re.sub(r"\s", _BLANK, text) + _END


def is_known(value: str) -> bool:
    """Whether ``value`` has no part that is unknown or not set."""
    return _UNKNOWN not in value and _UNSET not in value


def settled(value: str) -> str | None:
    """``value`` as bash sees it, with nothing for what is not set; None where it is unknown.

    >>> settled("a" + unset("$B")), settled("a" + unknown("$(b)"))
    ('a', None)
    """
    return None if _UNKNOWN in value else re.sub(f"{_UNSET}[^{_END}]*{_END}", "", value)


def shown(value: str) -> str:
    """``value`` for a message, what is not known as the script writes it.

    >>> shown("--save" + unknown("$(date)"))
    '--save$(date)'
    """
    return re.sub(f"[{_UNKNOWN}{_UNSET}{_END}]", "", value).replace(_BLANK, " ")


@dataclass(slots=True, kw_only=True)
class Scope:
    """Variables at one point of a script."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Where a script does not set a variable."""
    values: dict[str, Value] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    """``$1``, ``$2``, ...; the script's own name is ``$0``."""
    script: str = "bash"
    exported: set[str] = field(default_factory=set)
    """Variables and functions that other programs get, besides those of the environment."""
    exports_all: bool = False
    """Whatever is set from now on: ``set -a``."""

    def get(self, name: str) -> Value | None:
        """Value of ``name``; None where nothing sets it."""
        if name in self.values:
            return self.values[name]
        if name in ("@", "*"):
            return list(self.positional)
        if name.isdigit():
            index = int(name)
            arguments = [self.script, *self.positional]
            return arguments[index] if index < len(arguments) else None
        fixed = {"#": _count(self.positional) or unknown("$#"), "?": "0", "BASH_SOURCE": self.script}
        return fixed.get(name, self.environment.get(name))

    def set(self, name: str, value: Value) -> None:
        self.values[name] = value
        if self.exports_all:
            self.exported.add(name)

    def unset(self, name: str) -> None:
        self.values.pop(name, None)
        self.environment = {known: value for known, value in self.environment.items() if known != name}
        self.exported.discard(name)

    def copy(self) -> Scope:
        """For a subshell, whose changes end with it."""
        return replace(self, values=dict(self.values), positional=list(self.positional), exported=set(self.exported))

    def sent(self) -> dict[str, str]:
        """What other programs get; bash sends them no arrays."""
        sent = self.exported | self.environment.keys()
        own = {name: value for name, value in self.values.items() if name in sent and isinstance(value, str)}
        return {**self.environment, **own}

    def number(self, name: str) -> int | None:
        """Whole number in ``name``, 0 where it is not set, as in arithmetic."""
        value = self.get(name)
        text = "0" if value is None else value if isinstance(value, str) else "".join(value[:1])
        return evaluate(text, self.number) if is_known(text) and text != name else None


def fields(raw: str, scope: Scope) -> list[str]:
    """The words that ``raw`` becomes.

    >>> scope = Scope(values={"ARGS": ["--bf16", "--lr"], "TP": "8", "X": "a b"})
    >>> fields('${ARGS[@]}', scope), fields('$X"$X"$TP', scope), fields('"${DP:-$((TP/2))}"', scope)
    (['--bf16', '--lr'], ['a', 'ba b8'], ['4'])
    """
    words: list[str] = []
    grows = False
    for value, whole in _pieces(raw, scope):
        if whole:
            parts, starts, ends = value if isinstance(value, list) else [value], False, False
        else:
            text = " ".join(value) if isinstance(value, list) else value
            parts, starts, ends = text.split(), text[:1].isspace(), text[-1:].isspace()
        grows = grows and not starts
        for index, part in enumerate(parts):
            if grows and index == 0:
                words[-1] += part
            else:
                words.append(part)
        grows = not ends if parts else grows
    return words


def text_of(raw: str, scope: Scope) -> str:
    """What ``raw`` becomes where it is not split into words, as in an assignment."""
    return "".join(" ".join(value) if isinstance(value, list) else value for value, _ in _pieces(raw, scope))


def document_of(raw: str, scope: Scope) -> str:
    """What the text of a here-document becomes."""
    pieces = _pieces(raw, scope, quoted=True)
    return "".join(" ".join(value) if isinstance(value, list) else value for value, _ in pieces)


def compute(expression: str, scope: Scope) -> int | None:
    """Value of ``(( expression ))``, whose assignments are done; None, also in what it assigns, where it is unknown.

    >>> scope = Scope(values={"i": "3"})
    >>> compute("i += 2, j = i * 2", scope), compute("i++", scope), scope.values
    (10, 5, {'i': '6', 'j': '10'})
    """
    value: int | None = 0
    for one in expression.split(","):
        text = text_of(one, scope)
        step = _STEP.fullmatch(text)
        value = evaluate(text, scope.number) if step is None else _stepped(step, scope)
        if step is None and value is None:
            for name in _CHANGED.findall(text):
                scope.set(name, unknown(f"(({text}))"))
    return value


def _stepped(step: re.Match[str], scope: Scope) -> int | None:
    """Value of an assignment, which is done."""
    name, old = step["name"], scope.number(step["name"])
    sign = step["before"] or step["after"]
    change = f"{name} {sign[0]} 1" if sign else f"{name} {step['operator']} ({step['value']})"
    new = evaluate(change if sign or step["operator"] else step["value"], scope.number)
    scope.set(name, unknown(f"(({step[0]}))") if new is None else str(new))
    return old if step["after"] else new


def _pieces(raw: str, scope: Scope, *, quoted: bool = False, splits: bool = False) -> Iterator[tuple[Value, bool]]:
    """(value, it stays whole) of the parts of ``raw``; with ``splits``, blanks outside of quotes separate words."""
    special = "\\`$" if quoted else "\\`$'\""
    at = 0
    while at < len(raw):
        if raw[at] not in special:
            end = next((index for index in range(at, len(raw)) if raw[index] in special), len(raw))
            yield raw[at:end], not splits
        else:
            end = part_end(raw, at)
            yield from _special(raw[at:end], scope, quoted=quoted)
        at = end


def _special(part: str, scope: Scope, *, quoted: bool) -> Iterator[tuple[Value, bool]]:
    match part[0]:
        case "\\":
            character = part[1:]
            kept = quoted and character not in '$`"\\\n'
            yield "" if character == "\n" else part if kept else character, True
        case "'":
            yield part[1:-1], True
        case '"':
            yield from _pieces(part[1:-1], scope, quoted=True) if part[1:-1] else [("", True)]
        case "`":
            yield unknown(part), quoted
        case _ if part.startswith("$'"):
            yield part[2:-1], True
        case _ if part.startswith("${"):
            value = _parameter(part, scope)
            if isinstance(value, _Default):
                yield from _pieces(value.word, scope, quoted=quoted, splits=not quoted)
            else:
                yield _joined(part, value, scope) if quoted else value, quoted
        case _:
            value = _expansion(part, scope)
            yield _joined(part, value, scope) if quoted else value, quoted


def _joined(part: str, value: Value, scope: Scope) -> Value:
    """``"$*"`` and ``"${A[*]}"`` are one word."""
    is_one = part.startswith(("$*", "${*")) or "[*]" in part
    between = scope.get("IFS")
    if between is None or between[:1] in ("\\", "\n", "\t"):  # Blank, even if spelled $'\n'.
        between = " "
    return between[:1].join(value) if is_one and isinstance(value, list) else value


def _expansion(part: str, scope: Scope) -> Value:
    if (part.startswith("$((") and part.endswith("))")) or part.startswith("$["):
        inside = part[3:-2] if part.startswith("$((") else part[2:-1]
        number = evaluate(text_of(inside, scope), scope.number)
        return unknown(part) if number is None else str(number)
    if part.startswith("$("):
        return unknown(part)
    if part == "$":
        return part
    value = scope.get(part[1:])
    if isinstance(value, list) and part[1:] not in ("@", "*"):
        value = "".join(value[:1])
    return unset(part) if value is None else value


class _Default(NamedTuple):
    """What stands in for a parameter that is not set, as written."""

    word: str


def _parameter(part: str, scope: Scope) -> Value | _Default:
    """Value of ``${...}``."""
    parameter = _PARAMETER.fullmatch(part[2:-1])
    if parameter is None:
        return unknown(part)
    value = _element(scope.get(parameter["name"]), parameter, scope)
    if parameter["length"]:
        return _count(value or "") or unknown(part)
    change = parameter["change"]
    if default := _DEFAULT.fullmatch(change):
        return _defaulted(value, default, parameter["name"], scope)
    if value is None:
        return unset(part)
    if not change:
        return value
    changed = _changed(value, change, scope) if isinstance(value, str) and is_known(value) else None
    return unknown(part) if changed is None else changed


def _count(value: Value) -> str | None:
    """Characters of a text, or elements; None where part of it is unknown, which may be any number of them."""
    known = list(map(settled, [value] if isinstance(value, str) else value))
    return None if None in known else str(len(known[0] if isinstance(value, str) else known))


def _element(value: Value | None, parameter: re.Match[str], scope: Scope) -> Value | None:
    index = parameter["index"]
    if isinstance(value, str) or value is None:
        return [value] if index in ("@", "*") and isinstance(value, str) else value
    if index in ("@", "*") or (index is None and parameter["name"] in ("@", "*")):
        return value
    position = evaluate(text_of(index, scope), scope.number) if index else 0
    return value[position] if position is not None and -len(value) <= position < len(value) else None


def _defaulted(value: Value | None, default: re.Match[str], name: str, scope: Scope) -> Value | _Default:
    is_set = value is not None and not (default["empty_too"] and not value)
    match default["operator"]:
        case "+":
            return _Default(default["word"] if is_set else "")
        case "?":
            return value if is_set else unset(f"${name}")
    if is_set:
        return value
    if default["operator"] == "=":
        scope.values[name] = text_of(default["word"], scope)
    return _Default(default["word"])


def _changed(value: str, change: str, scope: Scope) -> str | None:
    """``value`` without a beginning or end, in the other case, replaced or cut; None for other changes."""
    cuts: dict[str, Callable[[str, int], tuple[str, str]]] = {
        "#": lambda text, length: (text[:length], text[length:]),
        "%": lambda text, length: (text[len(text) - length :], text[: len(text) - length]),
    }
    if change[0] in cuts:
        greedy = change[1:2] == change[0]
        pattern = text_of(change[1 + greedy :], scope)
        lengths = range(len(value) + 1)
        for length in reversed(lengths) if greedy else lengths:
            cut, rest = cuts[change[0]](value, length)
            if fnmatchcase(cut, pattern):
                return rest
        return value
    if change in ("^^", ",,"):
        return value.upper() if change == "^^" else value.lower()
    if change[0] == "/":
        everywhere = change[1:2] == "/"
        old, *new = re.split(r"(?<!\\)/", change[1 + everywhere :], maxsplit=1)
        old, new = text_of(old, scope), text_of("".join(new), scope)
        return None if not old or set(old) & set("*?[") else value.replace(old, new, -1 if everywhere else 1)
    if substring := _SUBSTRING.fullmatch(change):
        start = int(substring["start"])
        length = substring["length"]
        return value[start:][: int(length)] if length else value[start:]
    return None
