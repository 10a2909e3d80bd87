"""The error of a rank that cannot go on alone."""


class PeerLostError(RuntimeError):
    """A transfer or reduction failed, most likely because another rank is gone; the cause is in its output."""
