"""Brace expansion."""

from __future__ import annotations

import re

from megatron_2bw.planner.bash.scope import unknown
from megatron_2bw.planner.bash.tokens import part_end

_BRACES = re.compile(r"\{(?:(?P<first>-?\d+)\.\.(?P<last>-?\d+)|(?P<choices>[^{}\s\"'`\\]*,[^{}\s\"'`\\]*))\}")


def braces(raw: str) -> list[str]:
    """``raw`` for each of the choices in braces: ``{1..3}``, ``{a,b}``.

    >>> braces("{1..3}'{1..3}'{a,$b}")[:2]
    ["1'{1..3}'a", "1'{1..3}'$b"]
    """
    at = 0
    while at < len(raw):
        if found := _BRACES.match(raw, at):
            before, after = raw[:at], raw[found.end() :]
            return [rest for choice in _choices(found) for rest in braces(before + choice + after)]
        if raw[at] == "{" and re.search(r"(,|\.\.).*\}", raw[at:]):
            return [unknown(raw)]
        at = part_end(raw, at)
    return [raw]


def _choices(found: re.Match[str]) -> list[str]:
    if found["choices"]:
        return found["choices"].split(",")
    first, last = int(found["first"]), int(found["last"])
    if re.match(r"-?0\d", found["first"]) or re.match(r"-?0\d", found["last"]) or abs(last - first) > 10_000:
        return [unknown(found[0])]  # Filled up with zeros.
    step = 1 if first <= last else -1
    return list(map(str, range(first, last + step, step)))
