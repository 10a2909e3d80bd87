"""A small GPT and a small BERT on bytes, and the texts that they read.

torch's own layers; pre-norm, learned positions, embeddings tied to the output.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from prepare_corpus import source_files

PYTHON, CPP = "Python", "C++"
"""Corpora: the sources of Python's standard library, the headers that come with torch."""
GPT, BERT = "GPT", "BERT"
HELD_OUT = 10
"""Every tenth document is for validation."""
MASK, MASKED, UNSEEN = 0, 0.15, -100
"""BERT's: the byte that no text has, the share of bytes to predict, and the label of the others."""
PACKAGES = ("asyncio", "email", "idlelib", "lib2to3", "multiprocessing", "tkinter", "xml")
"""Of Python's standard library: those with enough modules to hold some out."""

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the model and of its training."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    """Sequences."""
    steps: int
    corpus: str = PYTHON
    kind: str = GPT
    device: str = "cpu"
    """On a GPU, what autocast computes in bf16 is in bf16."""


class Transformer(torch.nn.Module):
    """GPT attends to what came before, BERT to everything."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.is_causal = size.kind == GPT
        self.tokens = torch.nn.Embedding(256, size.hidden)
        self.positions = torch.nn.Parameter(torch.zeros(size.sequence, size.hidden))
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                size.hidden, size.hidden // 32, 4 * size.hidden, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = torch.nn.LayerNorm(size.hidden)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(size.sequence) if self.is_causal else None
        self.register_buffer("mask", mask)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, hidden) of (batch, sequence) bytes."""
        hidden = self.tokens(inputs) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=self.is_causal)
        return self.norm(hidden)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss over all labels that are not UNSEEN, both (batch, sequence)."""
        logits = self.hidden(inputs) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=UNSEEN)


@lru_cache(maxsize=1)
def texts(corpus: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes, uint8."""
    documents = [path.read_bytes() for path in _files(corpus)]
    training = [text for number, text in enumerate(documents) if number % HELD_OUT]
    return _bytes(training), _bytes(documents[::HELD_OUT])


@lru_cache(maxsize=1)
def packages() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Training and validation bytes of each of PACKAGES, of the documents that ``texts`` has in either."""
    library = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, tuple[list[bytes], list[bytes]]] = {name: ([], []) for name in PACKAGES}
    for number, path in enumerate(_files(PYTHON)):
        package = path.relative_to(library).parts[0]
        if package in documents:
            documents[package][number % HELD_OUT == 0].append(path.read_bytes())
    return tuple([_bytes(documents[name][part]) for name in PACKAGES] for part in (0, 1))


def _files(corpus: str) -> list[Path]:
    if corpus == PYTHON:
        return source_files(Path(sysconfig.get_path("stdlib")))
    headers = sorted((Path(torch.__file__).parent / "include").rglob("*.h"))
    return [path for path in headers if path.parent.name != "ops"]  # Those are generated.


def _bytes(documents: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)


def windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """(count, length) bytes from anywhere in ``text``, int64."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def batches(text: torch.Tensor, size: Size, seed: int) -> Iterator[Batch]:
    """Inputs and labels, (batch, sequence) each: the next byte for GPT, masked bytes for BERT."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        if size.kind == GPT:
            found = windows(text, size.batch, size.sequence + 1, generator)
            yield found[:, :-1], found[:, 1:]
        else:
            yield masked(windows(text, size.batch, size.sequence, generator), generator)


def masked(found: torch.Tensor, generator: torch.Generator) -> Batch:
    """Of the bytes to predict, 80% become MASK, 10% another byte and 10% stay (Devlin et al., arXiv 1810.04805)."""
    chosen, change = (torch.rand(found.shape, generator=generator) for _ in range(2))
    other = torch.randint(256, found.shape, generator=generator)
    changed = torch.where(change < 0.8, MASK, torch.where(change < 0.9, other, found))
    is_chosen = chosen < MASKED
    return torch.where(is_chosen, changed, found), torch.where(is_chosen, found, UNSEEN)
