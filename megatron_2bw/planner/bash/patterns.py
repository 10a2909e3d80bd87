"""Pattern matching."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from megatron_2bw.planner.bash.scope import settled

_CLASSES = {
    "digit": "0-9",
    "alpha": "a-zA-Z",
    "alnum": "a-zA-Z0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
    "space": " \t\n",
    "blank": " \t",
}
"""Within the brackets of a pattern or regular expression, ``[:digit:]`` and the like."""


def without_classes(pattern: str) -> str | None:
    """``pattern`` with their characters for ``[:digit:]`` and the like; None where there are others."""
    for name, characters in _CLASSES.items():
        pattern = pattern.replace(f"[:{name}:]", characters)
    return None if "[:" in pattern else pattern


def matches(text: str | None, pattern: str) -> bool | None:
    """Whether ``text`` matches a pattern of bash; None where one is unknown.

    >>> matches("b1", "[^a]*"), matches(None, "*"), matches("a", "[[:alpha:]]")
    (True, True, True)
    """
    known = settled(pattern)
    if known == "*":
        return True
    known = None if known is None else without_classes(known)
    if text is None or known is None or re.search(r"[@!+?*]\(", known):
        return None
    return fnmatchcase(text, known.replace("[^", "[!"))
