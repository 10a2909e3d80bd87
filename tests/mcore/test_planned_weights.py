"""Megatron builds as many weights on every stage and rank as the planner counts, and as many operations."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_2bw.planner.cost.costs import logged_flops, model_flops
from megatron_2bw.planner.cost.whole import least_bucket, padding_of
from megatron_2bw.planner.flags.flags import layout_flags
from megatron_2bw.planner.flags.model_flags import model_flags
from megatron_2bw.planner.pipeline.stages import contents_of
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.layout import Layout, Optimizer, Precision
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.pipeline_layout import counted_layout, stages_of

TRAINING = (
    "--train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --no-rope-fusion "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
).split()
DUPLICATED = "_down_proj."
"""In names of weights that Transformer Engine has on every tensor-parallel rank; Megatron's own layers split them."""

PLAIN = Model(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=1000)
LATENT = replace(
    PLAIN,
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=24,
    qk_pos_emb_head_dim=8,
    v_head_dim=20,
    qk_layernorm=True,
    rmsnorm=True,
    learned_positions=False,
)
EXPERTS = replace(PLAIN, num_experts=4, bias=False, ffn_hidden_size=48, swiglu=True, tied=False)
DEEPSEEK = replace(
    LATENT,
    num_layers=5,
    num_experts=4,
    bias=False,
    swiglu=True,
    tied=False,
    ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=64,
    dense_layers=2,
    dense_ffn_hidden_size=144,
    mtp_num_layers=1,
)
BUILT: dict[str, Model] = {
    "gpt": PLAIN,
    "llama": replace(PLAIN, num_query_groups=2, swiglu=True, bias=False, rmsnorm=True, learned_positions=False),
    "norms of queries and keys": replace(PLAIN, num_query_groups=2, kv_channels=24, qk_layernorm=True),
    "one query group": replace(PLAIN, num_query_groups=1, kv_channels=24, qk_layernorm=True),
    "latent vectors": LATENT,
    "latent vectors, biases": replace(LATENT, rmsnorm=False, learned_positions=True),
    "no norms of latent vectors": replace(LATENT, qk_layernorm=False, tied=False, bias=False),
    "no latent vector of queries": replace(LATENT, q_lora_rank=0, qk_layernorm=False),
    "experts": EXPERTS,
    "shared experts": replace(EXPERTS, moe_shared_expert_intermediate_size=80),
    "a gate of shared experts": replace(EXPERTS, moe_shared_expert_intermediate_size=80, moe_shared_expert_gate=True),
    "dense first layers": replace(EXPERTS, dense_layers=1, dense_ffn_hidden_size=96),
    "two more tokens": replace(PLAIN, mtp_num_layers=2, learned_positions=False, tied=False),
    "one more token, tied": replace(PLAIN, mtp_num_layers=1, learned_positions=False),
    "deepseek": DEEPSEEK,
}
SPLIT: dict[str, dict[str, Any]] = {
    "alone": {"pipeline": 1, "data": 1},
    "tensor": {"pipeline": 1, "data": 1, "tensor": 2, "sequence_parallel": True},
    "stages": {"pipeline": 2, "data": 1},
    "all": {"pipeline": 2, "data": 2, "tensor": 2, "sequence_parallel": True, "expert": 4, "expert_tensor": 1},
}


def layout_of(model: Model, split: str) -> Layout:
    """What ``split`` says, with the experts and the ends that the model has."""
    sizes = dict(SPLIT[split])
    if not model.num_experts:
        sizes = {name: size for name, size in sizes.items() if not name.startswith("expert")}
    ends = {"first_stage_layers": 3, "last_stage_layers": 2} if model.num_layers % sizes["pipeline"] else {}
    layout = Layout(
        schedule="megatron", global_batch=2, precision=Precision.FP32, fused_attention=False, **sizes, **ends
    )
    assert problem(model, layout) is None
    return layout


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As it was: a model of Megatron's leaves there how its attention is computed, for all that are built later."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def args_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model, Layout], Any]:
    """Megatron's arguments, validated, and on the way what only a GPU has is replaced."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training import arguments

    from .stand_ins import _sequence_parallel_norm, _told_head_sizes

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(WrappedTorchNorm, "__new__", _sequence_parallel_norm)
    monkeypatch.setattr(DotProductAttention, "__init__", _told_head_sizes(DotProductAttention.__init__))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

    def validated(model: Model, layout: Layout) -> Any:
        words = [*layout_flags(model, layout), *model_flags(model), *TRAINING]
        args = parser.parse_args([word for word in words if word != "--moe-grouped-gemm"])
        args.world_size, args.rank = layout.gpus, 1  # Rank 0 prints.
        arguments.validate_args(args)
        args.padded_vocab_size = model.padded_vocab_size(layout.tensor)
        return args

    return validated


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[None]:
    """Megatron's process groups of one of many ranks, which nobody else has to be there for."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.gpus, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def chunks_of(args: Any, layout: Layout, stage: int) -> Iterator[Any]:
    """What one rank of a stage builds, without memory; inside, the process groups are there."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import core_transformer_config_from_args

    from . import gpt

    with rank_of(layout, stage * layout.gpus // layout.pipeline):
        config = core_transformer_config_from_args(args)
        config.use_cpu_initialization = config.init_model_with_meta_device = True
        config.perform_initialization = False
        for chunk in range(layout.chunks):
            yield gpt.build(
                args,
                config,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=stage == chunk == 0,
                post_process=(stage, chunk) == (layout.pipeline - 1, layout.chunks - 1),
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
                vp_stage=chunk if layout.chunks > 1 else None,
            )


def built(args: Any, layout: Layout, stage: int) -> tuple[int, int, int]:
    """Weights of one rank of a stage: experts apart, those of experts, and those that Muon leaves to Adam."""
    from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    counts = [0, 0, 0]
    for model in chunks_of(args, layout, stage):
        for name, parameter in model.named_parameters():
            everywhere = layout.tensor if DUPLICATED in name else 1
            counts[".experts." in name] += everywhere * parameter.numel()
            counts[2] += parameter.numel() if _is_nonlinear_or_embedding(parameter) else 0
    return counts[0], counts[1], counts[2]


@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("name", BUILT)
def test_as_many_weights(name: str, split: str, args_of: Callable[[Model, Layout], Any]) -> None:
    model = BUILT[name]
    check(model, layout_of(model, split), args_of)


def check(model: Model, layout: Layout, args_of: Callable[[Model, Layout], Any]) -> None:
    """Every stage."""
    weights = weights_of(model, layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)
    args = args_of(model, layout)
    for stage in range(layout.pipeline):
        held = contents_of(model, layout, stage)
        counts = [(weights.of(one, model), weights.experts_of(one), weights.others_of(one, model)) for one in held]
        assert built(args, layout, stage) == tuple(map(sum, zip(*counts, strict=True))), stage


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama3-8b", {"pipeline": 2, "data": 64, "global_batch": 128}),
        ("llama3-8b", {"pipeline": 2, "data": 32, "global_batch": 64, "chunks": 4}),
        ("llama2-7b", {"pipeline": 4, "data": 6, "global_batch": 24}),
        # In buckets, what Megatron's own layers lay one after the other would differ from Transformer Engine's.
        ("mixtral-8x7b", {"pipeline": 4, "data": 20, "global_batch": 80, "expert": 4, "overlap_gradients": False}),
    ],
)
def test_as_much_padding_where_matrices_stay_whole(
    name: str, sizes: dict[str, int], args_of: Callable[[Model, Layout], Any]
) -> None:
    """In buffers of weights and gradients, of the optimizers of matrices; on the first stage in buckets."""
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )

    model, optimizer = MODELS[name], {"optimizer": Optimizer.MUON, "distributed_optimizer": True}
    layout = Layout(schedule="megatron", **{"overlap_gradients": True} | sizes | optimizer)
    args = args_of(model, layout)
    config = SimpleNamespace(grad_reduce_in_fp32=True, pad_buckets_for_high_nccl_busbw=False)
    for stage in (0, layout.pipeline - 1):
        bucket = least_bucket(layout) if layout.overlap_gradients and not stage else None
        padding, total = [0, 0], [0, 0]
        for chunk in chunks_of(args, layout, stage):
            tag_params_for_buffer_routing([chunk])
            found = LayerWiseDistributedOptimizer.compute_full_param_layout(
                list(chunk.parameters()),
                bucket,
                layout.replicas,
                config,
                expert_data_parallel_world_size=layout.expert_replicas,
            )
            for key, one in found.layouts.items():
                if key.is_managed_by_layer_wise_optimizer:
                    whole = one.bucket_indices[-1][1]
                    padding[key.is_expert_parallel] += whole - sum(one.per_bucket_numel_unpadded)
                    total[key.is_expert_parallel] += whole
            bucket = None
        for ours, theirs, whole in zip(padding_of(model, layout, stage), padding, total, strict=True):
            assert ours == pytest.approx(theirs, rel=0.02)
            assert theirs or not whole


FREE = [
    ("gpt", "E|t*4|L", (1,)),
    ("gpt", "Ett|t||tL", (1, 2)),
    ("gpt", "|Et|ttt|L|", (1,)),
    ("experts", "E|ttt|t|L", (1, 2)),
    ("experts", "E|t||t|tt|L", (1, 2, 3)),
    ("dense first layers", "E|t|ttt|L", (1, 2)),
    ("one more token, tied", "Et|t*3|mL", (1,)),
    ("one more token, tied", "Et|t*3|m|L", (1, 2)),
    ("one more token, tied", "Et*4m|L", (1,)),
    ("one more token, tied", "E|t*4|m|L", (1, 2)),
    ("two more tokens", "Et|t|tt|,m*2|L|", (1, 2)),
    ("deepseek", "Et|t*3|tmL", (1,)),
    ("deepseek", "Et|t|t|tt|m|L", (1, 2, 3)),
]
"""Stages of which no two are alike, alone and empty ones among them, and as how many chunks of a rank."""


@pytest.mark.parametrize(("name", "stages", "chunks"), [(*one, v) for *one, counts in FREE for v in counts])
def test_as_many_weights_of_free_stages(
    name: str, stages: str, chunks: int, args_of: Callable[[Model, Layout], Any]
) -> None:
    count = len(stages_of(stages))
    layout = Layout(
        schedule="megatron",
        pipeline=count // chunks,
        data=1,
        global_batch=count,
        pipeline_layout=stages,
        precision=Precision.FP32,
        fused_attention=False,
    )
    assert layout.chunks == chunks
    assert problem(BUILT[name], layout) is None
    check(BUILT[name], layout, args_of)


def test_as_many_weights_of_a_whole_model(args_of: Callable[[Model, Layout], Any]) -> None:
    """Without the padding of the vocabulary, and without what predicts further tokens."""
    model = replace(DEEPSEEK, vocab_size=1024, mtp_num_layers=0)
    layout = layout_of(model, "alone")
    assert sum(built(args_of(model, layout), layout, 0)[:2]) == model.parameters


@pytest.mark.parametrize("name", [*BUILT, "deepseek-v3", "deepseek-v2-lite", "mixtral-8x7b"])
def test_as_many_operations(name: str, args_of: Callable[[Model, Layout], Any]) -> None:
    """All that a forward multiplies, and what the log counts: half of the scores. Megatron counts norms as products."""
    from megatron.training.training import num_floating_point_operations

    model = BUILT[name] if name in BUILT else MODELS[name]
    args = args_of(model, Layout(schedule="megatron", pipeline=1, data=1, global_batch=2, fused_attention=False))
    latents = model.q_lora_rank + model.kv_lora_rank
    norms = (model.num_layers + model.mtp_num_layers) * latents + model.mtp_num_layers * 3 * model.hidden_size
    for share, flops in ((1, logged_flops), (2, model_flops)):
        counted = num_floating_point_operations(args, 2, seqlen_squared_sum_in_batch=share * 2 * args.seq_length**2)
        assert counted - 6 * 2 * model.seq_length * norms == pytest.approx(flops(model, 2), rel=1e-12)


@pytest.mark.parametrize(("embedding", "loss"), [(True, True), (True, False), (False, True)])
def test_stages_have_the_layers_that_megatron_builds_where_ends_are_counted(embedding: bool, loss: bool) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    for layers, pipeline, chunks in itertools.product(range(1, 25), (2, 3, 4), (None, 2, 3)):
        stages = pipeline * (chunks or 1)
        if (layers + embedding + loss) % stages:
            continue
        config = SimpleNamespace(
            num_layers=layers,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=chunks,
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
            num_layers_in_first_pipeline_stage=None,
            num_layers_in_last_pipeline_stage=None,
            pipeline_model_parallel_layout=None,
        )
        built = [
            get_num_layers_to_build(config, vp_stage=stage // pipeline if chunks else None, pp_rank=stage % pipeline)
            for stage in range(stages)
        ]
        text = counted_layout(layers, 0, stages, embedding=embedding, loss=loss)
        assert [stage.count("t") for stage in stages_of(text)] == built
