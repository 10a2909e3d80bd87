"""Rows in other names than ours, and what they may not ask for."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_2bw.planner.cost.costs import unpriced_receives
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags import flags as flags_module
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.report.report import prediction_json
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.search.finder import price
from megatron_2bw.planner.specs.inputs import load_cluster, model_of, sized

ROW = {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 64, "pipeline": 4, "tensor": 4, "global_batch": 128}
LEFT_OUT = ["no precision, such as bf16: priced in bf16", "no micro_batch_size: priced with 1"]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OURS = {"microbatch": 2, "recompute": "full", "distributed_optimizer": True, "precision": "fp16"}


@pytest.mark.parametrize(
    "theirs",
    [
        {**FULL, "micro_batch_size": 2, "use_distributed_optimizer": True, "fp16": True},
        {"mbs": 2, "recompute": "full", "use_distributed_optimizer": True, "bf16": False, "fp16": True},
        {**OURS, "micro_batch_size": 2, "context_parallel_size": 1, "expert_model_parallel_size": None, "fp8": False},
        {**OURS, "schedule": "megatron", "recompute_num_layers": None, "source": "a table", "certainty": 1},
    ],
)
def test_megatrons_names_say_the_same(theirs: dict[str, Any]) -> None:
    expected, other = predicted({**ROW, **OURS}), predicted({**ROW, "microbatch": 1})
    assert predicted({**ROW, **theirs}) == expected
    assert expected["time_s"] != other["time_s"]


def test_sizes_in_megatrons_names() -> None:
    sizes = {"pipeline": "pipeline_model_parallel_size", "tensor": "tp", "global_batch": "gbs"}
    assert predicted({sizes.get(key, key): value for key, value in ROW.items()}) == predicted(ROW)
    assert predicted({**ROW, "dp": 4}) == predicted(ROW)


@pytest.mark.parametrize(
    "other",
    [
        {"TP": 4, "PP": 4, "GBS": 128},
        {"tensor-model-parallel-size": 4, "--pipeline-model-parallel-size": 4, "global-batch-size": 128},
        {"tp": 4, "pp": 4, "mbs": 1, "num_microbatches": 32},
        {"tp": 4, "pp": 4, "gbs": 128, "Model": "a label", "Data": "wikitext", "schedule": "Megatron", "BF16": "TRUE"},
        {"TP": 4, "PP": 4, "GBS": 128, "PRECISION": "BF16", "bf16": 1, "recompute": "None", "a-b": 1, "a_b": 2},
        {"tensor_parallel": 4, "pipeline_parallel_size": 4, "Global Batch Size": 128, "#-GPUs": 64, "gpus": None},
        {
            "TP size": 4,
            "pipeline_stages": 4,
            "train_batch_size": 128,
            "VP": "n/a",
            "cp": "-",
            "n_gpus": 64,
            "GPUs 2": 4,
        },
        {"tensor_model_parallel": 4, "num_stages": 4, "gbs": 128, "SeqLen": 8192, "num_nodes": 8, "micro batch": 1},
    ],
    ids=str,
)
def test_other_spellings(other: dict[str, Any]) -> None:
    sizes = {"pipeline", "tensor", "global_batch"}
    assert _priced({**{key: value for key, value in ROW.items() if key not in sizes}, **other}) == _priced(ROW)


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ({"fp32": True}, "fp32"),
        ({"fp32": False}, "bf16"),
        ({"fp32": False, "fp16": True}, "fp16"),
        ({"FP32": 1.0}, "fp32"),
    ],
)
def test_precisions_as_switches(flags: dict[str, Any], precision: str) -> None:
    assert _priced({**ROW, **flags}) == _priced({**ROW, "precision": precision})


def _priced(row: dict[str, Any]) -> dict[str, Any]:
    """The prediction without the notes on what ``row`` leaves out."""
    found = predicted(row)
    return {**found, "notes": [note for note in found["notes"] if note not in LEFT_OUT]}


def test_what_a_row_leaves_out_is_noted() -> None:
    """Megatron would train in fp32, and has no microbatch of its own."""
    assert predicted(ROW)["notes"] == LEFT_OUT
    assert predicted({**ROW, "micro_batch_size": 1, "bf16": True})["notes"] == []
    assert predicted({**ROW, "micro_batch_size": 1, "bf16": False})["notes"] == []


@pytest.mark.parametrize("name", ["1f1b", "1F1B", "DAPPLE"])
def test_names_of_one_schedule(name: str) -> None:
    assert predicted({**ROW, "schedule": name}) == predicted({**ROW, "schedule": "1f1b-flush"})


def test_a_precision_aware_optimizer_as_megatrons_arguments_have_it() -> None:
    """Once validated; on a command line, and in other tables, its precisions are words."""
    row = {**ROW, "microbatch": 1, "distributed_optimizer": True, "use_precision_aware_optimizer": True}
    words = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8", "main_grads_dtype": "bf16"}
    types = {"exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.uint8", "main_grads_dtype": "torch.bfloat16"}
    assert predicted({**row, **types, "main_params_dtype": "torch.float32"}) == predicted({**row, **words})
    assert predicted({**row, **words}) != predicted(row)
    assert predicted({**row, **words, "exp_avg_dtype": ["bf16"]}) == predicted({**row, **words})


def test_a_precision_aware_optimizer_as_plans_have_it() -> None:
    row = {**ROW, "distributed_optimizer": True}
    words = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    assert predicted({**row, "adam_state": ["fp32", "bf16", "bf16"]}) == predicted({**row, **words})
    assert predicted({**row, "adam_state": None}) == predicted(row) != predicted({**row, **words})
    with pytest.raises(PlanError, match="adam_state 'bf16': give a list of what main_params_dtype, exp_avg_dtype, "):
        predicted({**row, "adam_state": "bf16"})
    with pytest.raises(PlanError, match=r"exp_avg_dtype 'fp8' and adam_state .* disagree; leave out one of them"):
        predicted({**row, **words, "exp_avg_dtype": "fp8", "adam_state": ["fp32", "bf16", "bf16"]})


def test_columns_of_tables_of_measurements() -> None:
    row = {"layers": 40, "hidden": 6144, "heads": 48, "seq_len": 2048, "vocab": 50257}
    sizes = {"num_layers": 40, "hidden_size": 6144, "num_attention_heads": 48, "seq_length": 2048, "vocab_size": 50257}
    more = {"cluster": "dgx-a100", "gpus": 256, "tp": 8, "dp": 16, "pp": 2, "mbs": 8, "gbs": 1024}
    assert predicted({**row, **more}) == predicted({**sizes, **more})


def test_rows_of_texts() -> None:
    """As ``csv.DictReader`` has them, with the labels of another table's models."""
    texts = {key: value if key == "cluster" else str(value) for key, value in ROW.items()}
    assert predicted({**texts, "model": "LLAMA3_70B", "sequence_parallel": "True", "vp": ""}) == predicted(
        {**ROW, "sequence_parallel": True}
    )
    sizes = {"num_layers": 40, "hidden_size": 6144, "num_attention_heads": 48, "seq_length": 2048, "vocab_size": 50257}
    labelled, plain = predicted({**ROW, **sizes, "model": "18B"}), predicted({**ROW, **sizes, "model": None})
    note = "model '18B' is none of ours, so a label: priced is what the sizes beside it say"
    assert labelled.pop("notes") == [note, *plain.pop("notes")]
    assert labelled == plain


def test_whole_numbers_of_a_column_with_gaps() -> None:
    row = {"tensor": 4.0, "gpus": 64.0, "num_layers_per_virtual_pipeline_stage": 5.0, "global_batch": 128.0}
    assert predicted({**ROW, **row}) == predicted({**ROW, "chunks": 4})


def test_how_chunks_are_exchanged() -> None:
    """As by Megatron today, before it waited for what forwards send, and without overlap."""
    row = {**ROW, "pipeline": 4, "chunks": 2}
    today, earlier, alone = (
        predicted({**row, **more})["time_s"] for more in ({}, {"waits_for_sends": False}, {"overlap_p2p_comm": False})
    )
    assert earlier < today < alone


def test_experts_in_megatrons_names() -> None:
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 50257}
    row = {**ROW, **sizes, "bias": False, "sequence_parallel": True}
    del row["model"]
    theirs = {**row, "num_moe_experts": 8, "ffn_hidden_size": 4096, "moe_ffn_hidden_size": 512, "ep": 2, "etp": 1}
    ours = {**row, "num_experts": 8, "ffn_hidden_size": 512, "expert": 2}
    assert predicted(theirs) == predicted({**ours, "expert_tensor": 1}) != predicted(ours)
    assert predicted({**ROW, "etp": 1}) == predicted(ROW), "nobody looks at it without experts"


FLAGS = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 50257,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "micro_batch_size": 1,
    "global_batch_size": 32,
    "bf16": True,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"num_layers_per_virtual_pipeline_stage": 1, "overlap_p2p_comm": True},
        {"overlap_p2p_comm": False},
        {"attention_backend": "unfused"},
        {"attention_backend": "auto", "use_flash_attn": True},
        {"transformer_impl": "local"},
        {"recompute_activations": True},
        {"untie_embeddings_and_output_weights": True},
        {"hidden_dropout": 0, "attention_dropout": 0},
        {"hidden_dropout": 0},
        {"position_embedding_type": "rope"},
        {"use_rotary_position_embeddings": True},
        {"normalization": "RMSNorm", "disable_bias_linear": True},
        {"swiglu": True},
        {"swiglu": True, "no_bias_swiglu_fusion": True},
        {"num_query_groups": 4, "group_query_attention": True},
        {"num_query_groups": 4, "group_query_attention": False},
        {"group_query_attention": True},
        {"transformer_impl": "local", "use_flash_attn": True},
        {"attention_backend": "unfused", "use_flash_attn": True},
        {"transformer_impl": "local", "attention_backend": "flash"},
        {"use_rotary_position_embeddings": True, "position_embedding_type": "learned_absolute"},
        {"transformer_impl": "local", "fp8_format": "hybrid"},
        {"recompute_activations": True, "recompute_granularity": "full"},
        FULL,
        {"optimizer": "soap"},
        {"swiglu": False, "quick_geglu": True},
        {"padded_vocab_size": 50304},
        {"cuda_graph_impl": "local"},
        {"rampup_batch_size": [8, 8, 1000]},
        {"mtp_num_layers": 1, "position_embedding_type": "rope"},
        {"pipeline_schedule": "mixpipe", "mixpipe_k": "auto", "untie_embeddings_and_output_weights": True},
        {"bf16": False},
    ],
    ids=str,
)
def test_arguments_of_megatron_mean_what_its_flags_do(more: dict[str, Any]) -> None:
    cluster = load_cluster("dgx-h100")
    row = {**FLAGS, **more}
    flags = {f"--{key.replace('_', '-')}": value for key, value in row.items() if value is not False}
    words = [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])]
    read = flags_module.read(Options.parse(words), gpus=8, gpu=cluster.gpu)
    expected = prediction_json(read.model, price(read.model, read.layout, sized(cluster, gpus=8)))
    expected["notes"] = [*read.notes, *unpriced_receives(read.layout)]
    assert predicted({**row, "cluster": "dgx-h100", "gpus": 8}) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"untie_embeddings_and_output_weights": True, "tied": True},
            "tied True: the model has False; leave out one of them",
        ),
        ({"add_bias_linear": True, "disable_bias_linear": True}, "add_bias_linear and disable_bias_linear disagree"),
        ({"disable_bias_linear": "no"}, "disable_bias_linear 'no': give true or false"),
        ({"hidden_dropout": "no"}, "--hidden-dropout no: give a number"),
        ({"normalization": "rmsnorm"}, "--normalization rmsnorm: choose one of LayerNorm, RMSNorm"),
        ({"attention_backend": "some"}, "--attention-backend some: choose one of auto, flash, fused, unfused, local"),
        (
            {"hidden_dropout": 0.1, "attention_dropout": 0.1, "dropout": False},
            "dropout False: Megatron's arguments in the row say True",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 5, "chunks": 2},
            "chunks 2: Megatron's arguments in the row say 4; leave",
        ),
        ({"num_layers_per_virtual_pipeline_stage": 3}, "--num-layers-per-virtual-pipeline-stage 3 does not divide"),
        ({"fp8": "some"}, "fp8 'some': choose one of none, delayed, tensorwise, blockwise, mxfp8"),
        ({"fp4": "e2m1"}, "--fp4-format: the cost model does not cover 4-bit matrix products"),
        ({"etp": 0}, "expert_tensor 0: give a whole number of at least 1"),
        ({"ep": 4}, "expert 4: the model has no experts; leave it out"),
        ({"cp": 2, "data": 2, "fused_attention": False}, "context 2 needs fused attention"),
        ({"mtp_num_layers": 1}, "mtp_num_layers 1: the model has 0; leave out one of them"),
        ({"moe_latent_size": 64}, "--moe-latent-size: the cost model does not cover experts of another width"),
        (
            {"model": "mixtral-8x7b", "moe_layer_freq": [1, 0] * 16},
            "the cost model covers dense layers only in front of all experts; give ([0]*16+[1]*16)",
        ),
        ({"fp16": "off"}, "fp16 'off': give true or false"),
        ({"bf16": "no"}, "bf16 'no': give true or false"),
        ({"params_dtype": "fp32"}, "params_dtype 'fp32': choose one of torch.bfloat16, torch.float16, torch.float32"),
        ({"params_dtype": "float32", "bf16": True}, "params_dtype 'float32' and bf16 bf16 disagree"),
        ({"mbs": 2.5}, "microbatch 2.5: give a whole number"),
        ({"mbs": float("inf")}, "microbatch inf: give a whole number"),
        ({"vp": 2, "chunks": 1}, "chunks 1 and vp 2 disagree; leave out one of them"),
        ({"num-layers": 4, "num_layers": 80}, "num_layers 80 and num-layers 4 disagree; leave out one of them"),
        ({"mbs": 0, "num_microbatches": 3}, "microbatch 0 is no count"),
        ({"fp16": True, "fp32": True}, "fp16 and fp32 exclude each other; leave one out"),
        ({"Schedule": "2BW"}, "unknown key 'Schedule'; did you mean 'schedule'?"),
        ({"Context": 2}, "unknown key 'Context'; did you mean 'context'?"),
        ({"Data": "8"}, "unknown key 'Data'; did you mean 'data'?"),
        ({"GPUs": 8}, "GPUs 8 and gpus 64 disagree; leave out one of them"),
        ({"n_gpus": "8 x 8", "gpus": None}, "n_gpus '8 x 8': give a number, or rename the key where it is a remark"),
        ({"Nodes": "gpu[1-8]"}, "Nodes 'gpu[1-8]': give a number, or rename the key where it is a remark"),
        ({"# micro-batches": 3}, "num_microbatches 3: global_batch 128 has 32 per replica"),
        ({"SwiGLU": True}, "unknown key 'SwiGLU'; did you mean 'swiglu'?"),
        ({"BF16": False, "precision": "bf16"}, "bf16 False and precision bf16 disagree"),
        ({"NUM_MICROBATCHES": 3}, "num_microbatches 3: global_batch 128 has 32 per replica; leave out one of them"),
        ({"num_microbatches": 3}, "num_microbatches 3: global_batch 128 has 32 per replica; leave out one of them"),
        ({"model": None}, "model is missing; give a name, an object, or sizes such as num_layers"),
        ({"model": None, "num_layers": 2}, "vocab_size is missing, and --tokenizer-type none has no fixed vocabulary"),
        ({"world_size": 32}, "world_size 32 and gpus 64 disagree"),
        ({"hidden_size": float("nan")}, "model: hidden_size nan: give a whole number"),
        (
            {"microbatch_group_size_per_vp_stage": 8, "vp": 2},
            "the cost model does not cover groups of more microbatches",
        ),
        ({"tp": 3, "gpus": 64}, "tp 3 and tensor 4"),
        ({"pp": 3, "pipeline": 3}, "gpus 64 is no multiple of tensor x context x pipeline = 12; use 72"),
        ({"optimizer": "adam", "optimizer_cpu_offload": True}, "give --ignore optimizer-cpu-offload"),
        (
            {"recompute": "full", "recompute_activations": True},
            "recompute_activations True and recompute full disagree",
        ),
        ({"params_dtype": "torch.float16", "bf16": True}, "params_dtype 'torch.float16' and bf16 bf16 disagree"),
        ({"cpu_offloading_num_layers": 2}, "does not cover offloading"),
        ({"tp": 2}, "tp 2 and tensor 4 disagree; leave out one of them"),
        ({"micro_batch_size": "2 to 4"}, "microbatch '2 to 4': give a whole number"),
        ({"recompute_granularity": "some"}, "--recompute-granularity some: choose one of none, selective, full"),
    ],
)
def test_what_a_row_may_not_ask_for(more: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        predicted({**ROW, **more})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("ignored", "kept"),
    [
        ("--bf16", {"bf16": False}),
        ("--pipeline-model-parallel-size", {"pipeline_model_parallel_size": 1}),
        ("--optimizer-cpu-offload", {}),
    ],
)
def test_what_is_ignored_of_a_row(ignored: str, kept: dict[str, Any]) -> None:
    row = {**FLAGS, "cluster": "dgx-h100", "gpus": 8}
    asked = row if kept else {**row, "optimizer_cpu_offload": True}
    assert predicted(asked, ignored={ignored}) == predicted({**row, **kept})


def test_widths_of_experts_and_of_layers_before_them() -> None:
    sizes = {"num_experts": 8, "swiglu": True, "ffn_hidden_size": 1024, "bias": False, "sequence_parallel": True}
    row = {**FLAGS, **sizes, "cluster": "dgx-h100", "gpus": 8}
    assert predicted({**row, "dense_ffn_hidden_size": 4096}) == predicted(row), "there are no such layers"
    mixed = {**row, "moe_layer_freq": "([0]*2+[1]*6)"}
    assert predicted({**mixed, "dense_layers": 2}) == predicted(mixed) != predicted(row)
    with pytest.raises(PlanError, match="dense_layers 3: Megatron's arguments in the row say 2"):
        predicted({**mixed, "dense_layers": 3})


def test_a_dense_model_is_the_same_whatever_its_router_would_do() -> None:
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 50257}
    row = {**ROW, "model": {**sizes, "moe_router_topk": 4}}
    assert predicted(row) == predicted({**ROW, "model": sizes})


def test_flags_of_a_model_come_from_a_command_line() -> None:
    with pytest.raises(PlanError, match="given_flags are those of a command line"):
        model_of({"num_layers": 2, "given_flags": "--num-layers 99"}, "model.json")
