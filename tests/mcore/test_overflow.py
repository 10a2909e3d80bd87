"""fp16 under 2BW: an infinity skips the same updates, and moves the loss scale, as in the oracle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from .case import LOSS_SCALE, MICRO_BATCH_SIZE, SEQUENCE_LENGTH, Case, Fault
from .faults import INFINITE_GRADIENT
from .features import BIASED, EXPERTS
from .harness import Results, run
from .matrix import compared

CASE = Case(
    schedule="2bw",
    stages=2,
    microbatches=2,
    precision="fp16",
    clip=1.0,
    tied=False,  # The sum of a tied weight's gradients would carry the infinity to the last stage.
    batches=14,
    record_gradients=True,
)
DEEP = replace(CASE, stages=4, microbatches=4)
FIRST, LAST = 0, CASE.batches - 1


@pytest.mark.parametrize("batches", [(FIRST, 5, LAST), (3, 4)], ids=str)
@pytest.mark.parametrize(("case", "rank"), [(CASE, 0), (DEEP, 2)], ids=["d2-s0", "d4-s2"])
def test_infinity_on_one_stage(case: Case, rank: int, batches: tuple[int, ...]) -> None:
    case = _injected(case, rank, batches)
    assert compared(case).problems() == []
    assert _skipped(run(case)) == list(batches)


@pytest.mark.parametrize(
    "layout",
    [
        {"replicas": 2, "distributed_optimizer": True},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "sequence_parallel": True, "model": BIASED},
    ],
    ids=["DP2 distributed optimizer", "TP2", "TP2, biases of experts"],
)
def test_infinity_on_one_of_several_ranks_of_a_stage(layout: dict[str, object]) -> None:
    case = _injected(replace(CASE, **layout), 1, (2, 7))
    assert compared(case).problems() == []
    assert _skipped(run(case)) == [2, 7]


def test_infinity_in_one_of_several_optimizers() -> None:
    """Experts in parallel have one of their own, which comes last."""
    case = replace(CASE, replicas=2, expert_parallel=2, model=EXPERTS)
    faults = tuple(replace(fault, text="final_layernorm.weight") for fault in _injected(case, 3, (2, 7)).faults)
    found = run(replace(case, faults=faults))
    assert _skipped(found) == [2, 7]
    assert all(weight.isfinite().all() for weight in found.final.values())


def test_overflow_that_nobody_injects() -> None:
    """The first loss scales are far too large; two overflows are tolerated before each step down."""
    case = replace(CASE, model=("--initial-loss-scale", str(2**26), "--hysteresis", "2"))
    assert compared(case).problems() == []
    assert 3 <= len(_skipped(run(case))) < CASE.batches - 2


def test_loss_scale_of_each_batch() -> None:
    """That of batch t knows batches 0 to t-2: halved two batches after an infinity, doubled after five without."""
    found = run(_injected(CASE, 0, (3,)))
    changes = [1] * 5 + [1 / 2] * 5 + [1] * 4
    assert _loss_scales(found) == [LOSS_SCALE * change for change in changes]


def test_the_log_has_the_loss_scale_of_the_newest_weights() -> None:
    """That of the next batch; read on the host, where it is without waiting for the device."""
    found = run(replace(_injected(CASE, 0, (3,)), flags=("--log-interval", "1")))
    logged = [float(scale) for scale in re.findall(r"loss scale: +([\d.]+)", found.outputs[-1])]
    assert logged[: CASE.batches - 1] == _loss_scales(found)[1:]


def test_the_loss_scale_of_the_newest_weights_is_on_the_host() -> None:
    from megatron_2bw.mcore.updates.loss_scales import LossScales
    from megatron_2bw.runtime.weights import WeightVersions

    weights, scaler = WeightVersions([torch.nn.Parameter(torch.zeros(2))]), SimpleNamespace(scale=torch.tensor([8.0]))
    scales = LossScales(scaler, weights)
    assert scales.newest_on_host().item() == 8
    with weights.update():
        scaler.scale = torch.tensor([4.0])
    scales.updated()
    assert scales.newest_on_host().item() == 4
    assert LossScales(None, weights).newest_on_host().item() == 1


@pytest.mark.parametrize("batches", [(3, 4), (FIRST, LAST - 1, LAST)], ids=str)
def test_logs_count_every_skipped_update(batches: tuple[int, ...]) -> None:
    """Known a batch later than in ordinary training, except for the last one."""
    found = run(replace(_injected(CASE, 0, batches), flags=("--log-interval", "1")))
    counts = [int(number) for number in re.findall(r"number of skipped iterations: +(\d+)", found.outputs[-1])]
    assert len(counts) == CASE.batches
    assert sum(counts) == len(batches)


def _injected(case: Case, rank: int, batches: Sequence[int]) -> Case:
    """An infinity in another microbatch of each batch."""
    calls = [batch * case.microbatches + batch % case.microbatches for batch in batches]
    return replace(case, faults=tuple(Fault(kind=INFINITE_GRADIENT, rank=rank, call=call) for call in calls))


def _skipped(results: Results) -> list[int]:
    return results.norms.isnan().nonzero().flatten().tolist()


def _loss_scales(results: Results) -> list[float]:
    """The gradient of a microbatch's summed loss is the loss scale over its tokens over the microbatches."""
    replicas, batches, microbatches = results.seeds.shape
    samples = torch.arange(batches * microbatches * replicas * MICRO_BATCH_SIZE).view(
        batches, microbatches, replicas, -1
    )
    tokens = (SEQUENCE_LENGTH - samples % 5).sum(3).permute(2, 0, 1)
    scales = results.seeds * tokens * microbatches
    assert torch.allclose(scales, scales[:, :, :1].expand_as(scales), rtol=1e-6)
    return [2 ** round(scale) for scale in scales[0, :, 0].log2().tolist()]


def test_two_updates_in_one_call() -> None:
    """After a drain: the norm and the zeros of the newer one, and that one of them was skipped."""
    from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer, UpdateOutcome

    optimizer = DelayedOptimizer.__new__(DelayedOptimizer)
    optimizer._is_released = False
    optimizer._outcomes = [UpdateOutcome(0, False, 1.0, 3), UpdateOutcome(1, True, 2.0, 5)]
    assert optimizer.step() == (False, 2.0, 5)
    assert optimizer.skipped == 1


def test_zeros_are_counted() -> None:
    from megatron_2bw.mcore.updates.reductions import _zeros_among

    assert _zeros_among([torch.tensor([0.0, 1.0, 0.0]), torch.tensor([2.0, 3.0])]) == 2
