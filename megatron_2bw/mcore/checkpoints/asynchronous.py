"""Asynchronous saves of tensors on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def copied(prepare_write_data: Callable[..., None]) -> Callable[..., None]:
    """Another process would see tensors on the host as shared memory, which the next update changes.

    Those on a GPU are copied from there before training goes on. On the host are all, without a GPU, and what
    ``--optimizer-cpu-offload`` leaves to it.
    """

    @functools.wraps(prepare_write_data)
    def wrapper(self: Any, *args: Any, **keywords: Any) -> None:
        prepare_write_data(self, *args, **keywords)
        self.write_buckets = [
            (path, key, (objects, [(item, _apart(tensor)) for item, tensor in tensors]))
            for path, key, (objects, tensors) in self.write_buckets
        ]

    return wrapper


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor
