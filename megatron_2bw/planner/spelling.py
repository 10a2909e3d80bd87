"""Names that look like others."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_ALIKE = 0.88
"""From which ratio of difflib on a word looks misspelled: just above what those flags of Megatron have that
``estimate`` reads and those that it does not."""


def misspelled(word: str, known: Collection[str]) -> str | None:
    """The one of ``known`` that ``word`` seems to mean; None where it is one of them, or like none.

    >>> misspelled("tensors", ("tensor", "data")), misspelled("data", ("data",)), misspelled("id", ("data",))
    ('tensor', None, None)
    """
    found = [] if word in known else difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)
    return found[0] if found else None


def attribute(flag: str) -> str:
    """What argparse calls the value of ``flag``."""
    return flag.removeprefix("--").replace("-", "_")
