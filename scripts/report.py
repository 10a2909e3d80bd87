"""How a committed report begins."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def heading(*packages: str) -> list[str]:
    """Two lines: date and command; versions of Python, torch, megatron-core and ``packages``, and the machine."""
    versions = ", ".join(
        (f"torch {version('torch')}", f"megatron-core {_megatron()}", *(f"{name} {version(name)}" for name in packages))
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return [
        f"{datetime.date.today().isoformat()}  python {shlex.join(sys.argv)}",
        f"Python {platform.python_version()}, {versions}; {os.cpu_count()} cores, {platform.machine()}, {device}",
    ]


def _megatron() -> str:
    """The version of what is imported, which may be a checkout of Megatron-LM on the path."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        from megatron.core.package_info import __version__

        return __version__


def is_installed(package: str) -> bool:
    """Whether `heading` can say which version of ``package`` this is."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def put(lines: Iterable[str], output: Path | None) -> None:
    """Print a report, and write it to ``output`` if there is one."""
    text = "\n".join([*lines, ""])
    print(text)
    if output is not None:
        output.write_text(text)


def put_each(lines: Iterable[str], output: Path | None) -> None:
    """The same line by line, as they come: who stops the script keeps what it has said."""
    with (output or Path(os.devnull)).open("w") as file:
        for line in lines:
            for stream in (sys.stdout, file):
                print(line, file=stream, flush=True)
