"""In which of two orders a run posts its receives."""

from __future__ import annotations

import torch


def are_late(given: bool | None, *, kernels_depend_on_data: bool) -> bool:
    """Whether no receive is posted before its tensor is sent, so that ranks get through whatever waits for the GPU.

    Args:
        given: what the run asks for; None: where there is a GPU.
        kernels_depend_on_data: always so then, as one may be used for the first time at any time.
    """
    return kernels_depend_on_data or (torch.cuda.is_available() if given is None else given)
