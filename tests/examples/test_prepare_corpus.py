"""The corpus of examples/prepare_corpus.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def prepare_corpus(load):
    return load("examples/prepare_corpus.py")


def write_library(folder: Path, files: int = 40) -> Path:
    """A small library, with folders that must be left out."""
    for index in range(files):
        path = folder / ("package" if index % 3 else ".") / f"module_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {index}  # é\n" * 60, encoding="utf-8")
    for skipped in ("site-packages/other.py", "test/test_a.py", "package/tests/test_b.py", "encodings/cp0.py"):
        (folder / skipped).parent.mkdir(parents=True, exist_ok=True)
        (folder / skipped).write_text("skipped = True\n")
    (folder / "empty.py").write_text("\n")
    return folder


def test_corpus_is_bounded_and_in_a_fixed_mixed_order(prepare_corpus, tmp_path):
    library = write_library(tmp_path / "library")
    all_of_it, half = tmp_path / "all.jsonl", tmp_path / "half.jsonl"
    size = sum(path.stat().st_size for path in library.rglob("module_*.py"))

    prepare_corpus.write_corpus(library, all_of_it, max_bytes=size)
    prepare_corpus.write_corpus(library, half, max_bytes=size // 2)

    documents = [json.loads(line) for line in all_of_it.read_text().splitlines()]
    names = [document["path"] for document in documents]
    assert sorted(names) == sorted(path.relative_to(library).as_posix() for path in library.rglob("module_*.py"))
    assert names != sorted(names)
    assert all_of_it.read_text().startswith(half.read_text())
    total = sum(len(json.loads(line)["text"].encode()) for line in half.read_text().splitlines())
    assert 0.4 * size < total <= size // 2


def test_a_stripped_library_is_refused(prepare_corpus, tmp_path, monkeypatch):
    library, corpus = write_library(tmp_path / "library", files=3), tmp_path / "corpus.jsonl"
    monkeypatch.setattr(sys, "argv", ["prepare_corpus", "--output", str(corpus), "--library", str(library)])
    with pytest.raises(SystemExit, match="full standard library"):
        prepare_corpus.main()
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_corpus_that_is_there_stays(prepare_corpus, tmp_path, monkeypatch, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("mine")
    monkeypatch.setattr(sys, "argv", ["prepare_corpus", "--output", str(corpus)])
    prepare_corpus.main()
    assert corpus.read_text() == "mine"
    assert "there already" in capsys.readouterr().out
