"""The loss scale of fp16, written from its definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LossScale:
    """Halved at an overflow, doubled after ``window`` batches without one."""

    value: float
    smallest: float
    window: float
    hysteresis: int
    """Number of overflows since the last growth from which on each one halves the scale."""
    dynamic: bool
    """Otherwise it never changes."""
    good: int = 0
    overflows: int = field(init=False, default=0)

    @classmethod
    def of(cls, args: Any) -> LossScale:
        """As Megatron's arguments describe it; constantly 1 in fp32 and bf16."""
        dynamic = args.fp16 and not args.loss_scale
        return cls(
            value=args.initial_loss_scale if dynamic else args.loss_scale or 1.0,
            smallest=args.min_loss_scale,
            window=args.loss_scale_window,
            hysteresis=args.hysteresis,
            dynamic=dynamic,
        )

    def update(self, overflow: bool) -> None:
        """Take in the outcome of one batch."""
        if not self.dynamic:
            return
        if overflow:
            self.good = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.value = max(self.value / 2, self.smallest)
            return
        self.good += 1
        if self.good == self.window:
            self.good = self.overflows = 0
            self.value *= 2
