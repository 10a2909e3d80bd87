"""What ``[ ... ]`` and ``[[ ... ]]`` say, as far as that is known."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

from megatron_2bw.planner.bash.patterns import matches, without_classes
from megatron_2bw.planner.bash.scope import settled

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class _MalformedError(Exception):
    """bash prints a message in place of an answer."""


def holds(words: Sequence[str], *, patterns: bool = False) -> bool | None:
    """Whether the condition of ``words`` holds; None where only running the script would tell.

    A malformed one, such as ``[ $A = 1 ]`` where nothing sets ``A``, does not hold.

    Args:
        words: within the brackets, expanded; ``&&``, ``||``, ``!`` are words too.
        patterns: as in ``[[``: the right side of ``==`` is a pattern.

    >>> holds(["8", "-gt", "1"]), holds(["-z", "x"]), holds(["-f", "run.sh"])
    (True, False, None)
    """
    try:
        return _holds(words, patterns=patterns)
    except _MalformedError:
        return False


def _holds(words: Sequence[str], *, patterns: bool) -> bool | None:
    for separators, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
        parts = _split(words, separators)
        if len(parts) > 1:
            answers = [_holds(part, patterns=patterns) for part in parts]
            if decisive in answers:
                return decisive
            return None if None in answers else not decisive
    if words and words[0] == "!":
        return opposite(_holds(words[1:], patterns=patterns))
    if len(words) > 2 and words[0] == "(" and words[-1] == ")":
        return _holds(words[1:-1], patterns=patterns)
    return _primary(words, patterns=patterns)


def opposite(answer: bool | None) -> bool | None:
    """None where the answer is not known."""
    return None if answer is None else not answer


def _split(words: Sequence[str], separators: tuple[str, ...]) -> list[Sequence[str]]:
    """Parts of ``words`` between separators that are not in brackets."""
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word == "(") - (word == ")")
        if word in separators and depth == 0:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _primary(words: Sequence[str], *, patterns: bool) -> bool | None:
    known = [settled(word) for word in words]
    match known:
        case []:
            return False
        case [None, *_] | [_, None] | [_, _, None]:
            return None
        case [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [left, "=" | "==", right]:
            return matches(left, right) if patterns else left == right
        case [left, "!=", right]:
            return opposite(matches(left, right)) if patterns else left != right
        case [left, "=~", right]:
            return _found(left, right)
        case [left, compare, right] if compare in _NUMBERS:
            return _compared(left, _NUMBERS[compare], right, arithmetic=patterns)
        case [operator, _] if not operator.startswith("-") or operator in _NUMBERS:
            raise _MalformedError
    return None


def _compared(left: str, compare: Callable[[int, int], bool], right: str, *, arithmetic: bool) -> bool | None:
    """Of two numbers, or as in ``[[`` two expressions of ``arithmetic``, where nothing is 0 and names are variables."""
    try:
        return compare(*(0 if arithmetic and not text.strip() else int(text) for text in (left, right)))
    except ValueError:
        if arithmetic:
            return None
        raise _MalformedError from None


def _found(text: str, expression: str) -> bool | None:
    expression = without_classes(expression)
    if expression is None or "[[" in expression:
        return None
    try:
        return re.search(expression, text) is not None
    except re.error:
        return None
