"""What Megatron's checkpoints lack without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forked(get_process: Callable[..., Any]) -> Any:
    """A forked process has the CPU backend; a new one would look for a GPU."""

    def wrapper(cls: Any, rank: int, mp_mode: str = "fork", *args: Any, **keywords: Any) -> Any:
        return get_process(rank, "fork", *args, **keywords)

    return classmethod(wrapper)
