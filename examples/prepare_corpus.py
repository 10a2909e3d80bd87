"""Write a corpus from text that every machine has: the sources of Python's standard library.

    python examples/prepare_corpus.py --output quickstart/data/corpus.jsonl

One document per source file, {"path": ..., "text": ...}, unless the file is there already.
examples/prepare_data.py makes training data of it, or of your own text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TextIO

MIN_CORPUS_BYTES = 500_000
"""A smaller standard library was stripped; a model would learn it by heart."""
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})
"""Installed packages, tests that repeat each other, and tables of characters."""


def source_files(library: Path) -> list[Path]:
    """The library's modules, in an order that mixes topics and depends on nothing but their names."""

    def by_hash(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(library).as_posix().encode()).digest()

    files = (path for path in library.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(library).parts))
    return sorted(files, key=by_hash)


def write_corpus(library: Path, corpus: Path, *, max_bytes: int) -> None:
    """Write one JSON line per source file, until their text adds up to ``max_bytes``.

    Raises:
        ValueError: the library holds too little source text to train on.
    """
    corpus.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=corpus.parent) as folder:
        unfinished = Path(folder, corpus.name)
        with unfinished.open("w", encoding="utf-8") as lines:
            documents, size_bytes = _write_documents(library, lines, max_bytes)
        if size_bytes < min(MIN_CORPUS_BYTES, max_bytes // 2):
            raise ValueError(
                f"{library} holds only {size_bytes:,} bytes of Python source; at least {MIN_CORPUS_BYTES:,} are "
                f"needed: use a Python with its full standard library, or write documents into {corpus} yourself"
            )
        os.replace(unfinished, corpus)
    print(f"corpus: {documents} documents, {size_bytes / 1e6:.1f} MB of text, {corpus}", flush=True)


def _write_documents(library: Path, lines: TextIO, max_bytes: int) -> tuple[int, int]:
    """How many, and the bytes of their text."""
    size_bytes = documents = 0
    for path in source_files(library):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if not text.strip():
            continue
        if size_bytes + len(text.encode()) > max_bytes:
            break
        lines.write(json.dumps({"path": path.relative_to(library).as_posix(), "text": text}) + "\n")
        size_bytes += len(text.encode())
        documents += 1
    return documents, size_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-bytes", type=int, default=6_000_000, help="bound on the text (default %(default)s)")
    parser.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="where to look for *.py files"
    )
    args = parser.parse_args()
    if args.output.exists():
        print(f"corpus: there already, {args.output}", flush=True)
        return
    try:
        write_corpus(args.library, args.output, max_bytes=args.max_bytes)
    except ValueError as error:
        sys.exit(f"prepare_corpus: {error}")


if __name__ == "__main__":
    main()
