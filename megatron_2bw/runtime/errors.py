"""The error of a rank that cannot go on alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_2bw.schedule.action import Action


class PeerLostError(RuntimeError):
    """A transfer or reduction failed because another rank is gone or too late; its own output says why."""


def place_of(action: Action) -> str:
    """Where in a run ``action`` is, for messages."""
    if action.version is not None:
        action = action._replace(version=max(action.version, 0))  # What is older than the first weights runs with them.
    return f"stage {action.stage}: {action} (batches counted from the start of the run)"


@contextmanager
def needs_peers(what: object) -> Iterator[None]:
    """Turn a failed communication inside into an error that names ``what`` was waited for.

    Raises:
        PeerLostError: the process group raised an error.
        torch.OutOfMemoryError: this rank's own.
        torch.AcceleratorError: a kernel of this rank failed before, and it shows here.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise PeerLostError(lost_in(what, error)) from error


def lost_in(what: object, error: object) -> str:
    """The message of a `PeerLostError`."""
    return f"{what} failed: a rank is gone or too late, so look for that rank's own error. ({error})"


@contextmanager
def waiting_in(what: str) -> Iterator[None]:
    """Say that ``what`` was waited in, where a lost peer shows inside.

    Raises:
        PeerLostError: that of the body, with ``what`` in front.
    """
    try:
        yield
    except PeerLostError as error:
        raise PeerLostError(f"{what}: {error}") from error
