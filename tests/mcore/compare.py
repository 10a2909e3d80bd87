"""How far two runs are apart."""

from __future__ import annotations

from collections.abc import Mapping
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

    def within(self, limits: Deviation) -> bool:
        return all(found <= limit for found, limit in zip(self, limits, strict=True))

    def at_least(self, floor: float) -> Deviation:
        return Deviation(*(max(value, floor) for value in self))


def deviation(found: Results, expected: Results) -> Deviation:
    """Of losses, norms and final weights; a shape or name that differs is an error."""
    return Deviation(
        losses=_largest_relative(found.losses, expected.losses),
        norms=_largest_relative(found.norms, expected.norms),
        weights=max(
            ((tensor.double() - expected.final[name].double()).norm() / expected.final[name].double().norm()).item()
            for name, tensor in _paired(found.final, expected.final)
        ),
    )


def differing(found: Results, expected: Results, *, norms: bool = True) -> list[str]:
    """What is not equal to the last bit, by name; norms can be left out."""
    pairs = {"losses": (found.losses, expected.losses)}
    pairs |= {name: (tensor, expected.final[name]) for name, tensor in _paired(found.final, expected.final)}
    if norms:
        pairs["norms"] = found.norms, expected.norms
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def _largest_relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(found.shape)} and {tuple(expected.shape)}")
    return ((found.double() - expected.double()).abs() / expected.double().abs()).max().item()


def _paired(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    if found.keys() != expected.keys():
        raise ValueError(f"weights differ in name: {sorted(found.keys() ^ expected.keys())}")
    return list(found.items())
