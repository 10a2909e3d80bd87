"""A small GPT on bytes, trained in one process with gradients of the newest weights or of those before.

The loop is that of the tests' oracle: W(t+1) = W(t) - lr(t) * u(grad f(W(max(t - delay, 0)))), or after N steps without
a delay W(max(t - delay, N)).
"""

from __future__ import annotations

import contextlib
import math
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from emerging_optimizers.orthogonalized_optimizers import Muon
from prepare_corpus import source_files

from megatron_2bw.runtime.corrections import CORRECTIONS, UpdateLead

PYTHON, CPP = "Python", "C++"
"""Corpora: the sources of Python's standard library, the headers that come with torch."""
HELD_OUT = 10
"""Every tenth document is for validation."""
VALIDATION_BATCHES = 32
CLIP, WEIGHT_DECAY, BETA2 = 1.0, 0.1, 0.95
MUON_SCALE = 0.2
"""Gives Muon's updates the size of Adam's (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982)."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    size: Size
    delay: int
    lr: float
    """At the end of the warm-up; a tenth of it at the end."""
    beta1: float = 0.9
    """Of AdamW, under Muon for what Muon leaves to it: vectors and the embedding."""
    momentum: float | None = None
    """Of Muon; None for AdamW alone."""
    nesterov: bool = True
    """Of Muon."""
    correction: str = "none"
    """Of the delay, as in ``--delay-correction``."""
    lead: float = 0.0
    """Of the correction."""
    synchronous: int = 0
    """Steps without a delay, before it begins."""
    warmup: int = 100
    """Steps, of the learning rate."""
    seed: int = 0


class Gpt(torch.nn.Module):
    """Pre-norm, learned positions, tied embeddings; torch's own layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, size.hidden)
        self.positions = torch.nn.Parameter(torch.zeros(size.sequence, size.hidden))
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                size.hidden, size.hidden // 32, 4 * size.hidden, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = torch.nn.LayerNorm(size.hidden)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(size.sequence))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each of (batch, sequence + 1) bytes from those before."""
        hidden = self.tokens(tokens[:, :-1]) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits = self.norm(hidden) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@lru_cache(maxsize=1)
def texts(corpus: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes, uint8."""
    if corpus == PYTHON:
        documents = [path.read_bytes() for path in source_files(Path(sysconfig.get_path("stdlib")))]
    else:
        headers = sorted((Path(torch.__file__).parent / "include").rglob("*.h"))
        documents = [path.read_bytes() for path in headers if path.parent.name != "ops"]  # Those are generated.
    held_out = documents[::HELD_OUT]
    training = [text for number, text in enumerate(documents) if number % HELD_OUT]
    return _bytes(training), _bytes(held_out)


def _bytes(documents: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)


def batches(text: torch.Tensor, size: Size, seed: int) -> Iterator[torch.Tensor]:
    """(batch, sequence + 1), int64, anywhere in the text."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(size.sequence + 1)
    while True:
        starts = torch.randint(len(text) - len(window), (size.batch, 1), generator=generator)
        yield text[starts + window].long()


def train(trial: Trial) -> list[float]:
    """Validation losses of the newest weights after each fifth of the steps; shorter if a loss is not finite.

    As in mixed precision, optimizers have main weights of their own, and the model has copies.
    """
    torch.manual_seed(trial.seed)
    size = trial.size
    model = Gpt(size)
    weights = list(model.parameters())
    mains = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in model.named_parameters()}
    optimizers = _optimizers(trial, mains)
    correction = CORRECTIONS[trial.correction](trial.lead) if trial.correction != "none" else None
    for optimizer in optimizers if correction is not None else ():
        correction.attach(optimizer)
    data = batches(texts(size.corpus)[0], size, seed=1 + trial.seed)
    newest = [weight.detach().clone() for weight in weights]
    older = [weight.detach().clone() for weight in weights]
    found = []
    for step in range(size.steps):
        _load(weights, older if trial.delay and step > trial.synchronous else newest)
        if correction is not None:
            correction.delayed = step >= trial.synchronous
        loss = model(next(data))
        if not loss.isfinite():
            return found
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        for main, weight in zip(mains.values(), weights, strict=True):
            main.grad, weight.grad = weight.grad, None
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(trial, step)
            optimizer.step()
        older, newest = newest, older
        with contextlib.ExitStack() as shown:
            for optimizer in optimizers if isinstance(correction, UpdateLead) else ():
                shown.enter_context(correction.shown(optimizer))
            _load(newest, [main.detach() for main in mains.values()])
        if (step + 1) % (size.steps // 5) == 0:
            _load(weights, newest)
            found.append(validation_loss(model, size))
    return found


def _load(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(weights, values)


def _optimizers(trial: Trial, mains: dict[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW; with Muon, that for the matrices of the layers."""
    by_muon = [
        main
        for name, main in mains.items()
        if trial.momentum is not None and name.startswith("layers.") and main.dim() == 2
    ]
    known = set(by_muon)
    others = [main for main in mains.values() if main not in known]
    groups = [
        {"params": [main for main in others if main.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [main for main in others if main.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=trial.lr, betas=(trial.beta1, BETA2), foreach=True)
    if trial.momentum is None:
        return [adam]
    muon = Muon(
        by_muon,
        lr=trial.lr,
        momentum=trial.momentum,
        weight_decay=WEIGHT_DECAY,
        nesterov=trial.nesterov,
        fp32_matmul_prec="highest",
        extra_scale_factor=MUON_SCALE,
    )
    return [adam, muon]


def rate(trial: Trial, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    progress = step / trial.size.steps
    return trial.lr * min(1.0, (step + 1) / trial.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def validation_loss(model: Gpt, size: Size) -> float:
    """Mean over the same batches every time."""
    _, held_out = texts(size.corpus)
    data = batches(held_out, size, seed=0)
    with torch.no_grad():
        return sum(float(model(next(data))) for _ in range(VALIDATION_BATCHES)) / VALIDATION_BATCHES
