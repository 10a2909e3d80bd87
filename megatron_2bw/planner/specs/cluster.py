"""The machine: GPUs, nodes and the links between them."""

from __future__ import annotations

import difflib
import reprlib
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.table import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet of one GPU."""

    name: str
    memory_gb: float
    """GiB that CUDA has, less than printed on the box: torch's "total capacity"."""
    peak_tflops: float
    """Dense matrix products in bf16, fp16 where there is no bf16."""
    hbm_gb_s: float
    nvlink_gb_s: float
    """One direction."""
    has_bf16: bool = True
    fp8_tflops: float = 0.0
    """Dense matrix products in 8 bits; 0: it has none."""
    has_mxfp8: bool = False
    """Products that scale 32 numbers each."""

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    name: str
    gpu: Gpu
    gpus_per_node: int
    nodes: int
    intra_node_gb_s: float
    """Of one GPU within its node, one direction."""
    inter_node_gb_s: float
    """Of one node to the others, one direction, over all of its network cards."""
    group_gb_s: tuple[tuple[int, float], ...] = ()
    """As ``intra_node_gb_s``, of groups of so many ranks at most, smaller ones first: in nodes without a switch, where
    a group has only the links between its members."""
    profile: Any = field(default=None, metadata={"from_file": False})
    """A `profile.Profile` measured there, which prices layers, updates and links; None for the cost model."""
    whole_node: int | None = field(default=None, metadata={"from_file": False})
    """GPUs of the node that this is a part of; None for whole nodes."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        sizes = [ranks for ranks, _ in self.group_gb_s]
        if sizes != sorted({ranks for ranks in sizes if ranks > 1}):
            raise PlanError(f"group_gb_s {reprlib.repr(sizes)} of {self.name}: give more ranks each time, 2 at least")
        for ranks, gb_s in self.group_gb_s:
            if not _LEAST <= gb_s <= self.intra_node_gb_s:
                raise PlanError(
                    f"group_gb_s {reprlib.repr(gb_s)} of {self.name}, of {ranks} ranks: give a number from {_LEAST:g} "
                    f"to intra_node_gb_s, {self.intra_node_gb_s:g}"
                )

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def memory_bytes(self) -> float:
        """Of one GPU."""
        return self.gpu.memory_gb * GIB


_LEAST, _MOST = 1e-9, 1e12
"""What is outside is no machine, and times would leave what a float holds."""


def _check_numbers(part: Gpu | Cluster) -> None:
    for f in fields(part):
        value = getattr(part, f.name)
        least = 0 if f.default == 0 else 1 if f.type == "int" else _LEAST
        if f.type in ("int", "float") and not (isinstance(value, int | float) and least <= value <= _MOST):
            raise PlanError(f"{f.name} {reprlib.repr(value)} of {part.name}: give a number from {least:g} to {_MOST:g}")


def _gpu(name: str, memory_gb: float, peak_tflops: float, hbm_gb_s: float, nvlink_gb_s: float, **more: Any) -> Gpu:
    return Gpu(
        name=name, memory_gb=memory_gb, peak_tflops=peak_tflops, hbm_gb_s=hbm_gb_s, nvlink_gb_s=nvlink_gb_s, **more
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100-16gb", 15.78, 125, 900, 150, has_bf16=False),
        _gpu("v100-32gb", 31.74, 125, 900, 150, has_bf16=False),
        _gpu("a100-40gb", 39.5, 312, 1555, 300),
        _gpu("a100-80gb", 79.25, 312, 2039, 300),
        _gpu("h100-80gb", 79.11, 989, 3350, 450, fp8_tflops=1979),
        _gpu("h200-141gb", 139.72, 989, 4800, 450, fp8_tflops=1979),
        _gpu("b200-180gb", 178.35, 2250, 8000, 900, fp8_tflops=4500, has_mxfp8=True),
    )
}
"""NVIDIA's data sheets (SXM; tensor-core peak without sparsity); NVLink is half of the printed two-way number.

Memory is what torch's out-of-memory messages call total capacity: in issues of kchengiva/Shift-GCN (34; V100 of 16),
liucongg/ChatGLM-Finetuning (73; of 32), TianheWu/CoSeR (10; A100 of 40), HiDream-ai/VAREdit (6; of 80) and
vllm-project/vllm (27508; H100); for H200 and B200, in logs of such errors in public repositories.
"""


MESHES = {4: ((2, 50.0),), 8: ((2, 25.0), (4, 100.0))}
"""``Cluster.group_gb_s`` of nodes of so many V100s, each of which has six links of 25 GB/s.

Of four, it has two to each other one. Of eight, it has one or two to four others: ``nvidia-smi topo -m`` shows one
between the first two, and nine among the first four (Oneflow-Inc/DLPerf, Megatron-LM/README.md), through which two
rings of single links run, each both ways; through all eight run three.
"""


def _cluster(name: str, gpu: str, inter_node_gbit_s: float, **more: Any) -> Cluster:
    """One node of eight GPUs."""
    return Cluster(
        name=name,
        gpu=GPUS[gpu],
        gpus_per_node=8,
        nodes=1,
        intra_node_gb_s=GPUS[gpu].nvlink_gb_s,
        inter_node_gb_s=inter_node_gbit_s / 8,
        **more,
    )


CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _cluster("p3.16xlarge", "v100-16gb", 25, group_gb_s=MESHES[8]),
        _cluster("p3dn.24xlarge", "v100-32gb", 100, group_gb_s=MESHES[8]),
        _cluster("p4d.24xlarge", "a100-40gb", 400),
        _cluster("dgx-a100", "a100-80gb", 1600),
        _cluster("p5.48xlarge", "h100-80gb", 3200),
        _cluster("dgx-h100", "h100-80gb", 3200),
        _cluster("p5en.48xlarge", "h200-141gb", 3200),
        _cluster("dgx-b200", "b200-180gb", 3200),
    )
}
"""One node of each; network: AWS' instance pages, and for DGX arXiv 2104.04473 section 5 (8 x 200 Gbit/s) and NVIDIA's
data sheets (8 x 400 Gbit/s)."""


def known(name: str, among: dict[str, object], what: str) -> object:
    """What is called ``name``, whatever its capitals and hyphens.

    Raises:
        PlanError: nothing is; the message lists the names, the nearest one first.
    """
    for other, thing in among.items():
        if _folded(other) == _folded(name):
            return thing
    nearest = max(among, key=lambda other: _likeness(name, other, among[other]))
    listed = ", ".join(dict.fromkeys([nearest, *among]))
    raise PlanError(f"unknown {what} {name!r}; choose one of {listed}")


def _folded(name: str) -> str:
    """As it is compared.

    >>> _folded("LLAMA3_70B"), _folded("llama3-70b")
    ('llama370b', 'llama370b')
    """
    return name.lower().translate(dict.fromkeys(map(ord, "-_ ")))


def _likeness(name: str, other: str, thing: object) -> tuple[float, int]:
    """How much ``name`` is like ``other``, or like the GPU of a cluster: in all, and in the longest part of both."""
    names = [other, thing.gpu.name] if isinstance(thing, Cluster) else [other]
    matchers = [difflib.SequenceMatcher(None, one, name.lower()) for one in names]
    return max((matcher.ratio(), matcher.find_longest_match().size) for matcher in matchers)
