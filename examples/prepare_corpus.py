"""Build training data from text that every machine has: the sources of Python's standard library.

    python examples/prepare_corpus.py --output quickstart/data

writes three things into the folder, each only if it is not there yet:

    corpus.jsonl               one document per source file, {"path": ..., "text": ...}
    tokenizer.model            a SentencePiece model trained on them
    corpus_document.bin, .idx  the tokens, in Megatron's indexed format

To train on your own text, write your own ``corpus.jsonl`` there first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MIN_CORPUS_BYTES = 500_000
"""A smaller standard library was stripped; a GPT would learn it by heart."""
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
    size_bytes = 0
    documents = 0
    with corpus.open("w", encoding="utf-8") as lines:
        for path in source_files(library):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if not text.strip():
                continue
            if size_bytes + len(text.encode()) > max_bytes:
                break
            lines.write(json.dumps({"path": path.relative_to(library).as_posix(), "text": text}) + "\n")
            size_bytes += len(text.encode())
            documents += 1
    if size_bytes < min(MIN_CORPUS_BYTES, max_bytes // 2):
        raise ValueError(
            f"{library} holds only {size_bytes:,} bytes of Python source; at least {MIN_CORPUS_BYTES:,} are needed: "
            f"use a Python with its full standard library, or write documents into {corpus.with_suffix('')} yourself"
        )
    print(f"  {documents} documents, {size_bytes / 1e6:.1f} MB of text", flush=True)


def read_corpus(corpus: Path) -> Iterator[str]:
    """The text of each document."""
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_tokenizer(corpus: Path, model: Path, *, vocab_size: int) -> None:
    """Train a byte-pair encoding that keeps every character of the text, white space included."""
    import sentencepiece

    with model.open("wb") as model_file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in read_corpus(corpus) for line in text.split("\n") if line),
            model_writer=model_file,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,  # No unknown characters; line breaks become a token of their own.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # Indentation.
            max_sentence_length=1 << 16,
            num_threads=1,  # The same model on every machine.
            minloglevel=2,
        )


def write_dataset(corpus: Path, tokenizer: Path, prefix: Path) -> None:
    """Write each document's tokens and an end-of-document token with Megatron's own builder."""
    import sentencepiece
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(processor.vocab_size()))
    tokens = 0
    shown_s = time.monotonic()
    for document, text in enumerate(read_corpus(corpus), start=1):
        ids = [*processor.encode(text), processor.eos_id()]
        builder.add_document(ids, [len(ids)])
        tokens += len(ids)
        if time.monotonic() - shown_s > 2.0:
            shown_s = time.monotonic()
            print(f"  {document} documents, {tokens / 1e6:.2f} M tokens ...", flush=True)
    builder.finalize(f"{prefix}.idx")
    print(f"  {tokens / 1e6:.2f} M tokens", flush=True)


def once(title: str, make: Callable[[Path], None], target: Path, suffixes: tuple[str, ...] = ("",)) -> bool:
    """Make ``target`` unless it is there; an interrupted attempt leaves nothing that looks finished.

    ``make`` gets a temporary name; its files, one per suffix, are renamed at the end. The last suffix
    marks the whole as finished.

    Returns:
        Whether it was made now.
    """
    if Path(f"{target}{suffixes[-1]}").exists():
        print(f"{title}: there already, {target}", flush=True)
        return False
    print(f"{title} ...", flush=True)
    start_s = time.monotonic()
    temporary = target.with_name(f"unfinished-{target.name}")
    make(temporary)
    for suffix in suffixes:
        os.replace(f"{temporary}{suffix}", f"{target}{suffix}")
    print(f"{title}: {time.monotonic() - start_s:.0f} s, {target}", flush=True)
    return True


def prepare(output: Path, library: Path, *, max_bytes: int, vocab_size: int) -> None:
    """Do the three steps; what a new step made invalid is made again."""
    output.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer, prefix = output / "corpus.jsonl", output / "tokenizer.model", output / "corpus_document"
    if once("corpus", lambda path: write_corpus(library, path, max_bytes=max_bytes), corpus):
        tokenizer.unlink(missing_ok=True)
    if once("tokenizer", lambda path: train_tokenizer(corpus, path, vocab_size=vocab_size), tokenizer):
        Path(f"{prefix}.idx").unlink(missing_ok=True)
    if once("dataset", lambda path: write_dataset(corpus, tokenizer, path), prefix, (".bin", ".idx")):
        # Megatron's sample index is keyed by the dataset's name, not by its content.
        shutil.rmtree(output / "cache", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the three results")
    parser.add_argument("--max-bytes", type=int, default=6_000_000, help="bound on the corpus (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=2560, help="pieces of the tokenizer (default %(default)s)")
    parser.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="where to look for *.py files"
    )
    args = parser.parse_args()
    try:
        prepare(args.output, args.library, max_bytes=args.max_bytes, vocab_size=args.vocab_size)
    except ValueError as error:
        sys.exit(f"prepare_corpus: {error}")


if __name__ == "__main__":
    main()
