"""How far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .harness import Results

ULP = torch.finfo(torch.float32).eps
FLOOR = 8 * ULP
"""Runs this close are equal but for the order of additions: Megatron's own layouts are 1 to 5 units in the
last place apart in most settings, and 23 in one."""


class Deviation(NamedTuple):
    """Largest relative differences between two runs."""

    losses: float
    norms: float
    weights: float
    """Over all tensors: L2 norm of the difference over L2 norm."""
    gradients: float
    """Over all tensors and updates; 0 where they are not recorded. See ``_of_gradients``."""

    def within(self, limits: Deviation) -> bool:
        return all(found <= limit for found, limit in zip(self, limits, strict=True))

    def at_least(self, floor: float) -> Deviation:
        return Deviation(*(max(value, floor) for value in self))


def deviation(found: Results, expected: Results) -> Deviation:
    """Of losses, norms, final weights and gradients; a shape or name that differs is an error."""
    return Deviation(
        losses=_largest_relative(found.losses, expected.losses),
        norms=norm_deviation(found, expected),
        weights=_largest(
            _relative(tensor, expected.final[name]) for name, tensor in _paired(found.final, expected.final)
        ),
        gradients=_of_gradients(found.gradients, expected.gradients),
    )


def norm_deviation(found: Results, expected: Results) -> float:
    """Of the norms of updates that were not skipped, which must be the same ones."""
    done = ~expected.norms.isnan()
    if not torch.equal(~found.norms.isnan(), done):
        return math.inf
    pairs = [(found.norms, expected.norms), (found.norms_apart, expected.norms_apart)]
    return _largest(_largest_relative(a[done], b[done]) for a, b in pairs)


def differing(found: Results, expected: Results, *, norms: bool = True) -> list[str]:
    """What is not equal to the last bit, by name; norms can be left out, but which are skipped cannot."""
    pairs = {
        "losses": (found.losses, expected.losses),
        "gradients of the loss": (found.seeds, expected.seeds),
        "skipped updates": (found.norms.isnan(), expected.norms.isnan()),
    }
    for what in ("final", "main", "gradients"):
        for name, tensor in _paired(getattr(found, what), getattr(expected, what)):
            pairs[f"{what} {name}"] = tensor, getattr(expected, what)[name]
    if norms:
        pairs["norms"] = found.norms.nan_to_num(), expected.norms.nan_to_num()
        pairs["norms of their own"] = found.norms_apart.nan_to_num(-1.0), expected.norms_apart.nan_to_num(-1.0)
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """0 for equal ones, and so for a bias that is back at zero."""
    apart = (found.double() - expected.double()).norm()
    return (apart / expected.double().norm()).item() if apart != 0 else 0.0


def _of_gradients(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Per tensor and update: L2 norm of the difference over L2 norm, or over 1% of the whole gradient's norm.

    The true gradient of some weights is zero (key biases), and then all that is there is rounding.
    """
    if not expected:
        return 0.0
    own = {name: tensor.double().flatten(1).norm(dim=1) for name, tensor in expected.items()}
    least = 0.01 * torch.stack(list(own.values())).norm(dim=0)
    apart = {
        name: (tensor.double() - expected[name].double()).flatten(1).norm(dim=1)
        for name, tensor in _paired(found, expected)
    }
    return _largest((apart[name] / own[name].maximum(least)).max().item() for name in apart)


def _largest(values: Iterable[float]) -> float:
    """NaN if one is, which ``max`` may hide."""
    return torch.tensor(list(values), dtype=torch.double).max().item()


def _largest_relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(found.shape)} and {tuple(expected.shape)}")
    apart = (found.double() - expected.double()).abs()
    return (apart / expected.double().abs()).where(apart != 0, 0.0).max().item()


def _paired(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    if found.keys() != expected.keys():
        raise ValueError(f"names differ: {sorted(found.keys() ^ expected.keys())}")
    return list(found.items())
