"""Megatron's flags describe a Model and a Layout, and are described by them."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags import flags as module
from megatron_2bw.planner.flags.flags import Configuration, layout_flags, read
from megatron_2bw.planner.flags.model_flags import model_flags, read_model
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.cluster import GPUS
from megatron_2bw.planner.specs.layout import Fp8, Layout, Optimizer, Precision, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.specs.models import MODELS

SMALL = Model(num_layers=16, hidden_size=512, num_attention_heads=8, seq_length=128, vocab_size=1000)
LAYOUTS = {
    "2bw": Layout(schedule="2bw", pipeline=4, data=2, microbatch=2, global_batch=32),
    "2bw, more": Layout(
        schedule="2bw",
        pipeline=2,
        data=1,
        global_batch=32,
        extra_in_flight=1,
        delayed_microbatches=5,
        gradient_buffers=1,
        tensor=2,
    ),
    "flush": Layout(schedule="1f1b-flush", pipeline=2, data=2, global_batch=8, overlap_gradients=True),
    "gathered during forwards": Layout(
        schedule="megatron",
        pipeline=2,
        chunks=2,
        data=2,
        global_batch=8,
        distributed_optimizer=True,
        overlap_gradients=True,
        overlap_parameters=True,
    ),
    "in 8 bits": Layout(
        schedule="megatron",
        pipeline=2,
        data=2,
        tensor=2,
        global_batch=8,
        sequence_parallel=True,
        distributed_optimizer=True,
        fp8=Fp8.DELAYED,
        fp8_parameters=True,
        gradients_in_bf16=True,
        fused_loss=True,
        overlap_tensor=True,
    ),
    "a state in 16 bits": Layout(
        schedule="2bw",
        pipeline=2,
        data=2,
        global_batch=8,
        distributed_optimizer=True,
        adam_state=AdamState("fp16", "bf16", "fp8"),
    ),
    "two optimizers": Layout(
        schedule="2bw", pipeline=2, data=4, global_batch=8, distributed_optimizer=True, optimizer_instances=2
    ),
    "in blocks": Layout(schedule="1f1b-flush", pipeline=2, data=2, global_batch=8, fp8=Fp8.BLOCKWISE),
    "inter-layer": Layout(schedule="inter-layer", pipeline=2, data=2, global_batch=8, precision=Precision.FP16),
    "gems": Layout(schedule="gems", pipeline=2, data=2, global_batch=8),
    "mixpipe": Layout(schedule="mixpipe", pipeline=4, data=1, global_batch=4, mixpipe_k=2, mixpipe_gamma=1),
    "gpipe": Layout(schedule="gpipe", pipeline=2, data=2, global_batch=8, precision=Precision.FP16),
    "gradients in fp32": Layout(
        schedule="gpipe", pipeline=2, data=2, global_batch=8, precision=Precision.FP16, gradients_in_fp32=True
    ),
    "interleaved": Layout(schedule="megatron", pipeline=2, data=1, global_batch=8, chunks=4),
    "interleaved, no overlap": Layout(
        schedule="megatron", pipeline=4, data=1, global_batch=8, chunks=2, overlap_transfers=False
    ),
    "uneven": Layout(
        schedule="megatron", pipeline=3, data=1, global_batch=3, first_stage_layers=4, last_stage_layers=4
    ),
    "uneven and interleaved": Layout(
        schedule="megatron", pipeline=3, data=1, global_batch=3, first_stage_layers=4, last_stage_layers=4, chunks=2
    ),
    "alone": Layout(
        schedule="megatron", pipeline=1, data=1, global_batch=4, precision=Precision.FP32, fused_attention=False
    ),
    "tensor": Layout(
        schedule="megatron",
        pipeline=1,
        data=2,
        tensor=4,
        global_batch=4,
        sequence_parallel=True,
        distributed_optimizer=True,
        fused_attention=False,
    ),
    "selective": Layout(schedule="megatron", pipeline=1, data=1, global_batch=4, recompute=Recompute.SELECTIVE),
    "block": Layout(
        schedule="megatron",
        pipeline=2,
        data=1,
        global_batch=4,
        recompute=Recompute.FULL,
        recompute_method=RecomputeMethod.BLOCK,
        recompute_layers=5,
    ),
    "muon": Layout(
        schedule="2bw", pipeline=2, data=2, global_batch=8, optimizer=Optimizer.MUON, distributed_optimizer=True
    ),
    "uniform": Layout(
        schedule="megatron", pipeline=2, data=1, global_batch=4, recompute=Recompute.FULL, recompute_layers=2
    ),
}
VARIED = {
    "plain": SMALL,
    "experts": dataclasses.replace(SMALL, num_experts=4, moe_router_topk=1, bias=False),
    "swiglu": dataclasses.replace(SMALL, swiglu=True, ffn_hidden_size=1344),
    "channels": dataclasses.replace(SMALL, kv_channels=32, num_query_groups=4, ffn_hidden_size=1536, tied=False),
    "vocabulary": dataclasses.replace(SMALL, make_vocab_size_divisible_by=1, dropout=False),
    **{name: dataclasses.replace(model, name="") for name, model in MODELS.items()},
}


def flags(text: str) -> Options:
    return Options.parse(text.split())


def read_back(model: Model, layout: Layout) -> Configuration:
    words = [*layout_flags(model, layout), *model_flags(model), "--vocab-size", str(model.vocab_size)]
    return read(Options.parse(words), gpus=layout.gpus, kind=model.kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_survive_the_way_through_flags(layout: str):
    assert problem(SMALL, LAYOUTS[layout]) is None
    found = read_back(SMALL, LAYOUTS[layout])
    assert (found.model, found.layout) == (SMALL, LAYOUTS[layout])
    assert [note.split(":")[0] for note in found.notes] == ["--cross-entropy-fusion-impl"] * found.layout.fused_loss


def test_what_only_swiglu_has_survives_too():
    unfused = dataclasses.replace(LAYOUTS["flush"], fused_swiglu=False)
    assert read_back(VARIED["swiglu"], unfused).layout == unfused


@pytest.mark.parametrize("model", VARIED)
def test_models_survive_the_way_through_flags(model: str):
    assert read_back(VARIED[model], LAYOUTS["alone"]).model == VARIED[model]


def test_flags_that_were_given_are_printed_as_given():
    given = (
        f"{MODEL} --max-position-embeddings 4096 --position-embedding-type none --hidden-dropout 0 --norm-epsilon 1e-6"
    )
    words = model_flags(read_model(flags(f"{given} --tokenizer-type NullTokenizer --lr 1")))
    assert " ".join(words) == given.replace("--vocab-size 1000 ", "")
    assert model_flags(read_model(flags(MODEL)))[-2:] == ["--max-position-embeddings", "128"]


@pytest.mark.parametrize(
    ("more", "notes"),
    [
        (
            "--tensor-parallel-size 8",
            ("--tensor-parallel-size: not priced; did you mean --tensor-model-parallel-size?",),
        ),
        ("--encoder-num-layers 4", ()),
        ("--cross-entropy-loss-fusion", ("--cross-entropy-loss-fusion: priced without that fusion",)),
        ("--squared-relu --no-bias-gelu-fusion --accumulate-allreduce-grads-in-fp32 --fp16", ()),
        (
            "--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid --disable-bias-linear",
            (
                "--num-experts: priced with experts that are nearly equally busy; before they are, the busiest takes "
                "more",
                "--moe-grouped-gemm: priced as if it were given",
            ),
        ),
        ("--position-embedding-type mrope --mrope-section 16 24 24", ()),
        ("--pipeline_schedule 2bw", ("--pipeline_schedule: not priced; did you mean --pipeline-schedule?",)),
        (
            "--data-parallel-size 4",
            ("--data-parallel-size: no flag of Megatron, which derives it from the number of GPUs; give --gpus",),
        ),
        ("--lr 1e-4 --seed 3 --overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer", ()),
        (
            "--overlap-param-gather --overlap-grad-reduce --optimizer dist_muon --muon-scalar-optimizer lion --bf16",
            ("--muon-scalar-optimizer: priced with Adam for what is no matrix",),
        ),
        (
            "--optimizer soap",
            ("--optimizer: priced with Adam's state, a fifth of SOAP's",),
        ),
        (
            "--optimizer muon --bf16 --muon-num-ns-steps 9 --muon-tp-mode duplicated --muon-fp32-matmul-prec medium",
            ("--muon-num-ns-steps: priced with 5", "--muon-tp-mode: priced with blockwise"),
        ),
        ("--muon-num-ns-steps 9", ()),
        ("--recompute-granularity selective --recompute-modules core_attn", ()),
        ("--deterministic-mode", ("--deterministic-mode: priced with Megatron's usual kernels, which take less time",)),
        ("--no-bias-dropout-fusion", ("--no-bias-dropout-fusion: priced with that fusion",)),
        (
            "--mlp-chunks-for-training 4",
            ("--mlp-chunks-for-training: priced with all tokens of a microbatch in the MLP at once",),
        ),
        ("--mlp-chunks-for-training 1", ()),
        (
            "--max-position-embeddings 999999 --window-size (1,0) --enable-cuda-graph --no-overlap-p2p-communication",
            (
                "--enable-cuda-graph: priced without CUDA graphs",
                "--window-size: priced with attention over whole sequences",
                "--max-position-embeddings: priced with weights of as many positions as --seq-length",
            ),
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--overlap-p2p-communication-warmup-flush --global-batch-size 8",
            ("--overlap-p2p-communication-warmup-flush: priced without that overlap",),
        ),
        ("--max-position-embeddings 999999 --position-embedding-type rope", ()),
        (
            "--bf16 --fp8-format hybrid --fp8-dot-product-attention --activation-func-fp8-input-store "
            "--moe-router-padding-for-quantization",
            (
                "--fp8-dot-product-attention: priced with attention in 16 bits",
                "--moe-router-padding-for-quantization: priced with tokens padded before the experts",
                "--activation-func-fp8-input-store: priced with that input kept in 16 bits",
            ),
        ),
    ],
)
def test_flags_that_are_not_priced_are_noted(more: str, notes: tuple[str, ...]):
    assert read(flags(f"{MODEL} --micro-batch-size 1 {more}"), gpus=4).notes == notes


def test_selective_recomputation_of_other_modules_keeps_the_scores():
    given = f"{MODEL} --micro-batch-size 1 --recompute-granularity selective"
    found = [
        read(flags(f"{given} {more}"), gpus=4).layout.modules_again
        for more in ("", "--recompute-modules layernorm core_attn", "--recompute-modules layernorm")
    ]
    assert found == [("core_attn",), ("core_attn", "layernorm"), ("layernorm",)]
    row = {"model": "gpt-2.2b", "cluster": "dgx-a100", "gpus": 8, "microbatch": 4, "attention_backend": "unfused"}
    others = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    assert predicted({**row, **others})["stages"] == predicted(row)["stages"]


@pytest.mark.parametrize(("schedule", "batch"), [("0:8 2.4B:320 4M:16", 320), ("0:1k,250B:1.5K", 1500), ("0:24", 24)])
def test_a_batch_that_grows_in_steps_is_priced_at_its_last_size(schedule: str, batch: int):
    words = [*MODEL.split(), "--micro-batch-size", "1", "--step-batch-size-schedule", schedule]
    found = read(Options.parse(words), gpus=4)
    assert found.layout.global_batch == batch
    assert "--step-batch-size-schedule: priced at its last batch size" in found.notes
    row = {"model": "gpt-2.2b", "cluster": "dgx-a100", "gpus": 4, "mbs": 1}
    saved = {"step_batch_size_schedule": schedule, "global_batch_size": 4}  # Of the beginning.
    assert predicted(row | saved)["time_s"] == predicted(row | {"global_batch_size": batch})["time_s"]


@pytest.mark.parametrize("schedule", ["8", "0:x", "", "0:1:2"])
def test_steps_that_are_none(schedule: str):
    words = [*MODEL.split(), "--micro-batch-size", "1", "--step-batch-size-schedule", schedule]
    with pytest.raises(PlanError, match="--step-batch-size-schedule"):
        read(Options.parse(words), gpus=4)
    with pytest.raises(PlanError, match="--step-batch-size-schedule and --global-batch-size exclude each other"):
        read(Options.parse([*words[:-1], "0:8", "--global-batch-size", "8"]), gpus=4)


def test_flags_are_unique_and_strings():
    for model, layout in itertools.product(VARIED.values(), LAYOUTS.values()):
        words = [*layout_flags(model, layout), *model_flags(model)]
        names = [word for word in words if word.startswith("--")]
        assert len(names) == len(set(names))
        assert all(type(word) is str and word == word.strip() != "" for word in map(str, words))


AWARE = "--use-precision-aware-optimizer --use-distributed-optimizer"
MODEL = "--num-layers 16 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000"


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("", "ffn_hidden_size", 2048),
        ("--swiglu", "ffn_hidden_size", 1344),
        ("--swiglu --ffn-hidden-size 1000", "ffn_hidden_size", 1000),
        ("--num-query-groups 2", "num_query_groups", 8),
        ("--group-query-attention", "num_query_groups", 1),
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("--num-experts 4 --moe-ffn-hidden-size 64", "ffn_hidden_size", 64),
        ("--use-rotary-position-embeddings", "learned_positions", False),
        ("--use-rotary-position-embeddings", "rotary", True),
        ("--position-embedding-type none", "learned_positions", False),
        ("--position-embedding-type none", "rotary", False),
        ("--position-embedding-type yarn", "rotary", True),
        ("--qk-layernorm", "qk_layernorm", True),
        ("--hidden-dropout 0", "dropout", True),
        ("--hidden-dropout 0.00 --attention-dropout 0e0", "dropout", False),
        ("--quick-geglu", "swiglu", True),
        ("--quick-geglu", "ffn_hidden_size", 2048),
        ("--padded-vocab-size 1024", "vocab_size", 1024),
        ("--tokenizer-type Llama2Tokenizer", "vocab_size", 1000),
        ("--seq-length 256", "seq_length", 256),
    ],
)
def test_megatrons_defaults(more: str, field: str, value: object):
    assert getattr(read_model(flags(f"{MODEL} {more}")), field) == value


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--bf16 1", "--bf16 1: it takes no value; leave out '1'"),
        ("--global-batch-size 64 32", "--global-batch-size 64 32: it takes one value; leave out '32'"),
        ("--hidden-dropout 0.1 0.2", "--hidden-dropout 0.1 0.2: it takes one value"),
        ("--kv-channels 0", "--kv-channels 0: give a whole number of at least 1, or leave it out"),
        ("--group-query-attention --num-query-groups 0", "--num-query-groups 0: give a whole number"),
        ("--language-model-type mistral", "--language-model-type: the cost model does not cover"),
    ],
)
def test_values_that_megatron_would_not_take(more: str, message: str):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        read(flags(f"{MODEL} --micro-batch-size 1 {more}"), gpus=1)


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("", "microbatches", 1),
        ("", "precision", Precision.FP32),
        ("--recompute-activations", "recompute", Recompute.SELECTIVE),
        ("--pipeline-schedule dapple --pipeline-model-parallel-size 2", "schedule", "1f1b-flush"),
        ("--sequence-parallel", "sequence_parallel", False),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2 --global-batch-size 8",
            "chunks",
            4,
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 17", "recompute_layers", 17),
        ("--transformer-impl local", "fused_attention", False),
        ("--transformer-impl local --use-flash-attn", "fused_attention", True),
        ("--attention-backend unfused", "fused_attention", False),
        ("--attention-backend flash", "fused_attention", True),
        ("--bf16 --fp8-format hybrid", "fp8", Fp8.DELAYED),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "fp8", Fp8.MXFP8),
        ("--bf16 --fp8-format e4m3 --transformer-impl local", "fp8", Fp8.NONE),
        ("--bf16 --fp8-recipe mxfp8", "fp8", Fp8.NONE),
        ("--bf16 --grad-reduce-in-bf16", "gradients_in_bf16", True),
        ("--fp16 --grad-reduce-in-bf16", "gradients_in_bf16", False),
        (f"--bf16 {AWARE} --main-grads-dtype bf16", "gradients_in_bf16", True),
        (f"--bf16 {AWARE}", "adam_state", AdamState()),
        (f"--bf16 {AWARE} --exp-avg-sq-dtype fp8", "adam_state", AdamState(second_moment="fp8")),
        ("--bf16 --main-params-dtype fp32", "adam_state", None),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "fused_loss", True),
        ("--cross-entropy-fusion-impl te", "fused_loss", False),
        ("--cross-entropy-loss-fusion", "fused_loss", False),
        ("--fp16", "gradients_in_fp32", False),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "gradients_in_fp32", True),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "gradients_in_fp32", False),
        ("--no-bias-swiglu-fusion", "fused_swiglu", True),
        ("--no-overlap-p2p-communication", "overlap_transfers", True),
        ("--no-bias-swiglu-fusion --swiglu", "fused_swiglu", False),
        ("--global-batch-size 16 --global-batch-size=32", "global_batch", 32),
        ("--optimizer lion", "optimizer", Optimizer.LION),
        ("--optimizer dist_muon --bf16", "optimizer", Optimizer.MUON),
        ("--optimizer dist_muon --bf16", "distributed_optimizer", True),
        ("--optimizer soap", "optimizer", Optimizer.ADAM),
    ],
)
def test_what_flags_mean(more: str, field: str, value: object):
    options = flags(f"{MODEL} --micro-batch-size 2 --global-batch-size 8 {more}")
    assert getattr(read(options, gpus=4).layout, field) == value


@pytest.mark.parametrize(
    ("files", "kind", "size"),
    [
        ("--vocab-file a --merge-file b", Kind.GPT, 50257),
        ("--vocab-file a", Kind.BERT, 30522),
        ("--vocab-file a --tokenizer-type BertWordPieceCase", Kind.BERT, 28996),
    ],
)
def test_the_vocabulary_of_a_tokenizer(files: str, kind: Kind, size: int):
    options = flags(f"{MODEL.replace('--vocab-size 1000', files)}")
    assert read_model(options, kind=kind).vocab_size == size


def test_the_global_batch_is_one_microbatch_per_replica_unless_given():
    assert read(flags(f"{MODEL} --micro-batch-size 2"), gpus=4).layout.global_batch == 8


def test_attention_is_fused_where_the_gpu_has_the_kernels():
    options = flags(f"{MODEL} --micro-batch-size 2 --fp16")
    fused = {name: read(options, gpus=1, gpu=gpu).layout.fused_attention for name, gpu in GPUS.items()}
    assert fused == {name: not name.startswith("v100") for name in GPUS}
    assert not read(flags(f"{MODEL} --micro-batch-size 2"), gpus=1, gpu=GPUS["a100-40gb"]).layout.fused_attention


@pytest.mark.parametrize(("gpu", "precision"), [("v100-16gb", "--fp16"), ("a100-40gb", "")])
def test_fused_attention_is_refused_where_there_are_no_kernels(gpu: str, precision: str):
    options = flags(f"{MODEL} --micro-batch-size 2 --attention-backend flash {precision}")
    with pytest.raises(
        PlanError, match=f"fused attention: {gpu} has no such kernels in fp(16|32); use attention_backend unfused"
    ):
        read(options, gpus=1, gpu=GPUS[gpu])


RUN = f"{MODEL} --micro-batch-size 1"
DEEP = f"{RUN} --pipeline-model-parallel-size 4"
INTERLEAVED = f"{DEEP} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL, "--micro-batch-size is missing"),
        ("--hidden-size 512", "--num-layers is missing"),
        (f"{MODEL} --micro-batch-size 0", "microbatch 0: give a whole number of at least 1"),
        (f"{MODEL} --micro-batch-size two", "--micro-batch-size two: give a whole number"),
        (f"{MODEL} --micro-batch-size", "--micro-batch-size has no value"),
        (f"{MODEL} --micro-batch-size 3 --global-batch-size 8", "global_batch 8 is no multiple of microbatch 3"),
        (f"{RUN} --pipeline-model-parallel-size 3", "gpus 4 is no multiple of tensor x context x pipeline = 3; use 3"),
        (f"{DEEP} --num-layers 6", "does not divide num_layers 6; use 2 stages"),
        (f"{RUN} --num-attention-heads 7", "num_attention_heads 7 does not divide hidden_size"),
        (f"{RUN} --num-attention-heads 4096", "num_attention_heads 4096 is more than hidden_size"),
        (f"{RUN} --tensor-model-parallel-size 0", "tensor 0: give a whole number of at least 1"),
        (f"{RUN} --lora-r 16", "--lora-r: the cost model does not cover adapters that are trained in place of the"),
        (f"{RUN} --noop-layers 0", "--noop-layers: the cost model does not cover layers that do nothing"),
        (
            f"{RUN} --ffn-hidden-size 9 --tensor-model-parallel-size 4",
            "tensor 4 does not divide ffn_hidden_size 9; use 1",
        ),
        (f"{RUN} --pipeline-schedule 3bw", "unknown schedule '3bw'; choose one of 2bw"),
        (f"{RUN} --pipeline-schedule 2bw", "pipeline 1: 2bw needs at least 2; use schedule megatron"),
        (
            f"{RUN} --pipeline-schedule 2bw --pipeline-parallel-size 4",
            "--pipeline-parallel-size: not priced; did you mean --pipeline-model-parallel-size?",
        ),
        (f"{RUN} --recompute-granularity some", "--recompute-granularity some: choose one of none, selective, full"),
        (
            f"{RUN} --recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
            "recompute_layers 0",
        ),
        (
            f"{RUN} --recompute-granularity full --recompute-num-layers 1",
            "full needs --recompute-method; give it, such as",
        ),
        (f"{RUN} --recompute-granularity full --recompute-method block", "such as --recompute-num-layers 1"),
        (
            f"{RUN} --recompute-activations --recompute-method block",
            "--recompute-method needs --recompute-granularity full",
        ),
        (
            f"{RUN} --num-attention-heads 10 --hidden-size 1000 --tensor-model-parallel-size 4",
            "tensor 4 does not divide num_attention_heads 10; use 2",
        ),
        (
            f"{RUN} --num-attention-heads 6 --hidden-size 768 --group-query-attention --num-query-groups 3 "
            "--tensor-model-parallel-size 2",
            "tensor 2 is neither a divisor nor a multiple of num_query_groups 3; use 1",
        ),
        (f"{RUN} --squared-relu", "--squared-relu has no kernel that is fused with the bias; give --no-bias-gelu-fus"),
        (
            f"{RUN} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--no-overlap-p2p-communication",
            "2 stages interleave with overlap alone; leave it out",
        ),
        (
            f"{INTERLEAVED} --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush",
            "--overlap-p2p-communication-warmup-flush exclude each other; leave one out",
        ),
        (f"{RUN} --swiglu --squared-relu", "--swiglu and --squared-relu exclude each other; leave one out"),
        (f"{RUN} --swiglu --quick-geglu", "--swiglu and --quick-geglu exclude each other; leave one out"),
        (f"{RUN} --num-experts 4 --moe-router-topk 1", "--moe-router-topk 1 needs --moe-router-pre-softmax"),
        (f"{RUN} --encoder-seq-length 128", "--encoder-seq-length exclude each other; leave out --encoder-seq-length"),
        (f"{RUN} --position-embedding-type mrope", "mrope needs --mrope-section; use --position-embedding-type rope"),
        (
            f"{DEEP} --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
            "-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other; leave one out",
        ),
        (
            f"{DEEP} --num-layers-per-virtual-pipeline-stage 2 --decoder-first-pipeline-num-layers 4",
            "exclude each other; give --num-virtual-stages-per-pipeline-rank in place of the first",
        ),
        (
            f"{RUN} --checkpoint-activations",
            "--checkpoint-activations: no flag of today's Megatron; give --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1 in its place, or behind a script with --ignore "
            "checkpoint-activations",
        ),
        (f"{RUN} --model-parallel-size 8", "Megatron; give --tensor-model-parallel-size in its place, or behind"),
        (f"{RUN} --batch-size 8", "--batch-size: no flag of today's Megatron; give --micro-batch-size in its place"),
        (f"{RUN} --num-key-value-heads 4", "give --group-query-attention --num-query-groups in its place"),
        (
            f"{RUN} --intermediate-size 11008",
            "--intermediate-size: no flag of today's Megatron; give --ffn-hidden-size",
        ),
        (f"{RUN} --moe-num-experts 64", "--moe-num-experts: no flag of today's Megatron; give --num-experts in its"),
        (f"{RUN} --deepspeed --zero-stage 3", "does not cover DeepSpeed, whose file says what it shards and"),
        (f"{RUN} --enable-zero-bubble", "--enable-zero-bubble: the cost model does not cover backward passes in two"),
        (
            f"{RUN} --num-distributed-optimizer-instances 2",
            "optimizer_instances 2 needs distributed_optimizer; switch it on",
        ),
        (f"{RUN} --img-h 336", "does not cover models of pictures beside text"),
        (f"{RUN} --fp32-residual-connection", "does not cover a sum of the layers in fp32"),
        (f"{RUN} --attention-output-gate", "does not cover gates behind attention"),
        (f"{RUN} --experimental-attention-variant gated_delta_net", "does not cover attention of other kinds"),
        (f"{RUN} --is-hybrid-model", "does not cover layers of several kinds"),
        (f"{RUN} --bf16 --fp16", "--bf16 and --fp16 exclude each other; leave one out"),
        (
            f"{RUN} --use-precision-aware-optimizer",
            "--use-precision-aware-optimizer needs --use-distributed-optimizer and Adam; give them, or leave it out",
        ),
        (f"{RUN} {AWARE} --optimizer sgd", "needs --use-distributed-optimizer and Adam; give them, or leave it out"),
        (f"{RUN} {AWARE} --fp16", "clips no gradients in fp16; give --accumulate-allreduce-grads-in-fp32"),
        (f"{RUN} --exp-avg-dtype bf16", "bf16 needs --use-precision-aware-optimizer; give it, or use fp32"),
        (f"{RUN} {AWARE} --exp-avg-dtype bf8", "--exp-avg-dtype bf8"),
        (
            f"{RUN} {AWARE} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; use fp32",
        ),
        (
            f"{RUN} --overlap-param-gather --overlap-grad-reduce",
            "--overlap-param-gather needs --use-distributed-optimizer",
        ),
        (
            f"{RUN} --overlap-param-gather --use-distributed-optimizer",
            "--overlap-param-gather needs --overlap-grad-reduce",
        ),
        (f"{RUN} --max-position-embeddings 64", "embeddings 64: fewer than --seq-length 128; use 128"),
        (
            f"{RUN} --position-embedding-type bogus",
            "--position-embedding-type bogus: choose one of learned_absolute, rope",
        ),
        (f"{RUN} --optimizer adamw", "--optimizer adamw: choose one of adam, sgd, muon, dist_muon"),
        (f"{RUN} --normalization bogus", "--normalization bogus: choose one of LayerNorm, RMSNorm"),
        (f"{RUN} --attention-backend local", "--attention-backend local needs --spec local"),
        (f"{RUN} --moe-ffn-hidden-size 256", "--moe-ffn-hidden-size needs --num-experts; give it"),
        (f"{RUN} --decoder-first-pipeline-num-layers 0", "--decoder-first-pipeline-num-layers 0: a stage has a layer"),
        (f"{RUN} --decoder-last-pipeline-num-layers 0", "--decoder-last-pipeline-num-layers 0: a stage has a layer"),
        (
            f"{RUN} --overlap-moe-expert-parallel-comm",
            "overlap_exchanges: the model has no experts; leave it out",
        ),
        (
            f"{RUN} --overlap-moe-expert-parallel-comm --num-experts 4 --expert-model-parallel-size 2",
            "does not go with the dispatcher allgather; give --moe-token-dispatcher-type alltoall",
        ),
        (
            f"{RUN} --attention-backend bogus",
            "--attention-backend bogus: choose one of auto, flash, fused, unfused, local",
        ),
        (
            f"{RUN} --hidden-dropout abc",
            "--hidden-dropout abc: give a number from 0 to 1, such as --hidden-dropout 0.1",
        ),
        (f"{RUN} --rotary-base abc", "--rotary-base abc: give a number of at least 0, such as --rotary-base 10000"),
        (f"{RUN} --norm-epsilon inf", "--norm-epsilon inf: give a number of at least 0"),
        (f"{RUN} --attention-dropout nan", "--attention-dropout nan: give a number from 0 to 1"),
        (f"{RUN} --context-parallel-size 2", "context 2 needs fused attention; use 1, or fused attention"),
        (f"{RUN} --expert-model-parallel-size 2", "expert 2: the model has no experts; leave it out"),
        (f"{RUN} --fp8-format hybrid", "fp8 delayed beside fp32; use precision bf16"),
        (f"{RUN} --fp8-format e5m2", "--fp8-format e5m2: choose one of hybrid, e4m3"),
        (
            f"{RUN} --bf16 --fp8-format e4m3 --fp8-recipe custom",
            "does not cover a recipe of 8-bit products of your own",
        ),
        (
            f"{RUN} --bf16 --fp8-format hybrid --first-last-layers-bf16",
            "--first-last-layers-bf16: delayed scaling is of all layers or none; give --fp8-recipe tensorwise",
        ),
        (MODEL.replace("1000", "many"), "--vocab-size many: give a whole number"),
        (MODEL.replace("--vocab-size 1000", "--tokenizer-type HuggingFaceTokenizer"), "has no fixed vocabulary"),
        (
            f"{DEEP} --pipeline-schedule 2bw --global-batch-size 2",
            "microbatches 2: 2bw needs at least 3 on 4 stages; raise global_batch to 3",
        ),
        (
            f"{DEEP} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6",
            "microbatches 6: interleaving needs a multiple of pipeline 4; use global_batch 8",
        ),
        (f"{DEEP} --num-layers-per-virtual-pipeline-stage 3", "3 does not divide the 4 layers of a stage; use 2"),
        (
            f"{INTERLEAVED} {GROUP} 3",
            f"{GROUP} 3: the 4 stages need at least one microbatch each; use 4, or leave it out",
        ),
        (
            f"{INTERLEAVED} {GROUP} 8",
            f"{GROUP}: the cost model does not cover groups of more microbatches than there are stages; to price the "
            f"rest, give --ignore {GROUP[2:]}",
        ),
        (f"{DEEP} {GROUP} four", f"{GROUP} four: give a whole number"),
    ],
)
def test_nonsense_names_field_value_and_remedy(text: str, message: str):
    with pytest.raises(PlanError) as refusal:
        read(flags(text), gpus=4)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        (INTERLEAVED, 4),
        (DEEP, 2),
        (f"{DEEP} --num-virtual-stages-per-pipeline-rank 1", 8),
        (f"{DEEP} --num-layers-per-virtual-pipeline-stage 4", 8),
    ],
)
def test_groups_of_microbatches_that_change_nothing(text: str, group: int):
    assert read(flags(f"{text} {GROUP} {group}"), gpus=4) == read(flags(text), gpus=4)


def test_a_gpu_without_bf16():
    with pytest.raises(PlanError, match="precision bf16: v100-16gb has no bf16; use fp16"):
        read(flags(f"{MODEL} --micro-batch-size 1 --bf16"), gpus=4, gpu=GPUS["v100-16gb"])


def test_k_that_chooses_itself():
    words = "--pipeline-schedule mixpipe --mixpipe-k auto --pipeline-model-parallel-size 4 --micro-batch-size 1 --bf16"
    words = [*words.split(), "--global-batch-size", "4", *model_flags(SMALL), "--vocab-size", str(SMALL.vocab_size)]
    with pytest.raises(PlanError, match="--mixpipe-k auto: that depends on the GPU"):
        read(Options.parse(words), gpus=4)
    assert read(Options.parse(words), gpus=4, gpu=GPUS["a100-40gb"]).layout.mixpipe_k == 4


def test_flags_that_pipedream_cannot_have():
    words = layout_flags(SMALL, Layout(schedule="pipedream", pipeline=2, data=1, global_batch=1))
    words += [*model_flags(dataclasses.replace(SMALL, tied=False)), "--vocab-size", str(SMALL.vocab_size)]
    assert read(Options.parse(words), gpus=2).layout.schedule == "pipedream"
    for more, message in (
        (["--clip-grad", "1.0"], "use --clip-grad 0"),
        (["--loss-scale", "128"], "--loss-scale does not work with --pipeline-schedule pipedream"),
    ):
        with pytest.raises(PlanError, match=message):
            read(Options.parse([*words, *more]), gpus=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "mixpipe", "mixpipe_k": 3}, "mixpipe_k 3: an even number up to pipeline 4; use 2"),
        ({"schedule": "mixpipe", "mixpipe_k": 2, "mixpipe_gamma": 2}, "mixpipe_gamma 2: at most (d - k)/2 = 1; use 1"),
        ({"schedule": "chimera", "mixpipe_gamma": 1}, "mixpipe_gamma 1: chimera has no such number; use 0"),
        ({"schedule": "chimera", "global_batch": 12}, "use global_batch 8"),
        ({"schedule": "pipedream"}, "use global_batch 2"),
        ({"optimizer_instances": 2}, "optimizer_instances 2 needs distributed_optimizer; switch it on"),
        (
            {"data": 6, "global_batch": 96, "distributed_optimizer": True, "optimizer_instances": 4},
            "optimizer_instances 4 does not divide the 6 replicas of a stage; use 3",
        ),
        (
            {"data": 2, "distributed_optimizer": True, "optimizer_instances": 2, "optimizer": Optimizer.MUON},
            "optimizer_instances 2: Megatron has one of optimizer muon; use 1, or optimizer adam",
        ),
        ({"schedule": "mixpipe", "mixpipe_k": 2, "global_batch": 16}, "use global_batch 8"),
    ],
    ids=str,
)
def test_wrong_numbers_are_named_with_the_nearest_right_one(changes: dict, message: str):
    model = dataclasses.replace(SMALL, tied=False)
    wrong = Layout(**({"schedule": "megatron", "pipeline": 4, "data": 1, "microbatch": 2, "global_batch": 8} | changes))
    assert message in str(problem(model, wrong))


def test_what_mixpipe_chooses_for_itself_fits_the_gpus_memory(monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []
    monkeypatch.setattr(module, "choose", lambda model, layout, memory_bytes: asked.append(memory_bytes) or layout)
    words = f"{MODEL} --pipeline-schedule mixpipe --mixpipe-k auto --pipeline-model-parallel-size 4 --bf16"
    read(flags(f"{words} --micro-batch-size 1 --global-batch-size 4"), gpus=4, gpu=GPUS["a100-80gb"])
    assert asked == [GPUS["a100-80gb"].memory_gb * 2**30]
