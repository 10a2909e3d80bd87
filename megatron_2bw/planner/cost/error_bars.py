"""How far a prediction may be off: what published runs say of those that are like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_2bw.planner.cost.speeds import family_of
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Fp8, Layout, Optimizer, Precision
from megatron_2bw.planner.specs.model import Kind, Model


class ErrorBar(NamedTuple):
    """How far a prediction may be off."""

    share: float
    """Of what is predicted."""
    source: str


class _Run(NamedTuple):
    """What is predicted."""

    model: Model
    layout: Layout
    cluster: Cluster
    family: str
    """Of GPUs."""
    launching: float
    """Share of the time in which the GPU waits for the host to launch kernels."""

    @property
    def has_kinds_of_layers(self) -> bool:
        model = self.model
        return bool(model.multi_latent_attention or model.moe_shared_expert_intermediate_size or model.mtp_num_layers)

    @property
    def is_up_to_a_host(self) -> bool:
        """That of A100s and V100s, of which small models were measured, is known."""
        return self.launching > 0.1 and self.family not in ("a100", "v100")

    @property
    def has_large_experts(self) -> bool:
        """Eight, in layers not smaller than Mixtral's."""
        return self.model.num_experts == 8 and self.model.hidden_size >= 4096

    @property
    def is_of_h100s_table(self) -> bool:
        is_in_16_bits = self.is_fused and self.layout.fp8 is Fp8.NONE
        return self.family == "h100" and is_in_16_bits and self.model.hidden_size >= 2048

    @property
    def is_fused(self) -> bool:
        return self.layout.fused_attention

    @property
    def is_shared(self) -> bool:
        """Several ranks have a part of every sequence."""
        return self.layout.context > 1

    @property
    def is_pipeline_alone(self) -> bool:
        """Its ranks share nothing but layers."""
        layout = self.layout
        return layout.pipeline > 1 and layout.chunks == layout.data == layout.tensor == layout.context == 1

    @property
    def is_unfused_on_v100(self) -> bool:
        return self.family == "v100" and not self.is_fused and not self.is_shared

    @property
    def is_large_in_8_bits_on_h100(self) -> bool:
        in_8_bits = self.layout.fp8 is not Fp8.NONE
        return self.family == "h100" and in_8_bits and self.is_fused and self.model.hidden_size >= 4096


_BARS: tuple[tuple[Callable[[_Run], bool], float, str], ...] = (
    (
        lambda run: run.cluster.profile is not None,
        0.30,
        "twelve layouts on two CPU cores took 2 to 29% longer, two of one rank on an H200 1 and 5%; --verify-top "
        "measures here",
    ),
    (
        lambda run: run.is_up_to_a_host,
        2.1,
        "one run of a small GPT on an H200, whose host launched kernels so slowly that it took three times as long; "
        "--profile measures it",
    ),
    (
        lambda run: run.layout.optimizer is Optimizer.MUON,
        0.30,
        "assumed: no run with Muon was compared, whose updates are matrix products",
    ),
    (
        lambda run: run.layout.precision is Precision.FP32,
        0.30,
        "assumed: no run in fp32 was compared",
    ),
    (
        lambda run: run.has_kinds_of_layers,
        0.25,
        "five published runs of DeepSeek-V3 and of 14 layers of it, which took from 16% less to 5% longer",
    ),
    (
        lambda run: run.model.num_experts > 8,
        1.1,
        "13 runs of models with 128 experts and no shared ones, which took from 15% less to 2.5 times as long; all but "
        "one, 2.1 times",
    ),
    (
        lambda run: run.has_large_experts and run.family in ("h100", "gb200") and not run.is_shared,
        0.12,
        "NVIDIA's runs with 8 experts, hidden sizes from 4096 on: 26 of Grok-1, from 17% less to 5% longer; 3 of "
        "Mixtral, up to 11% longer",
    ),
    (
        lambda run: run.model.num_experts > 0,
        0.30,
        "assumed: runs with 8 experts on H100 and GB200 took up to 11% longer",
    ),
    (
        lambda run: run.is_large_in_8_bits_on_h100 and run.is_shared,
        0.50,
        "NVIDIA's runs on H100 in 8 bits: six of 2024, with slower attention, took 32 to 50% longer, twelve from 7% "
        "less to 3% longer",
    ),
    (
        lambda run: run.is_large_in_8_bits_on_h100,
        0.11,
        "NVIDIA's runs on H100 in 8 bits: 36, hidden sizes from 4096 on, 11% at most but one",
    ),
    (
        lambda run: run.is_of_h100s_table,
        0.20,
        "runs on H100, hidden sizes from 2048 on: 37 by NVIDIA, which took up to 10% longer; nine of Megatron-LM's "
        "table, up to 26%",
    ),
    (
        lambda run: run.family in ("b200", "b300", "gb200", "gb300") and run.is_fused,
        0.25,
        "NVIDIA's runs on B200, GB200 and GB300: 24 rows, which took up to 26% longer",
    ),
    (
        lambda run: run.is_unfused_on_v100 and run.model.kind is Kind.BERT,
        0.20,
        "21 runs of BERT on V100s, hidden size 1024, which took from 2% less to 42% longer; all but two, up to 20%",
    ),
    (
        lambda run: run.is_unfused_on_v100,
        0.16,
        "runs of GPT on V100s: 39 by Megatron-LM before Core, hidden sizes 768 to 3072, which took from 11% less to "
        "28% longer",
    ),
    (
        lambda run: run.family != "a100" or run.is_shared,
        0.30,
        "assumed: scaled by the data sheet and by what single kernels reach; no such runs were compared",
    ),
    (
        lambda run: run.is_fused and run.is_pipeline_alone,
        0.20,
        "32 pipelines of 8 to 32 GPUs by Megatron-LM, vocabularies of 32,000 to 256,000, which took up to 21% longer",
    ),
    (
        lambda run: run.is_fused,
        0.32,
        "130 runs of Llama by another trainer, which took 2 to 81% longer; nine of ten, less than 32%",
    ),
    (lambda run: run.model.hidden_size < 3072, 0.17, "vTrain's single-node rows, hidden size 2048"),
    (lambda run: run.layout.chunks > 1, 0.15, "Narayanan et al., arXiv 2104.04473, Table 1"),
    (
        lambda run: True,
        0.10,
        "vTrain's multi-node rows, hidden sizes 6144 and 12288; beyond it, 38 rows by Megatron-DeepSpeed, of 176B to "
        "530B on 48 to 420 nodes, took 6 to 43% longer, some or all of 35 with CUDA_LAUNCH_BLOCKING=1",
    ),
)
"""The first that is of a run counts: nine of ten batches of the runs that its source begins with keep to it."""


def error_bar(cluster: Cluster, model: Model, layout: Layout, *, launching: float = 0.0) -> ErrorBar:
    """How far the prediction of such a run may be off, which waits this share of its time for launches."""
    run = _Run(model, layout, cluster, family_of(cluster.gpu), launching)
    return next(ErrorBar(share, source) for is_of, share, source in _BARS if is_of(run))
