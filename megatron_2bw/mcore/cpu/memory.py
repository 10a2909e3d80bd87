"""Memory of a training process on the CPU, kept between uses as ``torch.cuda`` keeps a GPU's."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of ``mallopt`` (malloc.h of the GNU C library)."""
_NEVER = -1
_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Let the C library reuse freed memory instead of giving it back; stays so until the process ends.

    Activations come and go with every microbatch. Given back to the system, their pages have to be mapped and zeroed
    again: 4,000 page faults in every backward of a small GPT, a tenth of its time, more or fewer depending on the order
    in which a schedule frees them. Without a GNU C library nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES), (_MMAP_MAX, 0)):
            mallopt(parameter, value)
