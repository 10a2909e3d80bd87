"""Training in one process with gradients of the newest weights or of those before.

The loop is that of the tests' oracle: W(t+1) = W(t) - lr(t) * u(grad f(W(max(t - delay, 0)))), or after N steps without
a delay W(max(t - delay, N)). Where only the first sequences of a batch are delayed, the others have W(t).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from downstream import accuracy
from emerging_optimizers.orthogonalized_optimizers import Muon
from language_models import BERT, GPT, Size, Transformer, batches, texts

from megatron_2bw.runtime.corrections import CORRECTIONS, UpdateLead

VALIDATION_BATCHES = {GPT: 32, BERT: 128}
"""BERT predicts fewer bytes of each."""
CLIP, WEIGHT_DECAY, BETA2 = 1.0, 0.1, 0.95
MUON_SCALE = 0.2
"""Gives Muon's updates the size of Adam's (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    size: Size
    delay: int
    lr: float
    """Towards which it warms up, while a cosine takes it down to a tenth: see `rate`."""
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
    delayed: int | None = None
    """Sequences of a batch with gradients of older weights; None for all."""
    synchronous: int = 0
    """Steps without a delay, before it begins."""
    warmup: int = 100
    """Steps, of the learning rate."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it."""

    losses: list[float]
    """Of the newest weights on validation data, after each fifth of the steps; fewer if a loss was not finite."""
    accuracy: float | None = None
    """Of BERT after fine-tuning."""


def train(trial: Trial) -> Result:
    """Run it.

    As in mixed precision, optimizers have main weights of their own, and the model has copies.
    """
    torch.manual_seed(trial.seed)
    size = trial.size
    model = Transformer(size).to(size.device)
    weights = list(model.parameters())
    mains = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in model.named_parameters()}
    optimizers = _optimizers(trial, mains)
    correction = CORRECTIONS[trial.correction](trial.lead) if trial.correction != "none" else None
    for optimizer in optimizers if correction is not None else ():
        correction.attach(optimizer)
    data = batches(texts(size.corpus)[0], size, seed=1 + trial.seed)
    newest = [weight.detach().clone() for weight in weights]
    older = [weight.detach().clone() for weight in weights]
    found, fifths = [], {round(size.steps * fifth / 5) for fifth in range(1, 6)}
    for step in range(size.steps):
        is_delayed = trial.delay > 0 and step > trial.synchronous
        if correction is not None:
            correction.delayed = step >= trial.synchronous
        count = (size.batch if trial.delayed is None else trial.delayed) if is_delayed else 0
        inputs, labels = (part.to(size.device) for part in next(data))
        for part, values in ((slice(count), older), (slice(count, None), newest)):
            share = len(inputs[part]) / size.batch
            if share > 0:
                _load(weights, values)
                loss = _loss(model, inputs[part], labels[part])
                if not loss.isfinite():
                    return Result(losses=found)
                (loss * share).backward()
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
        if step + 1 in fifths:
            _load(weights, newest)
            found.append(validation_loss(model, size))
    return Result(losses=found, accuracy=accuracy(model, size, trial.seed) if size.kind == BERT else None)


def _loss(model: Transformer, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=inputs.is_cuda):
        return model(inputs, labels)


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
    """Linear warm-up, times a cosine down to a tenth that begins with the first step, not after the warm-up.

    So a warm-up of 20% of the steps goes to 91% of ``trial.lr``, one of 40% to 69%, and none lasts for more than 45%.
    """
    progress = step / trial.size.steps
    return trial.lr * min(1.0, (step + 1) / trial.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def validation_loss(model: Transformer, size: Size) -> float:
    """Mean over the same batches every time."""
    _, held_out = texts(size.corpus)
    data = batches(held_out, size, seed=0)
    count = VALIDATION_BATCHES[size.kind]
    with torch.no_grad():
        losses = (_loss(model, *(part.to(size.device) for part in next(data))) for _ in range(count))
        return sum(map(float, losses)) / count
