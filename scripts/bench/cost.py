"""What something costs 2BW on stages that wait: blocks of batches with it and without, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from interval import median_interval
from timed_stage import BACKWARD_S, FORWARD_S, Arm, Run, block_periods_s, measure

BATCHES = 8
"""Of a block."""
STAGES = (2, 4, 8)


def cost_report(
    what: str,
    arms_of: Callable[[int], tuple[Arm, Arm]],
    *,
    depths: Iterable[int] = STAGES,
    per_stage: int = 1,
    pairs: int,
) -> list[str]:
    """A table with a line per depth.

    Args:
        what: is paid for, as it reads after "with".
        arms_of: with it, and without, for a depth.
        depths: stages.
        per_stage: so many microbatches per batch.
        pairs: of neighbouring blocks, which are compared.
    """
    depth = "d = m" if per_stage == 1 else "d"
    lines = [
        "",
        f"2bw with timed stages, F = {FORWARD_S} s, B = {BACKWARD_S} s, {pairs} pairs of blocks of {BATCHES} batches:",
        f"time per batch with {what} over time without, minus 1",
        "",
        f"{depth:>5} {'ms per batch':>13} {'share':>8} {'95% interval':>18} {'ms':>7} {'95% interval':>18}",
    ]
    for stages in depths:
        run = Run(
            schedule="2bw",
            stages=stages,
            microbatches=per_stage * stages,
            batches=BATCHES,
            forward_s=FORWARD_S,
            backward_s=BACKWARD_S,
            arms=arms_of(stages),
            blocks=2 * pairs,
        )
        periods_s = block_periods_s(measure(run), run)
        lines.append(_line(stages, with_=periods_s[::2], without=periods_s[1::2]))
        print(lines[-1], flush=True)
    return lines


def _line(stages: int, *, with_: Sequence[float], without: Sequence[float]) -> str:
    pairs = list(zip(with_, without, strict=True))
    share, low, high = median_interval([a / b - 1 for a, b in pairs])
    ms, low_ms, high_ms = median_interval([1000 * (a - b) for a, b in pairs])
    share_text = f"{share:>8.2%} {f'{low:.2%} to {high:.2%}':>18}"
    ms_text = f"{ms:>7.2f} {f'{low_ms:.2f} to {high_ms:.2f}':>18}"
    return f"{stages:>5} {1000 * statistics.median(with_):>13.2f} {share_text} {ms_text}"
