"""The loop of scripts/bench/time_to_loss.py trains Megatron's model as pipelined runs of 2BW do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from .case import Case
from .compare import FLOOR, deviation
from .delayed import Rules, _training, loss_of
from .harness import collect, run
from .record import RankRecord, weights
from .worker import initialize

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
CASE = Case(schedule="2bw", stages=2, microbatches=4, batches=12, tied=False, clip=1.0, model=("--adam-beta2", "0.95"))
CASES = {
    "the paper's rule": CASE,
    "half delayed, lead": replace(CASE, delayed=2, lead=2.0),
    "a beginning without a delay, lead": replace(CASE, synchronous=3, lead=2.0),
    "d4": replace(CASE, stages=4),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_like_a_pipeline(name: str) -> None:
    """To rounding: the loop adds gradients up in another order, and clips by a norm of its own."""
    case = CASES[name]
    found = run(case)
    (record,) = collect(_main, replace(case, schedule=None, stages=1, layers=case.num_layers), ranks=1)
    apart = deviation(
        found,
        replace(
            found,
            losses=torch.stack(record.losses).view_as(found.losses),
            final={shard.name: values.view_as(found.final[shard.name]) for shard, values in record.final.items()},
        ),
    )
    assert apart.losses < FLOOR
    assert apart.weights < FLOOR


def _main(case: Case, rank: int, port: int, folder: Path) -> None:
    sys.path.insert(0, str(BENCH))
    args = initialize(case, rank, 1, port)
    import delayed_training
    from language_models import Size

    record = RankRecord()
    whole = _training(case, Rules(delay=1), args, record)
    group = whole.scheduler.optimizer.param_groups[0]
    rates: list[float] = []
    for _ in range(case.batches):
        rates.append(group["lr"])
        whole.scheduler.step(increment=case.global_batch_size)

    class Model(torch.nn.Module):
        """Mean loss of microbatches, by their positions."""

        def __init__(self, size: Size) -> None:
            super().__init__()
            self.whole = whole.model

        def forward(self, positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            losses = []
            for position in positions.tolist():
                total, tokens = loss_of(case.kind, self.whole, whole.data, position)
                losses.append(total / tokens)
            record.losses += [loss.detach() for loss in losses]
            return torch.stack(losses).mean()

    def batches(text: Any, size: Size, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((positions, positions) for positions in torch.arange(size.steps * size.batch).split(size.batch))

    delayed_training.Transformer, delayed_training.batches = Model, batches
    delayed_training.texts = lambda corpus: (None, None)
    delayed_training.validation_loss = lambda model, size: 0.0
    delayed_training.rate = lambda trial, step: rates[step]
    torch.optim.AdamW = functools.partial(torch.optim.AdamW, eps=args.adam_eps)
    delayed_training.train(
        delayed_training.Trial(
            size=Size(layers=0, hidden=0, sequence=0, batch=case.microbatches, steps=case.batches),
            delay=1,
            lr=args.lr,
            beta1=args.adam_beta1,
            correction=case.correction if case.lead else "none",
            lead=case.lead,
            delayed=case.delayed or None,
            synchronous=case.synchronous,
        )
    )
    record.final = weights(whole.model)
    torch.save(record, folder / f"rank{rank}.pt")
