"""Gradients of a finished batch, kept while the next one accumulates its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


class CapturedGradients:
    """One flat copy per gradient buffer, with a view per parameter that mirrors ``main_grad``.

    Args:
        buffers: flat accumulation buffers, in the precision of ``main_grad``.
        parameters: parameters whose ``main_grad`` is a view into one of the buffers.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], parameters: Iterable[torch.nn.Parameter]) -> None:
        self._sources = tuple(buffers)
        self.buffers = tuple(torch.zeros_like(buffer) for buffer in buffers)
        pairs = zip(self._sources, self.buffers, strict=True)
        self._by_storage = {source.untyped_storage().data_ptr(): (source, copy) for source, copy in pairs}
        self._views = tuple((parameter, self.view_of(parameter)) for parameter in parameters)

    def view_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The captured gradient of ``parameter``, in its shape."""
        grad = parameter.main_grad
        source, copy = self._by_storage[grad.untyped_storage().data_ptr()]
        start = grad.storage_offset() - source.storage_offset()
        return copy[start : start + grad.numel()].view(grad.shape)

    def capture(self) -> None:
        """Copy the accumulated gradients; the buffers may then be zeroed for the next batch."""
        for source, copy in zip(self._sources, self.buffers, strict=True):
            copy.copy_(source)

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.buffers[0].device

    @contextmanager
    def as_main_grad(self) -> Iterator[None]:
        """Inside, every parameter's ``main_grad`` is its captured gradient."""
        accumulating = [parameter.main_grad for parameter, _ in self._views]
        for parameter, view in self._views:
            parameter.main_grad = view
        try:
            yield
        finally:
            for (parameter, _), grad in zip(self._views, accumulating, strict=True):
                parameter.main_grad = grad
