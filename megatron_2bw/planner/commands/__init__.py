"""The commands ``plan``, ``estimate`` and ``profile``.

What they need is imported where they run, so that the other commands start at once.
"""

from __future__ import annotations

from typing import Any

from megatron_2bw.planner.commands import estimate, plan, profile


def add_commands(commands: Any) -> None:
    """Add them to the subparsers of ``megatron-2bw``; they take Megatron's flags beside their own."""
    for command in (plan, estimate, profile):
        command.add(commands)
