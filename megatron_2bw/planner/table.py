"""Text in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

GIB = 2**30
"""Bytes."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines with the first column on the left and the others on the right edge.

    >>> print(*table(["layout", "s"], [["a", "1.25"], ["bcd", "10"]]), sep="\\n")
    layout     s
    a       1.25
    bcd       10
    """
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *rest]).rstrip()


def wrapped(words: Sequence[str], *, width: int = 110, indent: str = "    ") -> Iterator[str]:
    """Flags in lines of at most ``width`` letters, each flag with its values, joined by backslashes.

    >>> print(*wrapped(["--a", "1", "--b", "--c", "2"], width=14, indent=""), sep="\\n")
    --a 1 --b \\
    --c 2
    """
    units: list[str] = []
    for word in words:
        if word.startswith("--") or not units:
            units.append(word)
        else:
            units[-1] += f" {word}"
    line = indent
    for unit in units:
        if line.strip() and len(line) + len(unit) + 2 > width:
            yield f"{line.rstrip()} \\"
            line = indent
        line += f"{unit} "
    yield line.rstrip()


def seconds(time_s: float) -> str:
    """Three digits and a unit.

    >>> seconds(0.01234), seconds(0.9996), seconds(12.34), seconds(1234)
    ('12.3 ms', '1 s', '12.3 s', '1,234 s')
    """
    if time_s < 0.9995:  # From there on, three digits of milliseconds are 1,000.
        return f"{time_s * 1e3:.3g} ms"
    return f"{time_s:,.0f} s" if time_s >= 100 else f"{time_s:.3g} s"


def gib(size_bytes: float) -> str:
    """In GiB, with one decimal."""
    return f"{size_bytes / GIB:.1f}"


def billions(count: int) -> str:
    """In billions, with three digits.

    >>> billions(354_000_000), billions(1_008_000_000_000)
    ('0.354B', '1,008B')
    """
    number = count / 1e9
    return f"{number:,.0f}B" if number >= 100 else f"{number:.3g}B"


def bar(done: int, total: int, width: int = 20) -> str:
    """How far something is.

    >>> bar(1, 4, width=8)
    '[##......] 1/4'
    """
    filled = width * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"
