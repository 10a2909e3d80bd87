"""Replacing Megatron's names, checked and reversible."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

SUPPORTED_VERSIONS = "0.18.2 and 0.19.2"


class UnsupportedMegatronError(RuntimeError):
    """This Megatron lacks a symbol that we wrap, or changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A symbol that we rely on."""

    module: str
    name: str
    """Of a module's attribute, or of a class's, as ``Class.attribute``."""
    parameters: tuple[str, ...] = ()
    """Parameters that we rely on."""
    since: tuple[int, ...] = (0,)
    """First release of Megatron in which we do."""
    until: tuple[int, ...] | None = None
    """First release in which we no longer do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook(Used):
    """One replaced binding.

    Modules import functions by name, so what matters is where a name is looked up, not where it is
    defined.
    """

    wrapper: Callable[..., Any]
    """Called as ``wrapper(original, *args, **kwargs)`` in place of the original."""
    why: str
    """What breaks without this hook."""


def megatron_version() -> str:
    """Version of the installed megatron-core."""
    from megatron.core.package_info import __version__

    return __version__


def is_relied_on(used: Used) -> bool:
    """Whether the installed Megatron is one in which we rely on ``used``."""
    release = tuple(int(part) for part in re.findall(r"\d+", megatron_version())[:3])
    return used.since <= release and (used.until is None or release < used.until)


def check(symbols: Iterable[Used]) -> None:
    """Refuse a Megatron that lacks one of ``symbols``.

    Raises:
        UnsupportedMegatronError: names the symbol, what is wrong with it and the versions.
    """
    for used in filter(is_relied_on, symbols):
        symbol = f"{used.module}.{used.name}"
        try:
            target = operator.attrgetter(used.name)(importlib.import_module(used.module))
        except (ImportError, AttributeError) as error:
            raise unsupported(symbol, f"is missing ({error})") from error
        parameters = inspect.signature(target).parameters if used.parameters else {}
        missing = [name for name in used.parameters if name not in parameters]
        if missing:
            raise unsupported(symbol, f"no longer takes {', '.join(missing)}")


def replace(target: object, name: str, value: object) -> ExitStack:
    """Set an attribute that Megatron reads; what is returned sets it back, when it is closed.

    Raises:
        UnsupportedMegatronError: there is none of that name, so nobody would read it.
    """
    if not hasattr(target, name):
        raise unsupported(f"{type(target).__module__}.{type(target).__name__}.{name}", "is missing")
    back = ExitStack()
    back.callback(setattr, target, name, getattr(target, name))
    setattr(target, name, value)
    return back


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


def unsupported(symbol: str, problem: str) -> UnsupportedMegatronError:
    """What to raise where ``problem`` is one of the installed Megatron's."""
    return UnsupportedMegatronError(
        f"{symbol} {problem} in megatron-core {megatron_version()}; this release of megatron_2bw works with "
        f"megatron-core {SUPPORTED_VERSIONS}: install one of these, or a newer megatron_2bw"
    )
