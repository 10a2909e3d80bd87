"""Commands of bash that change variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from getopt import GetoptError, getopt

from megatron_2bw.planner.bash.expand import compute
from megatron_2bw.planner.bash.scope import Scope, settled, unknown
from megatron_2bw.planner.errors import PlanError


def _set(scope: Scope, arguments: Sequence[str], _: str | None) -> bool | None:
    """``set -a`` and new arguments; other options change nothing here."""
    for index, word in enumerate(arguments):
        before = arguments[index - 1] if index else ""
        is_value = before[:1] in ("-", "+") and before.endswith("o")
        is_option = word[:1] in ("-", "+") and len(word) > 1
        if word in ("--", "-") or not (is_option or is_value):
            scope.positional = list(arguments[index + (word in ("--", "-")) :])
            return True
        if word == "allexport" if is_value else "a" in word:
            scope.exports_all = (before if is_value else word).startswith("-")
    return True


def _unset(scope: Scope, arguments: Sequence[str], _: str | None) -> bool | None:
    for name in arguments:
        if "-f" in arguments or name not in scope.values:
            scope.functions.pop(name, None)
        if "[" in name:
            scope.set(name.partition("[")[0], [unknown(f"${{{name}}}")])
        elif "-f" not in arguments:
            scope.unset(name)
    return True


def _shift(scope: Scope, arguments: Sequence[str], _: str | None) -> bool | None:
    count = settled(arguments[0]) if arguments else "1"
    number = int(count) if count and count.isdecimal() else 1
    if number > len(scope.positional):
        return False
    del scope.positional[:number]
    return True


def _let(scope: Scope, arguments: Sequence[str], _: str | None) -> bool | None:
    number: int | None = 0
    for expression in arguments:
        number = compute(expression, scope)
    return None if number is None else number != 0


def _read(scope: Scope, arguments: Sequence[str], given: str | None) -> bool | None:
    """A line of what is ``given``, or with another delimiter all of it."""
    try:
        found, names = getopt(list(arguments), "eErsa:d:i:n:N:p:t:u:")
    except GetoptError:
        return False
    options = dict(found)
    names = [options["-a"]] if "-a" in options else names
    given = None if given is None else settled(given)
    if given is None or scope.get("IFS") is not None or ("-r" not in options and "\\" in given):
        for name in names or ["REPLY"]:
            scope.set(name, unknown(f"${name}"))
        return None
    text = (given if "-d" in options else given.partition("\n")[0]).strip()
    if "-a" in options:
        scope.set(options["-a"], text.split())
        return None if "-d" in options else True
    values = text.split(None, len(names) - 1) if len(names) > 1 else [text]
    for index, name in enumerate(names or ["REPLY"]):
        scope.set(name, values[index] if index < len(values) else "")
    return None if "-d" in options else True


def _read_lines(scope: Scope, arguments: Sequence[str], given: str | None) -> bool | None:
    """``mapfile``"""
    name = arguments[-1] if arguments and not arguments[-1].startswith("-") else "MAPFILE"
    text = None if given is None else settled(given)
    scope.set(name, [unknown(f"${name}")] if text is None else text.splitlines())
    return None if text is None else True


def _print(scope: Scope, arguments: Sequence[str], _: str | None) -> bool | None:
    """``printf -v NAME``"""
    if arguments[:1] == ["-v"] and len(arguments) > 1:
        scope.set(arguments[1], unknown(f"${arguments[1]}"))
    return True


def _options(scope: Scope, arguments: Sequence[str], _: str | None) -> bool | None:
    """``getopts``, which ends its loop at once where there is nothing to read.

    Raises:
        PlanError: there are arguments to read.
    """
    if scope.positional:
        raise PlanError("getopts, which reads the arguments, is not followed; give the flags themselves")
    return False


BUILTINS: dict[str, Callable[[Scope, Sequence[str], str | None], bool | None]] = {
    "set": _set,
    "unset": _unset,
    "shift": _shift,
    "let": _let,
    "read": _read,
    "mapfile": _read_lines,
    "readarray": _read_lines,
    "printf": _print,
    "getopts": _options,
}
"""What each does, given the variables, its arguments and its standard input where that is known; whether it succeeds,
None where that is unknown."""
