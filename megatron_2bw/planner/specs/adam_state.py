"""What Transformer Engine's precision-aware Adam keeps of every weight.

As in ``transformer_engine/pytorch/optimizers/fused_adam.py`` (2026-08-22), and in Megatron-Core's ``OptimizerConfig``,
which stores remainders from Transformer Engine 2.1 on, unless a training script says otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes per number."""


TORCH_NAMES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}
"""What Megatron turns the words of its flags into."""


class AdamState(NamedTuple):
    """``--use-precision-aware-optimizer``: precisions of what is kept.

    >>> AdamState(first_moment="bf16", second_moment="bf16").width(has_remainders=True)
    6
    >>> AdamState(first_moment="bf16", second_moment="fp8").copied_width
    8
    """

    main_weight: str = "fp32"
    """``--main-params-dtype``."""
    first_moment: str = "fp32"
    """``--exp-avg-dtype``."""
    second_moment: str = "fp32"
    """``--exp-avg-sq-dtype``."""

    def width(self, *, has_remainders: bool) -> int:
        """Bytes per weight.

        Args:
            has_remainders: of main weights, only those 16 bits are kept that the model's weights lack.
        """
        main_weight = WIDTHS["bf16" if has_remainders else self.main_weight]
        return main_weight + WIDTHS[self.first_moment] + WIDTHS[self.second_moment]

    @property
    def copied(self) -> tuple[str, ...]:
        """What an update copies to fp32, and back; its kernel reads fp32, and two moments in bf16."""
        moments = self.first_moment, self.second_moment
        numbers = self.main_weight, *(moments if moments != ("bf16", "bf16") else ())
        return tuple(number for number in numbers if number != "fp32")

    @property
    def copied_width(self) -> int:
        """Bytes per weight of these copies."""
        return WIDTHS["fp32"] * len(self.copied)
