"""A task to fine-tune on: which package of Python's standard library a few bytes are from."""

from __future__ import annotations

import torch
from language_models import PACKAGES, Size, Transformer, packages, windows
from torch.nn import functional

STEPS, BATCH, VALIDATION = 200, 32, 2048
LR = 2e-3


def accuracy(model: Transformer, size: Size, seed: int) -> float:
    """Share of the windows of held-out modules that are told right after fine-tuning, without a delay.

    All of the model and a linear head on its mean, by AdamW with a learning rate that falls to 0.

    Args:
        model: pretrained; changed.
        size: of it.
        seed: of head and windows.
    """
    torch.manual_seed(seed)
    head = torch.nn.Linear(size.hidden, len(PACKAGES))
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=LR, foreach=True)
    training, held_out = packages()
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        found, package = _windows(training, BATCH, size, generator)
        functional.cross_entropy(head(model.hidden(found).mean(dim=1)), package).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, package = _windows(held_out, VALIDATION, size, torch.Generator().manual_seed(0))
    with torch.no_grad():
        told = torch.cat([head(model.hidden(some).mean(dim=1)).argmax(dim=1) for some in found.split(BATCH)])
    return float((told == package).float().mean())


def _windows(
    texts: list[torch.Tensor], count: int, size: Size, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, sequence) bytes and their (count,) packages, all packages as often."""
    package = torch.arange(count) % len(texts)
    found = torch.empty(count, size.sequence, dtype=torch.int64)
    for number, text in enumerate(texts):
        of_it = package == number
        found[of_it] = windows(text, int(of_it.sum()), size.sequence, generator)
    return found, package
