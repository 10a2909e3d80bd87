"""What a bench has finished, in a file, so that it can go on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Kept:
    """One JSON object per line.

    Args:
        path: of the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self) -> list[dict[str, Any]]:
        """All lines, in the order in which they were added."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def add(self, row: dict[str, Any]) -> None:
        """Write one more."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
