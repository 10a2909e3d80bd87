"""The commands ``show``, ``schedules`` and ``validate``."""

from __future__ import annotations

from typing import Any

from megatron_2bw.schedule.commands import schedules, show, validate


def add_commands(commands: Any) -> None:
    """Add them to the subparsers of ``megatron-2bw``."""
    for command in (show, schedules, validate):
        command.add(commands)
