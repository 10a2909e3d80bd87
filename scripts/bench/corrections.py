"""What a correction of the delay adds to an update, in time and memory.

    python scripts/bench/corrections.py [--output scripts/bench/results/corrections.txt]

Updates of main weights in fp32 and their copy into weights in bf16, as in mixed precision, by AdamW and by Muon:
without a correction, with a lead of the moment, with a lead of whole updates. All take turns in one process; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from report import heading, put
from torch.profiler import ProfilerActivity, profile

from megatron_2bw.runtime.corrections import CORRECTIONS, Correction, UpdateLead

SHAPES = [(512, 512)] * 8 + [(2048, 512)] * 4
ROUNDS, WARM = 15, 2
LEAD = 1.0
CORRECTED = ("none", *CORRECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """An optimizer with main weights, and the model's weights beside them."""

    optimizer: torch.optim.Optimizer
    mains: list[torch.Tensor]
    models: list[torch.Tensor]
    correction: Correction | None

    @classmethod
    def of(cls, optimizer: str, correction: str) -> Updates:
        """With random weights and gradients."""
        torch.manual_seed(0)
        mains = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        made = torch.optim.AdamW(mains, foreach=True) if optimizer == "AdamW" else Muon(mains, fp32_matmul_prec="high")
        corrected = None if correction == "none" else CORRECTIONS[correction](LEAD)
        if corrected is not None:
            corrected.attach(made)
        for main in mains:
            main.grad = torch.randn_like(main)
        models = [main.detach().to(torch.bfloat16) for main in mains]
        return cls(optimizer=made, mains=mains, models=models, correction=corrected)

    def update(self) -> None:
        """One update."""
        self.optimizer.step()
        if isinstance(self.correction, UpdateLead):
            with self.correction.shown(self.optimizer):
                self._copy()
        else:
            self._copy()

    def update_s(self) -> float:
        """Seconds of one."""
        start_s = time.perf_counter()
        self.update()
        return time.perf_counter() - start_s

    def memory(self) -> tuple[float, float]:
        """What lasts and what an update allocates for a while, at most, in bytes per weight."""
        weights = sum(main.numel() for main in self.mains)
        state = (value for state in self.optimizer.state.values() for value in state.values())
        lasting = sum(tensor.nbytes for tensor in state if torch.is_tensor(tensor) and tensor.numel() > 1)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
            self.update()
        live, most = 0, 0
        for event in sorted(traced.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            live += event.nbytes() if event.name() == "[memory]" else 0
            most = max(most, live)
        return lasting / weights, most / weights

    def _copy(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.models, [main.data for main in self.mains])


def report() -> list[str]:
    """A table."""
    lines = [
        f"{sum(rows * columns for rows, columns in SHAPES) / 1e6:.1f}M weights in matrices, lead {LEAD:g}, one thread, "
        f"{ROUNDS} rounds; time of an update over that without a correction",
        "",
        f"{'':<8} {'correction':<12} {'ms':>7} {'ratio':>6} {'lasting bytes per weight':>25} {'during an update':>17}",
    ]
    for optimizer in ("AdamW", "Muon"):
        arms = {correction: Updates.of(optimizer, correction) for correction in CORRECTED}
        rounds = [{name: arm.update_s() for name, arm in arms.items()} for _ in range(WARM + ROUNDS)][WARM:]
        for name, arm in arms.items():
            ms = 1000 * statistics.median(seconds[name] for seconds in rounds)
            ratio = statistics.median(seconds[name] / seconds["none"] for seconds in rounds)
            lasting, passing = arm.memory()
            lines.append(f"{optimizer:<8} {name:<12} {ms:>7.1f} {ratio:>6.2f} {lasting:>25.1f} {passing:>17.1f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    put([*heading("emerging-optimizers"), "", *report()], options.output)


if __name__ == "__main__":
    main()
