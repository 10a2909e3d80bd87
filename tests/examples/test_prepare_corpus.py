"""The corpus of examples/prepare_corpus.py: what goes in, what comes out, and what is redone."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

VOCAB_SIZE = 400
TEXT = "def add(a, b):\n    return a + b  # é, \t tab\n\n\nclass Größe:\n        '''deep   indentation'''\n"


@pytest.fixture(scope="module")
def prepare_corpus(load):
    return load("examples/prepare_corpus.py")


def write_library(folder: Path, files: int = 40) -> Path:
    """A small library whose modules differ, with folders that must be left out."""
    words = [f"name_{index}" for index in range(200)]
    choose = random.Random(1)
    for index in range(files):
        path = folder / ("package" if index % 3 else ".") / f"module_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"    {choose.choice(words)} = {choose.choice(words)}({number})" for number in range(60)]
        path.write_text(TEXT + "\n".join(lines) + "\n", encoding="utf-8")
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


def test_a_stripped_library_is_refused(prepare_corpus, tmp_path):
    library = write_library(tmp_path / "library", files=3)
    with pytest.raises(ValueError, match="full standard library"):
        prepare_corpus.write_corpus(library, tmp_path / "corpus.jsonl", max_bytes=10_000_000)


def test_megatron_reads_back_the_text(prepare_corpus, tmp_path):
    library = write_library(tmp_path / "library")
    prepare_corpus.prepare(tmp_path / "data", library, max_bytes=100_000, vocab_size=VOCAB_SIZE)

    import sentencepiece
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "data/tokenizer.model"))
    assert tokenizer.vocab_size() == VOCAB_SIZE
    texts = list(prepare_corpus.read_corpus(tmp_path / "data/corpus.jsonl"))
    dataset = IndexedDataset(str(tmp_path / "data/corpus_document"))
    assert len(dataset) == len(texts) == len(dataset.document_indices) - 1
    for ids, text in zip(dataset, texts, strict=True):
        assert ids.dtype == np.uint16
        assert ids[-1] == tokenizer.eos_id()
        assert tokenizer.decode(ids[:-1].tolist()) == text


def test_finished_steps_are_skipped_and_broken_ones_redone(prepare_corpus, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    library = write_library(tmp_path / "library")

    def prepare() -> None:
        prepare_corpus.prepare(data, library, max_bytes=100_000, vocab_size=VOCAB_SIZE)

    def interrupted(corpus: Path, tokenizer: Path, prefix: Path) -> None:
        Path(f"{prefix}.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_corpus, "write_dataset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare()
    assert not list(data.glob("corpus_document.*"))

    (data / "cache").mkdir()
    tokenizer_time = (data / "tokenizer.model").stat().st_mtime_ns
    prepare()
    assert (data / "tokenizer.model").stat().st_mtime_ns == tokenizer_time
    assert not (data / "cache").exists(), "an index of the earlier dataset would be used"
    assert not list(data.glob("unfinished*"))

    files = {path: path.stat().st_mtime_ns for path in data.iterdir()}
    capsys.readouterr()
    prepare()
    assert {path: path.stat().st_mtime_ns for path in data.iterdir()} == files
    assert capsys.readouterr().out.count("there already") == 3


def test_the_tokenizer_is_the_same_every_time(prepare_corpus, tmp_path):
    library = write_library(tmp_path / "library")
    corpus = tmp_path / "corpus.jsonl"
    prepare_corpus.write_corpus(library, corpus, max_bytes=100_000)
    for name in ("first", "second"):
        prepare_corpus.train_tokenizer(corpus, tmp_path / name, vocab_size=VOCAB_SIZE)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_the_command_explains_what_is_wrong(prepare_corpus, tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    arguments = ["prepare_corpus", "--output", str(tmp_path / "data"), "--library", str(tmp_path / "library")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="holds only 0 bytes"):
        prepare_corpus.main()
