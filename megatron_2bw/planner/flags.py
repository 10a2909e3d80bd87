"""Megatron's flags for a Model and a Layout, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_2bw.planner.automatic import AUTO, choose, has_choice
from megatron_2bw.planner.cluster import Gpu
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.inputs import misspelled
from megatron_2bw.planner.layout import Fp8, Layout, Precision, Recompute, RecomputeMethod
from megatron_2bw.planner.model import Kind, Model
from megatron_2bw.planner.multiples import nearest_multiple
from megatron_2bw.planner.naming import schedule_name
from megatron_2bw.planner.options import Options
from megatron_2bw.planner.rules import MEGATRON, fuses_attention, gpu_problem, problem
from megatron_2bw.planner.unpriced import (
    CHECKED,
    DISPATCHER,
    GROUPED,
    check_accepted,
    check_model,
    check_pipedream,
    check_priced,
)

MODEL_NUMBERS: dict[str, str] = {
    "--num-layers": "num_layers",
    "--hidden-size": "hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--seq-length": "seq_length",
    "--vocab-size": "vocab_size",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--kv-channels": "kv_channels",
    "--num-query-groups": "num_query_groups",
    "--num-experts": "num_experts",
    "--moe-router-topk": "moe_router_topk",
    "--make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
}
"""Flags with a number of the Model."""
REQUIRED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
LAYOUT_NUMBERS: dict[str, str] = {
    "--pipeline-model-parallel-size": "pipeline",
    "--tensor-model-parallel-size": "tensor",
    "--context-parallel-size": "context",
    "--expert-model-parallel-size": "expert",
    "--expert-tensor-parallel-size": "expert_tensor",
    "--micro-batch-size": "microbatch",
    "--recompute-num-layers": "recompute_layers",
    "--num-virtual-stages-per-pipeline-rank": "chunks",
    "--decoder-first-pipeline-num-layers": "first_stage_layers",
    "--decoder-last-pipeline-num-layers": "last_stage_layers",
    "--pipeline-extra-in-flight": "extra_in_flight",
    "--pipeline-delayed-microbatches": "delayed_microbatches",
    "--mixpipe-k": "mixpipe_k",
    "--mixpipe-gamma": "mixpipe_gamma",
    "--pipeline-gradient-buffers": "gradient_buffers",
}
"""Flags with a number of the Layout."""
DROPOUT = ("--attention-dropout", "--hidden-dropout")
"""Flags that are both 0 where nothing is dropped."""
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
POSITIONS = ("learned_absolute", "rope", "yarn", "mrope", "relative", "none")
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
_FUSED_LOSS = {"--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"}
FP8_FORMATS = ("hybrid", "e4m3")
_IN_BLOCKS = (Fp8.BLOCKWISE, Fp8.MXFP8)
"""Recipes whose scales are fine enough for gradients in e4m3."""
VOCABULARIES: dict[str, int] = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}
"""Of tokenizers with one published vocabulary: GPT-2, Llama 2, BERT uncased and cased."""


MODEL_SWITCHES = frozenset(
    {
        *"--group-query-attention --swiglu --quick-geglu --squared-relu --openai-gelu --disable-bias-linear".split(),
        *"--add-qkv-bias --apply-layernorm-1p --qk-layernorm --untie-embeddings-and-output-weights".split(),
        *"--use-rotary-position-embeddings --rotary-interleaved --use-rope-scaling".split(),
        *"--no-bias-gelu-fusion --moe-router-pre-softmax".split(),
    }
)
"""Flags without a value that describe a model."""
_TOKENIZER = frozenset({"--vocab-size", "--tokenizer-type"})
_UNPRICED = {
    "--norm-epsilon": 1e-5,
    "--init-method-std": 0.02,
    "--rotary-base": 10000,
    "--rotary-percent": 1.0,
    "--rotary-seq-len-interpolation-factor": 1,
    "--rope-scaling-factor": 8.0,
}
"""Flags with a number of the model that its costs do not depend on, and an example."""
MODEL_FLAGS = frozenset(
    {
        *MODEL_NUMBERS,
        *MODEL_SWITCHES,
        *DROPOUT,
        *_TOKENIZER,
        *"--encoder-seq-length --normalization --position-embedding-type --moe-ffn-hidden-size".split(),
        *"--max-position-embeddings --padded-vocab-size".split(),
        *_UNPRICED,
    }
)
"""Flags that describe a model, whether its costs depend on them or not."""
_SPELLED = frozenset(
    {
        *MODEL_FLAGS,
        *LAYOUT_NUMBERS,
        *CHECKED,
        *"--global-batch-size --pipeline-schedule --num-layers-per-virtual-pipeline-stage --sequence-parallel".split(),
        *"--recompute-activations --recompute-granularity --recompute-method --bf16 --fp16 --transformer-impl".split(),
        *"--use-distributed-optimizer --overlap-grad-reduce --attention-backend --use-flash-attn".split(),
        *"--no-bias-swiglu-fusion --accumulate-allreduce-grads-in-fp32".split(),
        *"--merge-file --vocab-file --fp8-format --fp8-recipe --fp8-param-gather --cross-entropy-fusion-impl".split(),
        *"--grad-reduce-in-bf16 --tp-comm-overlap".split(),
        # Megatron's own, which look like others.
        *"--encoder-num-layers --decoder-seq-length --eval-global-batch-size --tp-comm-overlap-cfg".split(),
        *"--moe-expert-rank-capacity-factor --fp4-recipe --fp4-param-gather".split(),
        *"--mtp-hybrid-override-pattern --expert-tensor-parallel-num-weight-shards".split(),
    }
)
"""Flags that are spelled correctly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A run as its flags describe it."""

    model: Model
    layout: Layout
    notes: tuple[str, ...] = ()
    """What the flags say beyond that, and the estimate leaves out."""


def read(
    options: Options,
    *,
    gpus: int | None,
    kind: Kind = Kind.GPT,
    gpu: Gpu | None = None,
    fused: bool | None = None,
    model: Model | None = None,
) -> Configuration:
    """The Model and Layout that Megatron's flags describe.

    Args:
        options: flags; those without influence on the costs are ignored.
        gpus: world size, from which Megatron derives the data-parallel size.
        kind: of the model; Megatron has a script per kind and no flag.
        gpu: that has to support what the flags ask for; None does not limit them.
        fused: whether attention is, where no flag says; None: where ``gpu`` has kernels for it.
        model: in place of the one that flags describe.

    Raises:
        PlanError: a flag is missing, malformed, refused by Megatron or beyond the cost model.
    """
    check_accepted(options)
    notes = (*check_priced(options), *_misspelled(options))
    if options.text("--pipeline-schedule") == "pipedream":
        check_pipedream(options)
    model = model or read_model(options, kind=kind)
    layout = _layout(options, model, gpus, gpu=gpu, fused=fused)
    if options.text("--mixpipe-k", "0") == AUTO and has_choice(layout):
        if gpu is None:
            raise PlanError(f"--mixpipe-k {AUTO}: that depends on the GPU; give --cluster, or a number")
        layout = choose(model, layout, gpu.memory_gb * 2**30)
    refused = problem(model, layout)
    if gpu is not None:
        refused = refused or gpu_problem(gpu, layout.precision, fused_attention=layout.fused_attention, fp8=layout.fp8)
    if refused:
        raise PlanError(refused)
    return Configuration(model=model, layout=layout, notes=notes)


def _misspelled(options: Options) -> Iterator[str]:
    """A note per flag that nothing here reads and that looks like one that is read."""
    for flag in options.values:
        if nearest := misspelled(flag, _SPELLED):
            yield f"{flag}: not priced; did you mean {nearest}?"


def read_model(options: Options, *, kind: Kind = Kind.GPT) -> Model:
    """The Model that Megatron's flags describe, with Megatron's defaults.

    Raises:
        PlanError: a flag is missing, malformed or refused by Megatron.
    """
    check_model(options)
    numbers = {name: options.number(flag) for flag, name in MODEL_NUMBERS.items() if flag in options}
    if "seq_length" not in numbers and "--encoder-seq-length" in options:
        numbers["seq_length"] = options.number("--encoder-seq-length")
    missing = [flag for flag in REQUIRED if MODEL_NUMBERS[flag] not in numbers]
    if missing:
        raise PlanError(f"{missing[0]} is missing: the costs depend on it; give {missing[0]} N")
    if "--group-query-attention" in options:
        numbers.setdefault("num_query_groups", 1)
    else:
        numbers.pop("num_query_groups", None)
    if "ffn_hidden_size" not in numbers:
        numbers["ffn_hidden_size"] = default_ffn(numbers["hidden_size"], swiglu="--swiglu" in options)
    if numbers.get("num_experts") and "--moe-ffn-hidden-size" in options:
        numbers["ffn_hidden_size"] = options.number("--moe-ffn-hidden-size")
    positions = options.choice("--position-embedding-type", POSITIONS, POSITIONS[0])
    learned = positions == "learned_absolute" and "--use-rotary-position-embeddings" not in options
    numbers["vocab_size"] = _vocabulary(options, kind)
    return Model(
        kind=kind,
        swiglu="--swiglu" in options or "--quick-geglu" in options,
        bias="--disable-bias-linear" not in options,
        rmsnorm=options.choice("--normalization", NORMALIZATIONS, NORMALIZATIONS[0]) == "RMSNorm",
        learned_positions=learned,
        dropout=max(options.real(flag, 0.1, most=1) for flag in DROPOUT) > 0,
        tied="--untie-embeddings-and-output-weights" not in options,
        given_flags=_given(options, numbers["seq_length"]),
        **numbers,
    )


def _given(options: Options, seq_length: int) -> str:
    """The flags that describe the model, in the words they came in, and the number of positions that Megatron needs."""
    positions = options.number("--max-position-embeddings", seq_length)
    if positions < seq_length:
        raise PlanError(
            f"--max-position-embeddings {positions}: fewer than --seq-length {seq_length}; use {seq_length}"
        )
    for flag, example in _UNPRICED.items():
        options.real(flag, example)
    values = dict(options.values)
    values.setdefault("--max-position-embeddings", [str(positions)])
    words: list[str] = []
    for flag, following in values.items():
        if flag in MODEL_FLAGS - _TOKENIZER:
            words += [flag, *([] if flag in MODEL_SWITCHES else map(options.explain, following[:1]))]
    return " ".join(words)


def default_ffn(hidden_size: int, *, swiglu: bool) -> int:
    """Megatron's default of ``--ffn-hidden-size``.

    >>> default_ffn(4096, swiglu=True), default_ffn(4096, swiglu=False)
    (10880, 16384)
    """
    return int((4 * hidden_size * 2 / 3) / 64) * 64 if swiglu else 4 * hidden_size


def _vocabulary(options: Options, kind: Kind) -> int:
    for flag in ("--padded-vocab-size", "--vocab-size"):
        if flag in options:
            return options.number(flag)
    # Scripts of Megatron's examples leave the tokenizer to the files they name.
    by_files = "GPT2BPETokenizer" if "--merge-file" in options else "none"
    if kind is Kind.BERT and "--vocab-file" in options:
        by_files = "BertWordPieceLowerCase"
    tokenizer = options.text("--tokenizer-type", by_files)
    if tokenizer not in VOCABULARIES:
        raise PlanError(
            f"--vocab-size is missing, and --tokenizer-type {tokenizer} has no fixed vocabulary; give --vocab-size N "
            "(on the command line, behind --from-script FILE)"
        )
    return VOCABULARIES[tokenizer]


def _layout(options: Options, model: Model, gpus: int | None, *, gpu: Gpu | None, fused: bool | None) -> Layout:
    numbers = {
        name: options.number(flag)
        for flag, name in LAYOUT_NUMBERS.items()
        if flag in options and (flag != "--mixpipe-k" or options.text(flag) != AUTO)
    }
    numbers.setdefault("pipeline", 1)
    numbers.setdefault("tensor", 1)
    numbers.setdefault("context", 1)
    if "microbatch" not in numbers:
        raise PlanError("--micro-batch-size is missing: Megatron has no default; give --micro-batch-size N")
    for name in ("pipeline", "tensor", "context", "expert", "expert_tensor", "microbatch", "delayed_microbatches"):
        if numbers.get(name, 1) < 1:
            raise PlanError(f"{name} {numbers[name]}: give a whole number of at least 1")
    data = _width(gpus, numbers["pipeline"] * numbers["tensor"] * numbers["context"])
    if not model.num_experts:
        numbers.pop("expert_tensor", None)  # Megatron does not look at it.
    if "--num-layers-per-virtual-pipeline-stage" in options:
        numbers["chunks"] = _chunks(options, model, numbers["pipeline"])
    precision = Precision.BF16 if "--bf16" in options else Precision.FP16 if "--fp16" in options else Precision.FP32
    if fused is None:
        fused = precision is not Precision.FP32 if gpu is None else fuses_attention(gpu, precision)
    return Layout(
        schedule=schedule_name(options.text("--pipeline-schedule", MEGATRON)),
        data=data,
        global_batch=options.number("--global-batch-size", numbers["microbatch"] * data),
        recompute=_recompute(options),
        recompute_method=RecomputeMethod(
            options.choice("--recompute-method", RecomputeMethod, RecomputeMethod.UNIFORM)
        ),
        sequence_parallel="--sequence-parallel" in options and numbers["tensor"] > 1,
        distributed_optimizer="--use-distributed-optimizer" in options,
        overlap_gradients="--overlap-grad-reduce" in options,
        overlap_parameters={"--overlap-param-gather", "--use-distributed-optimizer"} <= options.values.keys(),
        gradients_in_fp32=precision is Precision.FP16 and "--accumulate-allreduce-grads-in-fp32" in options,
        gradients_in_bf16=precision is Precision.BF16 and "--grad-reduce-in-bf16" in options,
        fused_loss=_FUSED_LOSS.issubset(options.values) and options.text("--cross-entropy-fusion-impl") == "te",
        overlap_tensor="--tp-comm-overlap" in options,
        precision=precision,
        fp8=_fp8(options),
        fp8_parameters="--fp8-param-gather" in options,
        fused_attention=_fused(options, fused),
        fused_swiglu=not (model.swiglu and "--no-bias-swiglu-fusion" in options),
        **numbers,
    )


def _width(gpus: int | None, ranks: int) -> int:
    if gpus is None:
        raise PlanError(f"the number of GPUs is not known; give --gpus N, a multiple of {ranks}")
    if gpus < 1 or gpus % ranks:
        nearest = nearest_multiple(gpus, ranks)
        raise PlanError(f"gpus {gpus} is no multiple of tensor x context x pipeline = {ranks}; use {nearest}")
    return gpus // ranks


def _chunks(options: Options, model: Model, pipeline: int) -> int:
    per_chunk = options.number("--num-layers-per-virtual-pipeline-stage")
    per_stage = model.num_layers // pipeline
    if model.num_layers % pipeline or per_chunk < 1 or per_stage % per_chunk:
        raise PlanError(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the {model.num_layers} layers "
            f"over {pipeline} stages; use 1"
        )
    return per_stage // per_chunk


def _recompute(options: Options) -> Recompute:
    if "--recompute-activations" in options:
        return Recompute.SELECTIVE
    return Recompute(options.choice("--recompute-granularity", Recompute, Recompute.NONE))


def _fp8(options: Options) -> Fp8:
    recipes = [recipe for recipe in Fp8 if recipe is not Fp8.NONE]
    if "--fp8-format" not in options or options.text("--transformer-impl", "") == "local":
        return Fp8.NONE  # Layers of Megatron's own have none.
    options.choice("--fp8-format", FP8_FORMATS, FP8_FORMATS[0])
    return Fp8(options.choice("--fp8-recipe", recipes, Fp8.DELAYED))


def _fused(options: Options, default: bool) -> bool:
    """Whether attention is fused, which Megatron decides by itself where no flag does."""
    backend = options.choice("--attention-backend", ATTENTION_BACKENDS, ATTENTION_BACKENDS[0])
    if "--use-flash-attn" in options:
        return True
    if options.text("--transformer-impl", "transformer_engine") == "local":
        return False
    return {"auto": default, "unfused": False, "local": False}.get(backend, True)


def model_flags(model: Model) -> list[str]:
    """Flags of the model as they were given, else as far as it differs from Megatron's defaults.

    Those of the tokenizer are left out.

    >>> " ".join(model_flags(Model(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=9)))
    '--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32'
    """
    if model.given_flags:
        return model.given_flags.split()
    words = [
        *f"--num-layers {model.num_layers} --hidden-size {model.hidden_size}".split(),
        *f"--num-attention-heads {model.num_attention_heads}".split(),
        *f"--seq-length {model.seq_length} --max-position-embeddings {model.seq_length}".split(),
    ]
    if model.ffn_hidden_size != default_ffn(model.hidden_size, swiglu=model.swiglu):
        words += ["--ffn-hidden-size", str(model.ffn_hidden_size)]
    if model.kv_channels * model.num_attention_heads != model.hidden_size:
        words += ["--kv-channels", str(model.kv_channels)]
    if model.num_query_groups != model.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(model.num_query_groups)]
    if model.num_experts:
        words += ["--num-experts", str(model.num_experts), "--moe-router-topk", str(model.moe_router_topk)]
        words += ["--moe-router-pre-softmax"] * (model.moe_router_topk == 1)  # Megatron takes one only so.
    if model.make_vocab_size_divisible_by != 128:
        words += ["--make-vocab-size-divisible-by", str(model.make_vocab_size_divisible_by)]
    switches = {
        "--swiglu": model.swiglu,
        "--disable-bias-linear": not model.bias,
        "--normalization RMSNorm": model.rmsnorm,
        "--position-embedding-type rope": not model.learned_positions,
        " ".join(f"{flag} 0" for flag in DROPOUT): not model.dropout,
        "--untie-embeddings-and-output-weights": not model.tied,
    }
    return [*words, *(word for switch, on in switches.items() if on for word in switch.split())]


def layout_flags(model: Model, layout: Layout) -> list[str]:
    """Flags of ``layout``; the data-parallel size follows from the number of processes.

    >>> model = Model(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=50257)
    >>> print(*layout_flags(model, Layout(schedule="2bw", pipeline=4, data=2, microbatch=2, global_batch=32)))
    --pipeline-schedule 2bw --pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 32 --bf16
    """
    words = [] if layout.schedule == MEGATRON else ["--pipeline-schedule", layout.schedule]
    counts = {
        "--tensor-model-parallel-size": (layout.tensor, 1),
        "--context-parallel-size": (layout.context, 1),
        "--expert-model-parallel-size": (layout.expert, 1),
        "--expert-tensor-parallel-size": (layout.expert_tensor, layout.tensor),
        "--pipeline-model-parallel-size": (layout.pipeline, 1),
        "--decoder-first-pipeline-num-layers": (layout.first_stage_layers, 0),
        "--decoder-last-pipeline-num-layers": (layout.last_stage_layers, 0),
        "--pipeline-extra-in-flight": (layout.extra_in_flight, 0),
        "--pipeline-delayed-microbatches": (layout.delayed_microbatches, 0),
        "--mixpipe-k": (layout.mixpipe_k, 0),
        "--mixpipe-gamma": (layout.mixpipe_gamma, 0),
        "--pipeline-gradient-buffers": (layout.gradient_buffers, 2),
        "--micro-batch-size": (layout.microbatch, 0),
        "--global-batch-size": (layout.global_batch, 0),
    }
    words += [word for flag, (count, default) in counts.items() if count != default for word in (flag, str(count))]
    if layout.chunks > 1 and (layout.first_stage_layers or layout.last_stage_layers):
        words += ["--num-virtual-stages-per-pipeline-rank", str(layout.chunks)]
    elif layout.chunks > 1:
        per_chunk = model.num_layers // (layout.pipeline * layout.chunks)
        words += ["--num-layers-per-virtual-pipeline-stage", str(per_chunk)]
    if layout.recompute is not Recompute.NONE:
        words += ["--recompute-granularity", layout.recompute]
    if layout.recompute is Recompute.FULL:
        words += ["--recompute-method", layout.recompute_method, "--recompute-num-layers", str(layout.recompute_layers)]
    if layout.fp8 is not Fp8.NONE:
        words += ["--fp8-format", FP8_FORMATS[layout.fp8 in _IN_BLOCKS], "--fp8-recipe", layout.fp8]
    # On Ampere and later; fp32 and attention that is not fused are those of a CPU, too.
    has_grouped = layout.precision is Precision.BF16 and layout.fused_attention
    switches = {
        f"--moe-token-dispatcher-type {DISPATCHER}": layout.expert > 1,
        GROUPED: model.num_experts > 0 and has_grouped,
        "--sequence-parallel": layout.sequence_parallel,
        "--use-distributed-optimizer": layout.distributed_optimizer,
        "--overlap-grad-reduce": layout.overlap_gradients,
        "--overlap-param-gather": layout.overlap_parameters,
        "--accumulate-allreduce-grads-in-fp32": layout.gradients_in_fp32,
        "--grad-reduce-in-bf16": layout.gradients_in_bf16,
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te": layout.fused_loss,
        "--tp-comm-overlap": layout.overlap_tensor,
        f"--{layout.precision}": layout.precision is not Precision.FP32,
        "--fp8-param-gather": layout.fp8_parameters,
        "--attention-backend unfused": not layout.fused_attention,
        "--no-bias-swiglu-fusion": not layout.fused_swiglu,
        "--clip-grad 0": layout.schedule == "pipedream",
    }
    return [*map(str, words), *(word for switch, on in switches.items() if on for word in switch.split())]
