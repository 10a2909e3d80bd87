"""What the thread that adds up the norm runs has run before the first batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .case import Case
from .features import EXPERTS, IN_BF16
from .harness import launch
from .worker import install, set_environment, train

CASE = Case(schedule="2bw", stages=2, microbatches=2, batches=3, clip=1.0)


class _Kernels(TorchDispatchMode):
    """Operators, each with the precisions of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, ...]] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        self.seen.add((str(func), *sorted({str(tensor.dtype) for tensor in tensors})))
        return func(*args, **(kwargs or {}))


def _recorded(case: Case, rank: int, port: int, folder: Path) -> None:
    set_environment(rank, case.ranks, port)
    install(case)
    from megatron_2bw.mcore.updates.reductions import GradientReductions

    statistics = GradientReductions.statistics
    calls: list[set[tuple[str, ...]]] = []

    def recorded(reductions: GradientReductions) -> Any:
        with _Kernels() as kernels:
            found = statistics(reductions)
        assert threading.current_thread() is not threading.main_thread()
        calls.append(kernels.seen)
        return found

    GradientReductions.statistics = recorded
    train(case, rank, folder)
    known, *later = calls
    assert len(later) == case.batches
    assert known
    assert all(used <= known for used in later), [used - known for used in later]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"precision": "fp16"},
        {"precision": "bf16", "replicas": 2, "distributed_optimizer": True},
        {"precision": "bf16", "model": IN_BF16, "flags": ("--pipeline-gradient-buffers", "1")},
        {"precision": "bf16", "tensor_parallel": 2, "optimizer": "muon"},
        {"model": ("--calculate-per-token-loss",)},
        {"flags": ("--log-num-zeros-in-grad",)},
        {"replicas": 2, "expert_parallel": 2, "model": EXPERTS},
    ],
    ids=str,
)
def test_no_kernel_is_new_to_the_thread(more: dict[str, Any], tmp_path: Path) -> None:
    case = replace(CASE, **more)
    ended = launch(_recorded, case, tmp_path)
    assert ended.exit_codes == [0] * case.ranks, ended.tails()
