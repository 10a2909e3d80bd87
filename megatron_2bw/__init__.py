"""PipeDream-2BW and relatives on unmodified Megatron-Core.

`install` serves Megatron's own training loop; `Pipeline` and `get_schedule` serve others, see
``examples/custom_loop.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_2bw.schedule.program import Schedule

__version__ = "0.1.0"
__all__ = ["Pipeline", "build_mirrored", "get_schedule", "install", "uninstall"]


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


def get_schedule(name: str, *, stages: int, microbatches: int, **options: int | None) -> Schedule:
    """What every rank does in one batch: to be looked at, validated or simulated without torch.

    Args:
        name: one of ``megatron-2bw schedules``.
        stages: pipeline depth.
        microbatches: per batch.
        **options: of 2bw, ``extra_in_flight``: activations kept per stage boundary beyond d-s, and
            ``delayed_microbatches`` of a batch, all by default; ``k`` and ``gamma`` of mixpipe.

    Raises:
        ScheduleError: unknown name, or numbers that it cannot be built for.

    >>> get_schedule("2bw", stages=2, microbatches=2).delay
    (1, 1)
    """
    from megatron_2bw.schedule.registry import build

    return build(name, stages=stages, microbatches=microbatches, **options)


def __getattr__(name: str) -> Any:
    if name == "build_mirrored":
        from megatron_2bw.mcore.stages.mirror import build

        return build
    if name == "Pipeline":  # Imports Megatron, which reads the environment that `install` prepares.
        from megatron_2bw.mcore.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
