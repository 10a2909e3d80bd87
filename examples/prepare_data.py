"""Make training data of text: a vocabulary, and the tokens in Megatron's indexed format.

    python examples/prepare_data.py --input corpus.jsonl --output data --model gpt
    python examples/prepare_data.py --input chapter1.txt chapter2.txt --output data --model bert

reads JSON lines, {"text": ...}, one document each, or other files, one document each, and writes

    data/gpt.model               a SentencePiece vocabulary trained on them
    data/gpt_document.bin, .idx  the tokens of each document, and a token that ends it

or, for BERT, ``bert.model`` with BERT's special tokens and ``bert_sentence.bin, .idx``, where every line that is not
blank is a sentence. What was made of the same files in the same way is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BERT_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Of a vocabulary for BERT, by id; Megatron's dataset needs the padding to be token 0."""
LEAST_DOCUMENTS = 20
"""Megatron divides documents, not tokens, among training and validation: 5% of them have to be one."""
LONGEST_SENTENCE = 256
"""In tokens; a longer one is cut. Megatron drops documents with a sentence of more than 512."""


def read_documents(files: Sequence[Path], key: str) -> Iterator[str]:
    """The text of each document that is not blank.

    Raises:
        ValueError: a file is not UTF-8, or a line of a ``.jsonl`` file is not blank and not a JSON object with text
            under ``key``.
    """
    for file in files:
        try:
            yield from (text for text in _texts(file, key) if text.strip())
        except UnicodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}") from error


def _texts(file: Path, key: str) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as lines:  # Some programs begin a file with a mark.
        if file.suffix != ".jsonl":
            yield lines.read()
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _text(line, key, f"{file}:{number}")


def _text(line: str, key: str, place: str) -> str:
    try:
        text = json.loads(line)[key] + ""
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: not a JSON object with text under {key!r}; name another with --key") from error
    return text.encode(errors="replace").decode()  # Half a surrogate pair is no character.


def train_vocabulary(documents: Iterator[str], path: Path, *, size: int, model: str) -> None:
    """Train a byte-pair encoding of ``size`` pieces that has no unknown characters.

    For GPT it keeps white space as it is, and so the text can be had back; for BERT, pieces are parts of words.
    """
    import sentencepiece

    if model == "bert":
        pad, unknown, *rest = BERT_PIECES
        ours: dict[str, Any] = {
            "pad_id": 0,
            "pad_piece": pad,
            "unk_id": 1,
            "unk_piece": unknown,
            "bos_id": -1,
            "eos_id": -1,
            "control_symbols": rest,
        }
    else:
        ours = {"remove_extra_whitespaces": False, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in documents for line in text.split("\n") if line),
            model_writer=file,
            model_type="bpe",
            vocab_size=size,
            byte_fallback=True,
            normalization_rule_name="identity",
            max_sentence_length=1 << 16,
            num_threads=1,  # The same vocabulary on every machine.
            minloglevel=2,
            **ours,
        )


def write_tokens(documents: Iterator[str], vocabulary: Path, prefix: Path, *, model: str) -> None:
    """Write the tokens with Megatron's own builder.

    Raises:
        ValueError: there are too few documents that Megatron can use.
    """
    import sentencepiece
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    processor = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(processor.vocab_size()))
    pieces = sentences_of if model == "bert" else document_of
    tokens = usable = count = 0
    shown_s = time.monotonic()
    for count, text in enumerate(documents, start=1):
        parts = pieces(text, processor)
        usable += model != "bert" or len(parts) > 1
        builder.add_document([token for part in parts for token in part], [len(part) for part in parts])
        tokens += sum(map(len, parts))
        if time.monotonic() - shown_s > 2.0:
            shown_s = time.monotonic()
            print(f"  {count} documents, {tokens / 1e6:.2f} M tokens ...", flush=True)
    builder.finalize(f"{prefix}.idx")
    kind = "documents of at least two lines" if model == "bert" else "documents"
    if usable < LEAST_DOCUMENTS:
        raise ValueError(
            f"the input holds {usable} {kind}, and {LEAST_DOCUMENTS} are needed to keep some for validation: "
            "give more files, or JSON lines"
        )
    print(f"  {count} documents, {tokens / 1e6:.2f} M tokens", flush=True)
    if usable < count:
        print(f"  Megatron leaves {count - usable} of them out: it compares lines of one document", flush=True)


def document_of(text: str, processor: Any) -> list[list[int]]:
    """All tokens, and the one that ends a document."""
    return [[*processor.encode(text), processor.eos_id()]]


def sentences_of(text: str, processor: Any) -> list[list[int]]:
    """Tokens per line."""
    lines = (processor.encode(line) for line in text.split("\n"))
    return [line[at : at + LONGEST_SENTENCE] for line in lines for at in range(0, len(line), LONGEST_SENTENCE)]


def prepare(files: Sequence[Path], output: Path, *, model: str, key: str, size: int) -> None:
    """Make what is missing or was made of something else.

    Raises:
        ValueError: the input cannot be used.
    """
    output.mkdir(parents=True, exist_ok=True)
    vocabulary, prefix = output / f"{model}.model", output / f"{model}_{'sentence' if model == 'bert' else 'document'}"
    states = ((file.resolve(), file.stat()) for file in files)
    made_of = {"files": [[str(file), s.st_size, s.st_mtime_ns] for file, s in states], "key": key, "size": size}

    def train(path: Path) -> None:
        train_vocabulary(read_documents(files, key), path, size=size, model=model)

    def write(path: Path) -> None:
        write_tokens(read_documents(files, key), vocabulary, path, model=model)

    make(f"vocabulary of {size} pieces", train, vocabulary, made_of)
    made_of["vocabulary"] = vocabulary.stat().st_mtime_ns
    if make("tokens", write, prefix, made_of, suffixes=(".bin", ".idx")):
        # Megatron's sample index is keyed by the dataset's name, not by its content.
        shutil.rmtree(output / "cache", ignore_errors=True)


def make(
    title: str,
    run: Callable[[Path], None],
    target: Path,
    made_of: dict[str, Any],
    suffixes: tuple[str, ...] = ("",),
) -> bool:
    """Make ``target`` unless it is there and made of the same; half of it is never left under its name.

    ``run`` gets a temporary name, another one in each process; its files, one per suffix, are renamed at the end. A
    file beside them says what they are made of, and that they are finished.

    Returns:
        Whether it was made now.
    """
    record = Path(f"{target}.json")
    if _recorded(record) == made_of:
        print(f"{title}: there already, {target}", flush=True)
        return False
    print(f"{title} ...", flush=True)
    start_s = time.monotonic()
    record.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        run(temporary)
        Path(f"{temporary}.json").write_text(json.dumps(made_of), encoding="utf-8")
        for suffix in (*suffixes, ".json"):
            os.replace(f"{temporary}{suffix}", f"{target}{suffix}")
    print(f"{title}: {time.monotonic() - start_s:.0f} s, {target}", flush=True)
    return True


def _recorded(record: Path) -> Any:
    """What a record says, if it is there and whole."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE", help=".jsonl, or text")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", choices=("gpt", "bert"), default="gpt", help="what is to be trained (default gpt)")
    parser.add_argument("--key", default="text", help="of the text in JSON lines (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=2560, help="pieces (default %(default)s)")
    args = parser.parse_args()
    try:
        prepare(args.input, args.output, model=args.model, key=args.key, size=args.vocab_size)
    except (OSError, ValueError, RuntimeError) as error:  # SentencePiece raises the last, on too small a text.
        sys.exit(f"prepare_data: {error}")


if __name__ == "__main__":
    main()
