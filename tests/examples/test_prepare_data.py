"""The training data of examples/prepare_data.py: what goes in, what comes out, and what is made again."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

VOCAB_SIZE = 400
TEXT = "def add(a, b):\n    return a + b  # é, \t tab\n\n\nclass Größe:\n        '''deep   indentation'''\n"


@pytest.fixture(scope="module")
def prepare_data(load):
    return load("examples/prepare_data.py")


@pytest.fixture
def documents() -> list[str]:
    words, choose = [f"name_{index}" for index in range(200)], random.Random(1)
    lines = ([f"    {choose.choice(words)} = {choose.choice(words)}({i})" for i in range(60)] for _ in range(20))
    return [TEXT + "\n".join(part) + "\n" for part in lines]


@pytest.fixture
def corpus(documents, tmp_path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*documents, " \n"]), encoding="utf-8")
    return path


def prepare(prepare_data, files: list[Path], output: Path, model: str = "gpt", size: int = VOCAB_SIZE) -> None:
    prepare_data.prepare(files, output, model=model, key="text", size=size)


def text_files(documents: list[str], folder: Path) -> list[Path]:
    files = [folder / f"{index}.txt" for index in range(len(documents))]
    for file, text in zip(files, documents, strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def read(prefix: Path, vocabulary: Path):
    import sentencepiece
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(prefix)), sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))


def test_megatron_reads_back_the_text(prepare_data, corpus, documents, tmp_path):
    prepare(prepare_data, [corpus], tmp_path)
    dataset, vocabulary = read(tmp_path / "gpt_document", tmp_path / "gpt.model")
    assert vocabulary.vocab_size() == VOCAB_SIZE
    assert len(dataset) == len(documents) == len(dataset.document_indices) - 1
    for ids, text in zip(dataset, documents, strict=True):
        assert ids.dtype == np.uint16
        assert ids[-1] == vocabulary.eos_id()
        assert vocabulary.decode(ids[:-1].tolist()) == text


def test_text_files_are_documents(prepare_data, documents, tmp_path):
    prepare(prepare_data, text_files(documents, tmp_path), tmp_path)
    dataset, vocabulary = read(tmp_path / "gpt_document", tmp_path / "gpt.model")
    assert [vocabulary.decode(ids[:-1].tolist()) for ids in dataset] == documents


def test_lines_are_sentences_for_bert(prepare_data, documents, tmp_path):
    long = " ".join(f"word_{index}" for index in range(400))
    files = text_files([documents[0] + long, *documents[1:]], tmp_path)
    prepare(prepare_data, files, tmp_path, model="bert")
    dataset, vocabulary = read(tmp_path / "bert_sentence", tmp_path / "bert.model")
    assert [vocabulary.id_to_piece(index) for index in range(5)] == list(prepare_data.BERT_PIECES)
    assert len(dataset.document_indices) - 1 == len(documents)
    lines = [re.sub(" +", " ", line).strip(" ") for line in documents[0].split("\n") if line.strip()]
    sentences = [vocabulary.decode(dataset[i].tolist()) for i in range(dataset.document_indices[1])]
    assert sentences[: len(lines)] == lines
    assert "".join(sentences[len(lines) :]).replace(" ", "") == long.replace(" ", "")
    assert max(map(len, dataset)) == prepare_data.LONGEST_SENTENCE
    assert min(ids.min() for ids in dataset) >= len(prepare_data.BERT_PIECES)


def test_what_is_finished_stays_and_the_rest_is_made_again(prepare_data, corpus, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"

    def interrupted(documents, vocabulary: Path, prefix: Path, *, model: str) -> None:
        Path(f"{prefix}.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "write_tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(prepare_data, [corpus], data)
    assert not list(data.glob("gpt_document.*"))

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in data.iterdir() if path.is_file()}

    (data / "cache").mkdir()
    vocabulary_s = times()["gpt.model"]
    prepare(prepare_data, [corpus], data)
    made = times()
    assert made["gpt.model"] == vocabulary_s
    assert not (data / "cache").exists(), "an index of the earlier tokens would be used"
    assert not list(data.glob("unfinished*"))

    capsys.readouterr()
    prepare(prepare_data, [corpus], data)
    assert times() == made
    assert capsys.readouterr().out.count("there already") == 2

    prepare(prepare_data, [corpus], data, size=VOCAB_SIZE - 10)
    smaller = times()
    assert all(smaller[name] > made[name] for name in made)

    older = tmp_path / "older.jsonl"
    shutil.copy(corpus, older)
    os.utime(older, ns=(0, 0))
    prepare(prepare_data, [corpus, older], data, size=VOCAB_SIZE - 10)
    assert all(time_ns > smaller[name] for name, time_ns in times().items())


@pytest.mark.parametrize(
    ("model", "texts", "message"),
    [
        ("gpt", [TEXT] * 19, "holds 19 documents, and 20 are needed"),
        ("bert", ["one line"] * 50 + [TEXT] * 3, "holds 3 documents of at least two lines"),
    ],
)
def test_too_little_to_divide(prepare_data, model, texts, message, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text + f" {number}"}) + "\n" for number, text in enumerate(texts)))
    with pytest.raises(ValueError, match=message):
        prepare(prepare_data, [corpus], tmp_path, model=model, size=310)
    assert not list(tmp_path.glob(f"{model}_*.json"))


def test_the_vocabulary_is_the_same_every_time(prepare_data, documents, tmp_path):
    for name in ("first", "second"):
        prepare_data.train_vocabulary(iter(documents), tmp_path / name, size=VOCAB_SIZE, model="bert")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"corpus.jsonl:2: not a JSON object with text under 'text'; name another with --key"),
        ('{"content": "a"}', "corpus.jsonl:2: not a JSON object"),
        ('{"text": 1}', "corpus.jsonl:2: not a JSON object"),
        ("[]", "corpus.jsonl:2: not a JSON object"),
    ],
)
def test_the_command_names_the_line_that_is_wrong(prepare_data, tmp_path, monkeypatch, line, message):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a b c"}\n' + line)
    arguments = ["prepare_data", "--input", str(corpus), "--output", str(tmp_path), "--vocab-size", "300"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=message):
        prepare_data.main()


def test_the_command_says_what_is_missing(prepare_data, tmp_path, monkeypatch):
    arguments = ["prepare_data", "--input", str(tmp_path / "none.txt"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=r"none\.txt"):
        prepare_data.main()


def test_blank_lines_and_marks_are_no_documents(prepare_data, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'\xef\xbb\xbf{"text": "first"}\n\n{"text": "half a \\ud83d pair"}\n \n')
    assert list(prepare_data.read_documents([corpus], "text")) == ["first", "half a ? pair"]


@pytest.mark.parametrize("name", ["corpus.jsonl", "text.txt"])
def test_the_command_names_the_file_that_is_no_text(prepare_data, tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"caf\xe9")
    arguments = ["prepare_data", "--input", str(tmp_path / name), "--output", str(tmp_path), "--vocab-size", "300"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=rf"{name}: not UTF-8 text"):
        prepare_data.main()


def test_a_record_that_was_cut_short_is_none(prepare_data, corpus, tmp_path, capsys):
    data = tmp_path / "data"
    prepare(prepare_data, [corpus], data)
    for record in data.glob("*.json"):
        record.write_text("")
    prepare(prepare_data, [corpus], data)
    capsys.readouterr()
    prepare(prepare_data, [corpus], data)
    assert capsys.readouterr().out.count("there already") == 2


def test_two_at_once_do_not_write_into_each_others_files(prepare_data, tmp_path):
    """One that is stopped later leaves those of the other as they were."""

    def finish(path: Path) -> None:
        path.write_text("whole")
        with pytest.raises(KeyboardInterrupt):
            prepare_data.make("tokens", begin, tmp_path / "target", {})

    def begin(path: Path) -> None:
        path.write_text("ha")
        raise KeyboardInterrupt

    assert prepare_data.make("tokens", finish, tmp_path / "target", {})
    assert (tmp_path / "target").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "target.json"]
