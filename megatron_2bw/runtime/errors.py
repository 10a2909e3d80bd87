"""The error of a rank that cannot go on alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class PeerLostError(RuntimeError):
    """A transfer or reduction failed because another rank is gone or too late; its own output says why."""


@contextmanager
def needs_peers(what: str) -> Iterator[None]:
    """Turn a failed communication inside into an error that names ``what`` was waited for.

    Raises:
        PeerLostError: the process group raised an error.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"{what} failed: a rank is gone or too late, so look for that rank's own error. ({error})"
        ) from error
