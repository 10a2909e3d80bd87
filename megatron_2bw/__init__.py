"""PipeDream-2BW and relatives on unmodified Megatron-Core."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["install", "uninstall"]


def install() -> None:
    """Teach the Megatron of this process ``--pipeline-schedule``; call before parsing its arguments.

    The default schedule, ``megatron``, leaves Megatron as it is. On a machine without a GPU, also
    lets Megatron run on the CPU. Idempotent.

    Raises:
        UnsupportedMegatronError: a Megatron symbol that this package wraps is missing or changed.
    """
    from megatron_2bw.mcore.install import install

    install()


def uninstall() -> None:
    """Put every replaced symbol back."""
    from megatron_2bw.mcore.install import uninstall

    uninstall()
