"""What GPUs and links reach of their data sheets: the constants of the cost model, and the times that follow.

Seven are fitted (``A100``), none per model or layout: by ``scripts/bench/planner_fit.py``, on three sets of rows
measured on A100s: the layer times of Korthikanti et al. (arXiv 2205.05198, Table 4), the 18.4B model of vTrain
(VIA-Research/vTrain, ``ground_truth_multi.csv``, 15 rows), and its single-node rows on 8 GPUs (90 rows). All others are
from the sources that they name. How good they are on other rows: ``scripts/bench/results/planner_accuracy.txt``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_2bw.planner.cost.spread import spread
from megatron_2bw.planner.specs.cluster import Cluster, Gpu
from megatron_2bw.planner.specs.layout import FP8_BYTES, FP32_BYTES

ATTENTION_EFFICIENCY = 0.55
"""Of the peak, in attention that never stores its scores. Dao, "FlashAttention-2" (arXiv 2307.08691), section 4.1:
A100, forward and backward, causal, head dimension 128, 2k to 16k tokens: 50 to 60%."""
HOPPER_ATTENTION_EFFICIENCY = 0.48
"""The same on H100 and H200: Transformer Engine 2.20 on an H200, forward and backward, causal, head dimension 128, 8k
tokens: 48 and 49% (``scripts/bench/results/kernels_gpu.txt``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Efficiencies, shares of what the data sheet says, and times that do not depend on sizes."""

    gemm_efficiency: float
    """Of the peak, in large matrix products."""
    hbm_efficiency: float
    """Of the HBM bandwidth, in elementwise kernels."""
    kernel_s: float
    """What any kernel costs beyond its work: start, last incomplete wave of blocks, gap to the next kernel."""
    nvlink_efficiency: float
    """Of NVLink's one-way bandwidth, in collectives of one node."""
    network_efficiency: float
    """Of a node's network bandwidth, in collectives and transfers between nodes."""
    collective_s: float
    """Start of a collective within a node; between nodes, also each step of its ring or tree over the nodes."""
    launch_s: float
    """The host's time per kernel in eager mode."""
    attention_efficiency: float = ATTENTION_EFFICIENCY
    """Of the peak, in fused attention; not fitted."""
    shares_cards: bool = False
    """Whether a ring with several GPUs of a node uses the network cards of all of them, as NCCL does from 2.12 on
    (``ncclTopoComputePaths``: PXN); not fitted. The rows that the constants were fitted on are older."""


A100 = Speed(
    gemm_efficiency=0.80,
    hbm_efficiency=0.82,
    kernel_s=25e-6,
    nvlink_efficiency=0.70,
    network_efficiency=0.65,
    collective_s=49e-6,
    launch_s=55e-6,
)
"""Fitted, with two digits."""

_FP32 = {
    "v100": 14.51 / 97.36,
    "a100": 19.5 / 312,
    **dict.fromkeys(("h100", "h200"), 67 / 989),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), 75 / 2250),
}
"""Of what 16 bits reach, in fp32 without tensor cores: NVIDIA's data sheets, of B200 that of HGX; of V100, the largest
products measured (see ``GEMM_EFFICIENCY``)."""
_TF32_SHARE = 1 / 2
"""Of the 16-bit peak, in fp32 rounded to TF32: 156 of 312 TFLOP/s on A100, 495 of 989 on H100 (data sheets)."""

GEMM_EFFICIENCY = {
    "v100": 97.36 / 125,
    "a100": 271.2 / 312,
    "h100": 794.5 / 989,
    "h200": 794.5 / 989,
    "b200": 1745 / 2250,
    "b300": 1769 / 2250,
    **dict.fromkeys(("gb200", "gb300"), 1822 / 2500),
}
"""Of the data sheet's peak: measured by the author of ml-engineering (compute/accelerator, maximum achievable matmul
FLOPS), bf16. Of V100, which has no bf16: fp16, a V100-SXM2-16GB, 8192 x 8192 (zzc0721/torch-performance-test-data,
issue 140); another says 95 to 100 TFLOP/s (lablup/mlxcel, issue 1654)."""
FP8_GEMM_EFFICIENCY = {
    "h100": 1402.6 / 1979,
    "h200": 1453.4 / 1979,
    "b200": 3432.5 / 4500,
    "b300": 3353.3 / 4500,
    **dict.fromkeys(("gb200", "gb300"), 3615.6 / 5000),
}
"""The same of products in 8 bits."""
SUSTAINED = 0.68 / GEMM_EFFICIENCY["h200"]
"""Of the largest product measured, in a layer's products again and again, when an H200's power limit lowers its
clock: median of 48 (``scripts/bench/results/kernels_gpu.txt``). Blackwell's share is taken to be the same."""


_ATTENTION = {
    **dict.fromkeys(("h100", "h200"), HOPPER_ATTENTION_EFFICIENCY),
    **dict.fromkeys(("b200", "gb200"), SUSTAINED * 3.5 / (1 / 1574 + 2.5 / 1332) / 2500),
    **dict.fromkeys(("b300", "gb300"), SUSTAINED * 3.5 / (1 / 1856 + 2.5 / 1435) / 2500),
}
"""Of the data sheet's peak, where it is not ``ATTENTION_EFFICIENCY``. On Blackwell: forward and backward, which has 2.5
times the FLOPs, in TFLOP/s on GB200 and GB300, causal, head dimension 128, 8k tokens (NVIDIA/cudnn-frontend,
``benchmark/sdpa_benchmark_training/results/llama3.1``, 2026-04-24; 10 to 15% less at 4k). Ten calls of each; the same
on an H200 (644 and 541) are 57% of the peak, 1.2 times what attention reaches again and again there: ``SUSTAINED``,
too. B200 and B300 are taken to reach the same share of theirs."""


def speed_of(gpu: Gpu) -> Speed:
    """The constants of ``gpu``: the A100's, but for products and attention.

    Products reach a share of the largest one measured: the A100's, or from Hopper on ``SUSTAINED``.
    """
    family, of_a100 = family_of(gpu), GEMM_EFFICIENCY["a100"]
    sustained = SUSTAINED if family in FP8_GEMM_EFFICIENCY else A100.gemm_efficiency / of_a100
    return replace(
        A100,
        gemm_efficiency=sustained * GEMM_EFFICIENCY.get(family, of_a100),
        attention_efficiency=_ATTENTION.get(family, ATTENTION_EFFICIENCY),
        shares_cards=family not in ("v100", "a100"),
    )


def _fp8_flops_per_s(gpu: Gpu, speed: Speed) -> float:
    """As near to the largest product measured in 8 bits as products in 16 bits are to theirs."""
    family, least = family_of(gpu), min(FP8_GEMM_EFFICIENCY.values())
    largest = GEMM_EFFICIENCY.get(family, GEMM_EFFICIENCY["a100"])
    return speed.gemm_efficiency / largest * FP8_GEMM_EFFICIENCY.get(family, least) * gpu.fp8_tflops * 1e12


def family_of(gpu: Gpu) -> str:
    """Its generation: the first part of its name that is one, such as of "NVIDIA H100 80GB HBM3"; else the first."""
    parts = re.findall("[a-z0-9]+", gpu.name.lower())
    return next((part for part in parts if part in GEMM_EFFICIENCY), parts[0] if parts else "")


@dataclass(frozen=True, slots=True)
class Machine:
    """Times of kernels and collectives on one cluster."""

    flops_per_s: float
    """In 16 bits."""
    fp32_flops_per_s: float
    engine_fp32_flops_per_s: float
    """Of Transformer Engine's products of fp32, which are in TF32 where there is that: ``cublaslt_gemm.cu``, "Use TF32
    only for pure FP32 GEMM"; torch's are not (``torch.backends.cuda.matmul.allow_tf32``)."""
    fp8_flops_per_s: float
    flash_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Of one GPU, in a group of all ranks of a node."""
    group_shares: tuple[tuple[int, float], ...]
    """Of that, in groups of so many ranks at most; see `Cluster.group_gb_s`."""
    network_bytes_per_s: float
    """Of a whole node."""
    gpus_per_node: int
    kernel_s: float
    collective_s: float
    launch_s: float
    shares_cards: bool
    transposes: bool
    """Whether its products in 8 bits want every factor transposed, too: see `fp8`."""
    profile: Any = None
    """Of the cluster, if it has one."""

    def product_s(
        self, rows: float, columns: float, inner: float, *, width: int, count: float = 1, of_engine: bool = False
    ) -> float:
        """One kernel: ``count`` products of (rows, inner) and (inner, columns), bound by arithmetic or by HBM.

        Args:
            rows: of what comes out.
            columns: of what comes out.
            inner: numbers in each sum.
            width: bytes per number of what is multiplied; the product of numbers of 8 bits has 16.
            count: products in the kernel.
            of_engine: whether Transformer Engine computes it, as Megatron's layers by default, and not torch.
        """
        moved_bytes = width * (rows * inner + inner * columns) + max(width, 2) * rows * columns
        flops_per_s = self._flops_per_s(width, of_engine)
        busy_s = max(2 * rows * columns * inner / flops_per_s, moved_bytes / self.memory_bytes_per_s)
        return self.kernel_s + count * busy_s

    def _flops_per_s(self, width: int, of_engine: bool) -> float:
        if width == FP8_BYTES:
            return self.fp8_flops_per_s
        if width == FP32_BYTES:
            return self.engine_fp32_flops_per_s if of_engine else self.fp32_flops_per_s
        return self.flops_per_s

    def elementwise_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Kernels that read and write ``moved_bytes`` in all."""
        return kernels * self.kernel_s + moved_bytes / self.memory_bytes_per_s

    def all_reduce_s(self, size_bytes: float, ranks: int, stride: int) -> float:
        """A ring moves ``2*(n-1)/n`` of the tensor through every rank; ranks are ``stride`` apart.

        NCCL's double binary trees, which it has from 2.4 on, move about as much, in steps that grow with the logarithm
        of the nodes alone. Between two nodes a tree sends half as much (https://github.com/NVIDIA/nccl-tests/issues/196),
        which is not counted: the one row of the fit with such groups took 7% less than with rings, 23% more than with
        trees (vTrain's 18.4B, t = 16).
        """
        nodes, _ = spread(ranks, stride, self.gpus_per_node)
        steps = min(2 * nodes, 2 * math.ceil(math.log2(nodes)) + 2)
        return self._moved_s(steps, 2 * (ranks - 1) / ranks * size_bytes, ranks, stride)

    def reduce_scatter_s(self, size_bytes: float, ranks: int, stride: int) -> float:
        """Half a ring's all-reduce; an all-gather takes as long."""
        passed = (ranks - 1) / ranks * size_bytes
        nodes, _ = spread(ranks, stride, self.gpus_per_node)
        return self._moved_s(nodes, passed, ranks, stride)

    def _link_bytes_per_s(self, ranks: int) -> float:
        """Of one GPU, in a group of so many ranks of a node."""
        return self.link_bytes_per_s * next((share for most, share in self.group_shares if ranks <= most), 1.0)

    def _moved_s(self, steps: int, passed: float, ranks: int, stride: int) -> float:
        """A collective of so many steps that moves ``passed`` bytes through every rank of each group."""
        if ranks == 1:
            return 0.0
        started_s = steps * self.collective_s / 2
        nodes, local = spread(ranks, stride, self.gpus_per_node)
        if nodes == 1:
            return started_s + passed / self._link_bytes_per_s(ranks)
        # A group that fills nodes has their network to itself, or shares it where it ends with the one that begins
        # there; of others, each ring has one GPU's share of it, or that of all its GPUs on a node.
        if stride == 1 and ranks > self.gpus_per_node:
            groups = 1 if ranks % self.gpus_per_node == 0 else 2
        else:
            groups = self.gpus_per_node / (local if self.shares_cards else 1)
        inside_s = passed / self._link_bytes_per_s(local) if local > 1 else 0.0
        return started_s + max(inside_s, passed * groups / self.network_bytes_per_s)

    def all_to_all_s(self, size_bytes: float, ranks: int, stride: int) -> float:
        """Every rank sends an equal part of its tensor to each; ranks are ``stride`` apart.

        What leaves a node shares its network with what its other ranks send.
        """
        if ranks == 1:
            return 0.0
        _, local = spread(ranks, stride, self.gpus_per_node)
        inside_s = (local - 1) / ranks * size_bytes / self._link_bytes_per_s(local)
        outside_s = (ranks - local) / ranks * size_bytes * self.gpus_per_node / self.network_bytes_per_s
        return self.collective_s + max(inside_s, outside_s)

    def dispatch_s(self, size_bytes: float, ranks: int, stride: int, *, reached: Callable[[int], float]) -> float:
        """The same, where a node gets one copy of what several of its ranks need, and passes it on.

        As DeepEP does (https://github.com/deepseek-ai/DeepEP: over the network to the rank at the sender's place, from
        there over NVLink), and HybridEP.

        Args:
            size_bytes: with a copy for every expert.
            ranks: that have the experts.
            stride: from one to the next.
            reached: the share of these copies that is sent where so many groups of ranks get one each.
        """
        if ranks == 1:
            return 0.0
        nodes, local = spread(ranks, stride, self.gpus_per_node)
        inside_s = (local - 1) / local * reached(ranks) * size_bytes / self._link_bytes_per_s(local)
        outside_bytes = (nodes - 1) / nodes * reached(nodes) * size_bytes
        return self.collective_s + max(inside_s, outside_bytes * self.gpus_per_node / self.network_bytes_per_s)

    def pass_on_s(self, size_bytes: float, ranks: int, stride: int) -> float:
        """To the next rank of a ring, ``stride`` further; to another node, over one GPU's share of the network."""
        nodes, _ = spread(ranks, stride, self.gpus_per_node)
        if nodes == 1:
            return self.collective_s + size_bytes / self._link_bytes_per_s(2)
        return self.collective_s + size_bytes * self.gpus_per_node / self.network_bytes_per_s

    def send_s(self, size_bytes: float, distance: int, ranks: int) -> float:
        """To the rank ``distance`` further, of ``ranks`` in all; the slowest such link, as all send at once."""
        if ranks <= self.gpus_per_node:
            return self.collective_s + size_bytes / self._link_bytes_per_s(2)
        return self.collective_s + size_bytes * min(distance, self.gpus_per_node) / self.network_bytes_per_s


@lru_cache(maxsize=64)
def machine_of(cluster: Cluster, speed: Speed | None = None) -> Machine:
    """The times of ``cluster`` with the constants of its GPU, or with others."""
    speed = speed or speed_of(cluster.gpu)
    peak = cluster.gpu.peak_tflops * 1e12
    flops_per_s = speed.gemm_efficiency * peak
    fp32_flops_per_s = _FP32.get(family_of(cluster.gpu), _FP32["a100"]) * flops_per_s
    machine = Machine(
        flops_per_s=flops_per_s,
        fp32_flops_per_s=fp32_flops_per_s,
        # TF32 and bf16 came with the same GPUs.
        engine_fp32_flops_per_s=_TF32_SHARE * flops_per_s if cluster.gpu.has_bf16 else fp32_flops_per_s,
        fp8_flops_per_s=_fp8_flops_per_s(cluster.gpu, speed),
        flash_flops_per_s=speed.attention_efficiency * peak,
        memory_bytes_per_s=speed.hbm_efficiency * cluster.gpu.hbm_gb_s * 1e9,
        link_bytes_per_s=speed.nvlink_efficiency * cluster.intra_node_gb_s * 1e9,
        group_shares=tuple((ranks, gb_s / cluster.intra_node_gb_s) for ranks, gb_s in cluster.group_gb_s),
        network_bytes_per_s=speed.network_efficiency * cluster.inter_node_gb_s * 1e9,
        gpus_per_node=cluster.gpus_per_node,
        kernel_s=speed.kernel_s,
        collective_s=speed.collective_s,
        launch_s=speed.launch_s,
        shares_cards=speed.shares_cards,
        transposes=not cluster.gpu.has_mxfp8,  # Blackwell has both.
        profile=cluster.profile,
    )
    link = cluster.profile.link() if cluster.profile is not None else None
    return machine if link is None else replace(machine, link_bytes_per_s=link[0], collective_s=link[1])
