"""``--mixpipe-k auto`` on the machine at hand: see `planner.papers.automatic`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megatron_2bw.planner.flags.flags import read
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.memory.memory import largest
from megatron_2bw.planner.papers import automatic
from megatron_2bw.planner.table import GIB


def choose(args: Any, words: Sequence[str] | None = None) -> str:
    """Set ``args.mixpipe_k`` and ``args.mixpipe_gamma``. All ranks have to have GPUs of the same size.

    Args:
        args: Megatron's, validated.
        words: of the command line, if not this process's.

    Returns:
        what was chosen.

    Raises:
        PlanError: the planner cannot price the flags.
    """
    options = Options.parse(sys.argv[1:] if words is None else words)
    options.values.pop("--mixpipe-k", None)
    configuration = read(options, gpus=args.world_size, fused=_has_fused_attention())
    model, layout = configuration.model, configuration.layout
    args.mixpipe_k = args.mixpipe_gamma = None
    if not automatic.has_choice(layout):
        return "--mixpipe-k auto: more microbatches than stages, no choice of K and Gamma"
    there_bytes = memory_bytes()
    chosen = automatic.choose(model, layout, there_bytes)
    args.mixpipe_k, args.mixpipe_gamma = chosen.mixpipe_k, chosen.mixpipe_gamma
    return (
        f"--mixpipe-k auto: K = {chosen.mixpipe_k}, Gamma = {chosen.mixpipe_gamma}, for which the planner expects "
        f"{largest(model, chosen).total_bytes / GIB:.1f} of {there_bytes / GIB:.1f} GiB"
    )


def _has_fused_attention() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def memory_bytes() -> float:
    """Of this rank's GPU, or its share of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
