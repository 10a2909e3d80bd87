"""Seconds of forward and backward of some part of a model, by what they are spent on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_2bw.planner.cost.speeds import Machine


class Product(NamedTuple):
    """A kernel that multiplies ``count`` times (rows, inner) and (inner, columns), weights of a layer among them."""

    rows: float
    columns: float
    inner: float
    count: float = 1
    gathers: bool = False
    """Sequence-parallel ranks have a share each of the rows that go in."""
    scatters: bool = False
    """Of those that come out, each has a share of the gradient."""
    after_norm: bool = False
    """The norm's kernel is part of the module that multiplies what it writes."""


class Parts(NamedTuple):
    """Seconds by what they are spent on."""

    products_s: float = 0.0
    """Matrix products and fused attention."""
    elementwise_s: float = 0.0
    """Norms, activation functions, softmax, dropout, residuals, sums of gradients."""
    tensor_parallel_s: float = 0.0
    """Collectives of tensor-parallel ranks."""
    context_parallel_s: float = 0.0
    """Keys and values of other ranks, where they take longer than the attention to those at hand."""
    expert_parallel_s: float = 0.0
    """Tokens to the ranks of their experts, and back."""
    launch_s: float = 0.0
    """Waiting for the host, where it needs longer to launch the kernels than the GPU to run them."""
    measured_s: float = 0.0
    """All of it, where a profile knows no parts."""

    @property
    def total_s(self) -> float:
        return sum(self)

    @classmethod
    def sum(cls, parts: Iterable[Parts]) -> Parts:
        """Of ``parts`` one after the other."""
        return cls(*map(sum, zip(NOTHING, *parts, strict=True)))


NOTHING = Parts()


class Work(NamedTuple):
    """Forward and backward of some part of the model."""

    forward: Parts
    backward: Parts
    again: Parts
    """What the backward computes again first, where recomputation applies."""
    forward_s: float
    backward_s: float
    again_s: float

    @classmethod
    def of(cls, forward: Parts, backward: Parts, again: Parts = NOTHING) -> Work:
        """With the sums, which are needed often."""
        return cls(forward, backward, again, forward.total_s, backward.total_s, again.total_s)


NO_WORK = Work.of(NOTHING, NOTHING)


def launched(parts: Parts, machine: Machine, launches: int) -> Parts:
    """With the wait for the host, where its launches take longer than the kernels."""
    return parts._replace(launch_s=max(0.0, launches * machine.launch_s - parts.total_s))
