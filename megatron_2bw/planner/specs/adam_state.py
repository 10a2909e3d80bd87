"""What Transformer Engine's precision-aware Adam keeps of every weight.

As in ``transformer_engine/pytorch/optimizers/fused_adam.py`` of version 2.1 and later, and in Megatron-Core's
``OptimizerConfig``, which stores remainders unless a training script says otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes per number."""


class AdamState(NamedTuple):
    """``--use-precision-aware-optimizer``: precisions of what is kept.

    >>> AdamState(first_moment="bf16", second_moment="bf16").width(in_bf16=True)
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

    def keeps_remainders(self, *, in_bf16: bool) -> bool:
        """Whether, of main weights, only those 16 bits are kept that weights in bf16 lack."""
        return in_bf16 and self.main_weight == "fp32"

    def width(self, *, in_bf16: bool) -> int:
        """Bytes per weight.

        Args:
            in_bf16: whether the model's weights are.
        """
        main_weight = WIDTHS["bf16" if self.keeps_remainders(in_bf16=in_bf16) else self.main_weight]
        return main_weight + WIDTHS[self.first_moment] + WIDTHS[self.second_moment]

    @property
    def copied_width(self) -> int:
        """Bytes per weight of copies in fp32 that an update makes; its kernel reads fp32, and two moments in bf16."""
        moments = self.first_moment, self.second_moment
        copied = [self.main_weight, *(moments if moments != ("bf16", "bf16") else ())]
        return WIDTHS["fp32"] * sum(number != "fp32" for number in copied)
