"""Flags and their values, before they mean anything."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.spelling import misspelled

_ARGUMENT = re.compile(r"\$\{?([1-9]\d*)")
"""Of a script."""
_OUTPUT = re.compile(r"\$\((?!\()|`")
"""Of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Flags and the words behind each; a flag given twice counts as last given."""

    values: dict[str, list[str]]
    explain: Callable[[str], str] = field(default=str)
    """How to show a value in a message."""
    is_known: Callable[[str], bool] = field(default=lambda value: True)
    """False for a value that only running a script would tell."""
    notes: tuple[str, ...] = ()
    """On a script."""

    @classmethod
    def parse(cls, words: Iterable[str], **more: Any) -> Options:
        """Read ``--flag value ...`` and ``--flag=value``; words before the first flag are ignored.

        >>> Options.parse("torchrun x.py --bf16 --lr=1e-4 --split 9 1".split()).values
        {'--bf16': [], '--lr': ['1e-4'], '--split': ['9', '1']}
        """
        values: dict[str, list[str]] = {}
        current: list[str] = []
        for word in words:
            if word.startswith("--"):
                flag, equals, value = word.partition("=")
                current = values[flag] = [value] if equals else []
            else:
                current.append(word)
        return cls(values=values, **more)

    def without(self, flags: Collection[str]) -> Options:
        """These options but ``flags``."""
        return replace(self, values={flag: words for flag, words in self.values.items() if flag not in flags})

    def __contains__(self, flag: str) -> bool:
        return flag in self.values

    def missing(self, flag: str, why: str) -> PlanError:
        """That ``flag`` has to be given, and what looks like it in its place."""
        spelled = next((given for given in self.values if misspelled(given, (flag,))), None)
        hint = f", not {spelled}" if spelled else ""
        return PlanError(f"{flag} is missing: {why}; give {flag} N{hint}")

    def text(self, flag: str, default: str = "") -> str:
        """The first word behind ``flag``.

        Raises:
            PlanError: there is none, or running a script would be needed to know it.
        """
        if flag not in self.values:
            return default
        words = self.words(flag, most=1)
        if not words:
            raise PlanError(f"{flag} has no value; give one, such as {flag} {default or 1}")
        return words[0]

    def words(self, flag: str, most: int | None = None) -> list[str]:
        """The first words behind ``flag``, or all.

        Raises:
            PlanError: running a script would be needed to know one.
        """
        words = self.values[flag][:most]
        for word in words:
            if not self.is_known(word):
                raise PlanError(self._unknown(flag, self.explain(word)))
        return words

    def _unknown(self, flag: str, text: str) -> str:
        """That what the script has behind ``flag`` is unknown, and the remedy."""
        override = f"{flag} N behind the script"
        if number := _ARGUMENT.search(text):
            least = f"--script-args with at least {number[1]} words"
            return f"{flag} {text}: argument {number[1]} of the script; give {least}, or {override}"
        if _OUTPUT.search(text):
            return f"{flag} {text}: nothing sets it, for commands are not run; give {override}"
        return (
            f"{flag} {text}: nothing sets it, for commands are not run and arrays with keys not read; set its "
            f"variables in the environment, give the arguments of the script with --script-args, or {override}"
            + "".join(f"; {note}" for note in self.notes)
        )

    def number(self, flag: str, default: int | None = None) -> int | None:
        """The whole number behind ``flag``.

        Raises:
            PlanError: there is none.
        """
        if flag not in self.values:
            return default
        text = self.text(flag)
        try:
            return int(text)
        except ValueError as error:
            raise PlanError(f"{flag} {text}: give a whole number, such as {flag} {default or 1}") from error

    def real(self, flag: str, default: float, *, most: float = math.inf) -> float:
        """The number from 0 to ``most`` behind ``flag``.

        Raises:
            PlanError: there is none.
        """
        text = self.text(flag, str(default))
        with contextlib.suppress(ValueError):
            if 0 <= float(text) <= min(most, sys.float_info.max):
                return float(text)
        bounds = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
        raise PlanError(f"{flag} {text}: give a number {bounds}, such as {flag} {default}")

    def choice(self, flag: str, choices: Collection[str], default: str) -> str:
        """The one of ``choices`` behind ``flag``.

        Raises:
            PlanError: it is none of them.
        """
        text = self.text(flag, default)
        if text not in choices:
            raise PlanError(f"{flag} {text}: choose one of {', '.join(choices)}")
        return text
