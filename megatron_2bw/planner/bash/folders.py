"""What commands print by which a script finds its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

FINDS = re.compile(r"\s*(?:cd|dirname|pwd|readlink|realpath)\b")
"""How they begin."""
_OPTION = re.compile(r"-[LPefmnsz]+|--")


def printed(commands: Sequence[Sequence[str]], here: str | None) -> str | None:
    """What ``commands``, one behind the other, print in the folder ``here``; None for others, and where it is unknown.

    >>> printed([["cd", "--", "../b"], ["pwd"]], "/a/x"), printed([["dirname", "run.sh"]], None)
    ('/a/b', '.')
    """
    (name, *words), *rest = commands
    operands = [word for word in words if not _OPTION.fullmatch(word)]
    match name, *operands:
        case ["cd", folder] if rest:
            return printed(rest, moved(here, folder))
        case _ if rest:
            return None
        case ["pwd"]:
            return here
        case ["dirname", path]:
            return os.path.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")
        case ["realpath" | "readlink", path] if name == "realpath" or words[0] in ("-f", "-e", "-m"):
            whole = moved(here, path)
            return None if whole is None else os.path.realpath(whole)
    return None


def moved(here: str | None, folder: str) -> str | None:
    """Where ``cd folder`` leads to from ``here``."""
    is_known = folder.startswith("/") or (here is not None and folder != "-")
    return os.path.normpath(os.path.join(here or "", folder)) if is_known else None
