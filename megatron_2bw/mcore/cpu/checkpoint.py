"""What Megatron's checkpoints lack without a GPU.

An asynchronous save hands tensors to another process, which is safe for tensors that are copied from a GPU first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def copied(prepare_write_data: Callable[..., None]) -> Callable[..., None]:
    """Another process sees CPU tensors as shared memory, which training goes on to change."""

    @functools.wraps(prepare_write_data)
    def wrapper(self: Any, *args: Any, **keywords: Any) -> None:
        prepare_write_data(self, *args, **keywords)
        self.write_buckets = [
            (path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, key, (objects, tensors) in self.write_buckets
        ]

    return wrapper


def forked(get_process: Callable[..., Any]) -> Any:
    """A forked process has the CPU backend; a new one would look for a GPU."""

    def wrapper(cls: Any, rank: int, mp_mode: str = "fork", *args: Any, **keywords: Any) -> Any:
        return get_process(rank, "fork", *args, **keywords)

    return classmethod(wrapper)
