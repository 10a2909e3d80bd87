"""Variables of a script, and stand-ins for what only running it would tell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_2bw.planner.bash.arithmetic import changed, evaluate
from megatron_2bw.planner.errors import PlanError

Value = str | list[str]

_UNKNOWN, _UNSET, _END, _BLANK, GONE = "\x01", "\x02", "\x03", "\x04", "\x05"
"""Before what cannot be known without running the script and before what nothing sets; after both; a blank in them;
after the latter where it is not quoted, so that bash drops the word."""
_OF_BASH = set(
    "BASHPID BASH_REMATCH BASH_VERSION EPOCHSECONDS EUID FUNCNAME HOSTNAME LINENO OLDPWD OSTYPE PIPESTATUS PPID "
    "RANDOM SECONDS SHLVL SRANDOM UID ! - $ _".split()
)
"""Parameters that bash itself sets."""


def unknown(text: str) -> str:
    """A stand-in for the value of ``text``, which only running it would tell; stays one word."""
    return _UNKNOWN + re.sub(r"\s", _BLANK, shown(text)) + _END


def unset(text: str) -> str:
    """A stand-in for the value of ``text``, which nothing sets."""
    return _UNSET + re.sub(r"\s", _BLANK, shown(text)) + _END


def is_known(value: str) -> bool:
    """Whether ``value`` has no part that is unknown or not set."""
    return _UNKNOWN not in value and _UNSET not in value


def settled(value: str) -> str | None:
    """``value`` as bash sees it, with nothing for what is not set; None where it is unknown.

    >>> settled("a" + unset("$B")), settled("a" + unknown("$(b)"))
    ('a', None)
    """
    return None if _UNKNOWN in value else re.sub(f"{_UNSET}[^{_END}]*{_END}|{GONE}", "", value)


def may_be_words(value: str) -> bool:
    """Whether ``value`` begins with what is unknown, which may be any words, flags too.

    >>> may_be_words(unknown("$(cat flags)")), may_be_words("logs/" + unknown("$(date)"))
    (True, False)
    """
    return _UNKNOWN in value and settled(value.partition(_UNKNOWN)[0]) == ""


def shown(value: str) -> str:
    """``value`` for a message, what is not known as the script writes it.

    >>> shown("--save" + unknown("$(date)"))
    '--save$(date)'
    """
    return re.sub(f"[{_UNKNOWN}{_UNSET}{_END}{GONE}]", "", value).replace(_BLANK, " ")


def is_gone(word: str) -> bool:
    """Whether bash drops ``word``, which is kept for messages."""
    return GONE in word and settled(word) == ""


def is_word(word: str) -> bool:
    """Whether ``word`` surely is one, and known."""
    return settled(word) is not None and not is_gone(word)


def count(value: Value) -> str | None:
    """Characters of a text, or elements; None where part of it is unknown, which may be any number of them."""
    if isinstance(value, str):
        text = settled(value)
        return None if text is None else str(len(text))
    return str(len(value)) if all(map(is_word, value)) else None


def element(of: list[str], position: int, shown: str) -> str | None:
    """Of an array, or of the arguments; None where there is none."""
    if not all(map(is_word, of[:position] if position >= 0 else of)) or any(map(is_gone, of[position:][:1])):
        return unknown(shown)
    return of[position] if -len(of) <= position < len(of) else None


@dataclass(slots=True, kw_only=True)
class Scope:
    """Variables and functions at one point of a script."""

    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    """Variables and functions that other programs get."""
    positional: list[str] = field(default_factory=list)
    """``$1``, ``$2``, ..."""
    script: str = "bash"
    """``$0``"""
    exports_all: bool = False
    """Whatever is set from now on: ``set -a``."""
    functions: dict[str, Any] = field(default_factory=dict)
    status: bool | None = True
    """Whether the last command succeeded; None where that is unknown."""
    absent: dict[str, set[str]] = field(default_factory=dict, compare=False)
    """Files to read that are not there, of all copies, and the variables behind each that nothing sets."""

    def get(self, name: str) -> Value | None:
        """Value of ``name``; None where nothing sets it."""
        if name in self.values:
            return self.values[name]
        if name in ("@", "*"):
            return list(self.positional)
        if name.isdigit():
            return element([self.script, *self.positional], int(name), f"${name}")
        if name == "?" and self.status:
            return "0"
        if name == "#":
            return count(self.positional) or unknown("$#")
        return self.script if name == "BASH_SOURCE" else unknown(f"${name}") if name in _OF_BASH | {"?"} else None

    def here(self) -> str | None:
        """The folder that commands run in; None where it is unknown."""
        value = self.values.get("PWD")
        return value if isinstance(value, str) and is_known(value) else None

    def seek(self, name: str) -> Value | None:
        """The same, where the script asks for it: a file that is not there may set it."""
        value = self.get(name)
        for names in self.absent.values() if value is None and name.isidentifier() else ():
            names.add(name)
        return value

    def set(self, name: str, value: Value) -> None:
        self.values[name] = value
        if self.exports_all:
            self.exported.add(name)

    def unset(self, name: str) -> None:
        self.values.pop(name, None)
        self.exported.discard(name)

    def restore(self, before: dict[str, tuple[Value | None, bool]]) -> None:
        """Give variables the values, and whether they are exported, that they had."""
        for name, (value, is_exported) in before.items():
            self.unset(name)
            if value is not None:
                self.values[name] = value
            if is_exported:
                self.exported.add(name)

    def copy(self) -> Scope:
        """For what happens apart."""
        return replace(
            self,
            values=dict(self.values),
            positional=list(self.positional),
            exported=set(self.exported),
            functions=dict(self.functions),
        )

    def sets_as(self, other: Scope) -> bool:
        """Whether all is as in ``other`` but the status of the last command."""
        return self == replace(other, status=self.status)

    def joined(self, other: Scope) -> Scope:
        """What is known where the script came either here or to ``other``.

        Raises:
            PlanError: they have different functions.
        """
        if self.functions != other.functions:
            raise PlanError("only running the script would tell what a function does; define each in one place")
        values = {
            name: self.values[name] if self.values.get(name) == other.values.get(name) else unknown(f"${name}")
            for name in (*self.values, *(other.values.keys() - self.values.keys()))
        }
        return replace(
            self,
            values=values,
            positional=self.positional if self.positional == other.positional else [unknown("$@")],
            exported=self.exported | other.exported,
            exports_all=self.exports_all or other.exports_all,
            status=self.status if self.status == other.status else None,
        )

    def sent(self) -> dict[str, str]:
        """Variables that other programs get; bash sends them no arrays."""
        return {name: value for name in self.exported if isinstance(value := self.values.get(name), str)}

    def number(self, name: str) -> int | None:
        """Whole number in ``name``, 0 where it is not set, as in arithmetic."""
        value = self.seek(name)
        return self.compute("0" if value is None else value if isinstance(value, str) else "".join(value[:1]))

    def compute(self, expression: str) -> int | None:
        """Value of ``expression``, its ``$`` filled in; None, also in what it assigns, where it is unknown.

        >>> scope = Scope(values={"i": "3"})
        >>> scope.compute("i += 2, j = i * 2"), scope.compute("i++"), scope.values
        (10, 5, {'i': '6', 'j': '10'})
        """
        text = settled(expression)
        value = None if text is None else evaluate(text, self.number, self.set)
        for name in changed(expression) if value is None else ():
            self.set(name, unknown(f"(({expression}))"))
        return value
