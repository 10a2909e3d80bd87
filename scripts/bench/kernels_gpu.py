"""What matrix products, attention and elementwise kernels of real layers reach of this GPU's data sheet.

    python scripts/bench/kernels_gpu.py [--output scripts/bench/results/kernels_gpu.txt]

Each kernel runs alone and again and again, on random numbers, for long enough that the GPU draws the power, and keeps
the clock, that it does in training. Sizes are those of one tensor-parallel rank's share of a layer. Attention is
Transformer Engine's, as Megatron's default layers have it, or torch's where that is not installed; attention to short
sequences takes as long as the host needs to launch it. The first
kernel of all finds the GPU cold, and is faster. ``planner/cost/speeds.py`` has constants from here.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from planner_gpu import of_data_sheet
from report import heading, is_installed, put_each
from torch import Tensor

from megatron_2bw.planner.cost.attention import core_channels
from megatron_2bw.planner.cost.sizes import Sizes, Split
from megatron_2bw.planner.specs.cluster import Gpu
from megatron_2bw.planner.specs.layout import Precision, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS

CASES = (("gpt3-175b", 8, 2), ("gpt3-175b", 4, 2), ("llama3-8b", 1, 1), ("llama3-70b", 4, 1))
"""Model, tensor-parallel size, microbatch size."""
LASTS_S, WARM_S = 0.5, 0.3
BF16 = torch.bfloat16
LEAST = 20
"""Repetitions between two looks at the clock, at least."""
TITLES = ("us", "TFLOP/s or TB/s", "of the peak")


class Kernel(NamedTuple):
    """What runs, and what of."""

    name: str
    run: Callable[[], object]
    amount: float
    """Floating-point operations, or bytes read and written."""
    peak: float
    """So many per second, by the data sheet."""


def seconds_of(run: Callable[[], object]) -> float:
    """Of one run among many, by the GPU's clock."""
    first_s = _mean_s(run, 3)
    _mean_s(run, max(LEAST, int(WARM_S / first_s)))
    return _mean_s(run, max(LEAST, int(LASTS_S / first_s)))


def _mean_s(run: Callable[[], object], times: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def _random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda", requires_grad=grad)


def products(sizes: Sizes, peak: float) -> Iterator[Kernel]:
    """Forward, gradient of the input, gradient of the weight, of each matrix of a layer."""
    for product in sizes.products:
        m, n, k = (round(size) for size in product[:3])
        x, w, dy = _random(m, k), _random(n, k), _random(m, n)
        y, dx, dw = _random(m, n), _random(m, k), _random(n, k)
        for name, sides, run in (
            ("y", (m, n, k), lambda x=x, w=w, y=y: torch.mm(x, w.T, out=y)),
            ("dx", (m, k, n), lambda dy=dy, w=w, dx=dx: torch.mm(dy, w, out=dx)),
            ("dw", (n, k, m), lambda dy=dy, x=x, dw=dw: torch.mm(dy.T, x, out=dw)),
        ):
            yield Kernel(" ".join([name, " x ".join(map(str, sides))]), run, 2 * m * n * k, peak)


def attention(sizes: Sizes, peak: float) -> Iterator[Kernel]:
    """Of one sequence or more, causal: half of the scores count. A backward is timed with the forward before it."""
    model, tensor = sizes.model, sizes.split.tensor
    batch, length, heads = sizes.split.microbatch, model.seq_length, model.num_attention_heads // tensor
    groups, channels = max(model.num_query_groups // tensor, 1), core_channels(model)[0]
    shapes = ((length, batch, count, channels) for count in (heads, groups, groups))
    q, k, v = (_random(*shape, grad=True) for shape in shapes)
    run = _engine(heads, groups, channels) if importlib.util.find_spec("transformer_engine") else _torch
    dy = torch.randn_like(run(q, k, v))
    flops = 2 * sizes.scores * channels  # Of two products, half.

    def both() -> None:
        torch.autograd.grad(run(q, k, v), (q, k, v), dy)

    where = f"{batch} x {length}, {heads}/{groups} heads of {channels}"
    alone = torch.no_grad()(lambda: run(q, k, v))
    yield Kernel(f"attention forward, {where}", alone, flops, peak)
    yield Kernel(f"attention, both, {where}", both, 3.5 * flops, peak)


def _engine(heads: int, groups: int, channels: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads, channels, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal"
    ).cuda()


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def elementwise(sizes: Sizes, peak: float) -> Iterator[Kernel]:
    """A sum of two tensors of a layer's input, and of its MLP's."""
    for columns in (sizes.hidden, round(sizes.into_mlp)):
        x, y, z = (_random(round(sizes.tokens), columns) for _ in range(3))
        moved = 3 * x.numel() * x.element_size()
        add = lambda x=x, y=y, z=z: torch.add(x, y, out=z)  # noqa: E731
        yield Kernel(f"x + y, {x.shape[0]} x {columns}", add, moved, peak)


def kernels(model: Model, tensor: int, microbatch: int, gpu: Gpu) -> Iterator[Kernel]:
    """Of one layer."""
    flops, moved = gpu.peak_tflops * 1e12, gpu.hbm_gb_s * 1e9
    split = Split(tensor, microbatch, tensor > 1, Recompute.NONE, Precision.BF16, 4, fused_attention=True)
    sizes = Sizes(model, split)
    yield from products(sizes, flops)
    yield from attention(sizes, flops)
    yield from elementwise(sizes, moved)


def lines() -> Iterator[str]:
    """A table for every case."""
    properties = torch.cuda.get_device_properties(0)
    cluster = of_data_sheet(properties.name, properties.total_memory / 2**30)
    if cluster is None:
        raise SystemExit(f"the planner has no data sheet of {properties.name}")
    gpu = cluster.gpu
    yield f"Data sheet of {gpu.name}: {gpu.peak_tflops:.0f} TFLOP/s in bf16, {gpu.hbm_gb_s / 1e3:.1f} TB/s"
    for name, tensor, microbatch in CASES:
        yield ""
        yield f"{f'{name}, t={tensor} b={microbatch}':>48} " + " ".join(f"{title:>16}" for title in TITLES)
        for kernel in kernels(MODELS[name], tensor, microbatch, gpu):
            took_s = seconds_of(kernel.run)
            reached = kernel.amount / took_s
            cells = (
                f"{took_s * 1e6:.1f}",
                f"{reached / 1e12:.{2 if kernel.peak < 1e14 else 0}f}",
                f"{reached / kernel.peak:.1%}",
            )
            yield f"{kernel.name:>48} " + " ".join(f"{cell:>16}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    put_each(chain((*heading(*filter(is_installed, ("transformer-engine",))), ""), lines()), options.output)


if __name__ == "__main__":
    main()
