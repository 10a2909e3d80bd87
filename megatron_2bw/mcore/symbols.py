"""Replacing Megatron's names, checked and reversible."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUPPORTED_VERSIONS = "0.19.2"


class UnsupportedMegatronError(RuntimeError):
    """This Megatron lacks a symbol that we wrap, or changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One replaced binding.

    Modules import functions by name, so what matters is where a name is looked up, not where it is
    defined.
    """

    module: str
    name: str
    wrapper: Callable[..., Any]
    """Called as ``wrapper(original, *args, **kwargs)`` in place of the original."""
    parameters: tuple[str, ...] = ()
    """Parameters that the wrapper relies on."""
    why: str
    """What breaks without this hook."""


def megatron_version() -> str:
    """Version of the installed megatron-core."""
    from megatron.core.package_info import __version__

    return __version__


def check(hooks: tuple[Hook, ...]) -> None:
    """Refuse a Megatron in which one of ``hooks`` has nothing to hold on to.

    Raises:
        UnsupportedMegatronError: names the symbol, what is wrong with it and the versions.
    """
    for hook in hooks:
        symbol = f"{hook.module}.{hook.name}"
        try:
            target = getattr(importlib.import_module(hook.module), hook.name)
        except (ImportError, AttributeError) as error:
            raise _unsupported(symbol, f"is missing ({error})") from error
        parameters = inspect.signature(target).parameters
        missing = [name for name in hook.parameters if name not in parameters]
        if missing:
            raise _unsupported(symbol, f"no longer takes {', '.join(missing)}")


def apply(hook: Hook) -> None:
    """Put the wrapper in place of the original, once."""
    module = importlib.import_module(hook.module)
    original = getattr(module, hook.name)
    if getattr(original, "_megatron_2bw_hook", None) is not None:
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook.wrapper(original, *args, **kwargs)

    replacement._megatron_2bw_hook = hook
    setattr(module, hook.name, replacement)


def revert(hook: Hook) -> None:
    """Put the original back, if the wrapper is in place."""
    module = importlib.import_module(hook.module)
    replacement = getattr(module, hook.name)
    if getattr(replacement, "_megatron_2bw_hook", None) is not None:
        setattr(module, hook.name, replacement.__wrapped__)


def _unsupported(symbol: str, problem: str) -> UnsupportedMegatronError:
    return UnsupportedMegatronError(
        f"{symbol} {problem} in megatron-core {megatron_version()}; this release of megatron_2bw works with "
        f"megatron-core {SUPPORTED_VERSIONS}: install that version, or a newer megatron_2bw"
    )
