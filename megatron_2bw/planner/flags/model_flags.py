"""Megatron's flags for a Model, and back."""

from __future__ import annotations

from dataclasses import replace

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import check_model
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.specs.model import LATENT_SIZES, Kind, Model, default_ffn
from megatron_2bw.planner.specs.patterns import dense_first, pattern_of

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
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_head_dim",
    "--qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "--v-head-dim": "v_head_dim",
    "--mtp-num-layers": "mtp_num_layers",
    "--make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
}
"""Flags with a number of the Model."""
_NOT_ZERO = {"--kv-channels", "--ffn-hidden-size", "--num-query-groups", "--moe-ffn-hidden-size"}
REQUIRED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
DROPOUT = ("--attention-dropout", "--hidden-dropout")
"""Flags that are both 0 where nothing is dropped."""
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
_ROTARY = ("rope", "yarn", "mrope")
POSITIONS = ("learned_absolute", *_ROTARY, "relative", "none")
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
        *"--no-bias-gelu-fusion --moe-router-pre-softmax --moe-router-enable-expert-bias".split(),
        *"--multi-latent-attention --no-rope-fusion --moe-shared-expert-gate".split(),
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
    "--rotary-scaling-factor": 40,
    "--mscale": 1.0,
    "--mscale-all-dim": 1.0,
    "--moe-router-num-groups": 8,
    "--moe-router-group-topk": 4,
    "--moe-router-topk-scaling-factor": 2.5,
    "--moe-router-bias-update-rate": 0.001,
    "--moe-aux-loss-coeff": 0.0001,
    "--mtp-loss-scaling-factor": 0.1,
}
"""Flags with a number of the model that its costs do not depend on, and an example."""
MODEL_FLAGS = frozenset(
    {
        *MODEL_NUMBERS,
        *MODEL_SWITCHES,
        *DROPOUT,
        *_TOKENIZER,
        *"--encoder-seq-length --normalization --position-embedding-type --moe-ffn-hidden-size".split(),
        *"--max-position-embeddings --padded-vocab-size --moe-layer-freq --rope-type".split(),
        *"--moe-router-score-function --moe-router-load-balancing-type --moe-router-dtype".split(),
        *_UNPRICED,
    }
)
"""Flags that describe a model, whether its costs depend on them or not."""


_BALANCING, _COEFFICIENT = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
SEVERAL = frozenset((_BALANCING, _COEFFICIENT))
"""Those that take one value or more."""
_BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")


def read_model(options: Options, *, kind: Kind = Kind.GPT) -> Model:
    """The Model that Megatron's flags describe, with Megatron's defaults.

    Raises:
        PlanError: a flag is missing, malformed or refused by Megatron.
    """
    check_model(options)
    numbers = {name: options.number(flag) for flag, name in MODEL_NUMBERS.items() if flag in options}
    for flag in sorted(_NOT_ZERO & options.values.keys()):
        if options.number(flag) == 0:
            raise PlanError(f"{flag} 0: give a whole number of at least 1, or leave it out for Megatron's default")
    if "seq_length" not in numbers and "--encoder-seq-length" in options:
        numbers["seq_length"] = options.number("--encoder-seq-length")
    missing = [flag for flag in REQUIRED if MODEL_NUMBERS[flag] not in numbers]
    if missing:
        raise options.missing(missing[0], "the costs depend on it")
    if "--group-query-attention" in options:
        numbers.setdefault("num_query_groups", 1)
    else:
        numbers.pop("num_query_groups", None)
    if "ffn_hidden_size" not in numbers:
        numbers["ffn_hidden_size"] = default_ffn(numbers["hidden_size"], swiglu="--swiglu" in options)
    if numbers.get("num_experts"):
        numbers["dense_layers"] = dense_first(options.text("--moe-layer-freq", "1"), numbers["num_layers"])
        numbers["dense_ffn_hidden_size"] = numbers["ffn_hidden_size"] if numbers["dense_layers"] else 0
        numbers["ffn_hidden_size"] = options.number("--moe-ffn-hidden-size", numbers["ffn_hidden_size"])
    numbers["vocab_size"] = vocabulary(options, kind)
    return Model(
        kind=kind,
        swiglu="--swiglu" in options or "--quick-geglu" in options,
        bias="--disable-bias-linear" not in options,
        rmsnorm=options.choice("--normalization", NORMALIZATIONS, NORMALIZATIONS[0]) == "RMSNorm",
        **positions_of(options),
        dropout=max(options.real(flag, 0.1, most=1) for flag in DROPOUT) > 0,
        tied="--untie-embeddings-and-output-weights" not in options,
        moe_shared_expert_gate="--moe-shared-expert-gate" in options,
        multi_latent_attention="--multi-latent-attention" in options,
        qk_layernorm="--qk-layernorm" in options,
        given_flags=_given(options, numbers["seq_length"]),
        **numbers,
    )


def positions_of(options: Options) -> dict[str, bool]:
    """Fields of the Model that say how it knows positions."""
    positions = options.choice("--position-embedding-type", POSITIONS, POSITIONS[0])
    is_rotary = positions in _ROTARY or "--use-rotary-position-embeddings" in options
    return {"learned_positions": positions == POSITIONS[0] and not is_rotary, "rotary": is_rotary}


def _given(options: Options, seq_length: int) -> str:
    """The flags that describe the model, in the words they came in, and the number of positions that Megatron needs."""
    positions = options.number("--max-position-embeddings", seq_length)
    if positions < seq_length:
        raise PlanError(
            f"--max-position-embeddings {positions}: fewer than --seq-length {seq_length}; use {seq_length}"
        )
    for flag, example in _UNPRICED.items():
        options.real(flag, example)
    for flag in SEVERAL & options.values.keys():
        for word in options.words(flag):
            alone = replace(options, values={flag: [word]})
            if flag == _BALANCING:
                alone.choice(flag, _BALANCED, _BALANCED[0])
            else:
                alone.real(flag, _UNPRICED[flag])
    values = dict(options.values)
    values.setdefault("--max-position-embeddings", [str(positions)])
    words: list[str] = []
    for flag, following in values.items():
        if flag in MODEL_FLAGS - _TOKENIZER:
            most = 0 if flag in MODEL_SWITCHES else None if flag in SEVERAL else 1
            # Megatron takes no pattern with blanks.
            words += [flag, *(options.explain(word).replace(" ", "") for word in following[:most])]
    return " ".join(words)


def vocabulary(
    options: Options,
    kind: Kind,
    *,
    name: str = "--vocab-size",
    remedy: str = "--vocab-size N (behind --from-script FILE, where that is given)",
) -> int:
    """Tokens that the tokenizer knows, or that Megatron pads their number to.

    Args:
        options: flags.
        kind: of the model.
        name: of what is missing where no flag says.
        remedy: what to give then.

    Raises:
        PlanError: no flag says.
    """
    for flag in ("--padded-vocab-size", "--vocab-size"):
        if flag in options:
            return options.number(flag)
    tokenizer = _tokenizer(options, kind)
    if tokenizer not in VOCABULARIES:
        raise PlanError(f"{name} is missing, and --tokenizer-type {tokenizer} has no fixed vocabulary; give {remedy}")
    return VOCABULARIES[tokenizer]


def guessed_vocabulary(options: Options, kind: Kind) -> list[str]:
    """A note where the type of the tokenizer says how many tokens there are, and its files might say another number."""
    if {"--padded-vocab-size", "--vocab-size"} & options.values.keys():
        return []
    return [
        f"no --vocab-size: priced with {vocabulary(options, kind):,} tokens, those of {_tokenizer(options, kind)} as "
        "published; give yours"
    ]


def _tokenizer(options: Options, kind: Kind) -> str:
    # Scripts of Megatron's examples leave it to the files they name.
    by_files = "GPT2BPETokenizer" if "--merge-file" in options else "none"
    if kind is Kind.BERT and "--vocab-file" in options:
        by_files = "BertWordPieceLowerCase"
    return options.text("--tokenizer-type", by_files)


def flags_beside_sizes(model: Model) -> list[str]:
    """Flags that were given with the model and are not among those that say its sizes, such as switches of kernels.

    >>> given = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --no-bias-gelu-fusion"
    >>> sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 9}
    >>> flags_beside_sizes(Model(**sizes, given_flags=given))
    ['--no-bias-gelu-fusion']
    """
    sizes = Options.parse(model_flags(replace(model, given_flags="")))
    beside = Options.parse(model.given_flags.split()).without(sizes.values)
    return [word for flag, following in beside.values.items() for word in (flag, *following)]


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
    width = model.dense_ffn_hidden_size or model.ffn_hidden_size
    if width != default_ffn(model.hidden_size, swiglu=model.swiglu):
        words += ["--ffn-hidden-size", str(width)]
    if model.kv_channels * model.num_attention_heads != model.hidden_size:
        words += ["--kv-channels", str(model.kv_channels)]
    if model.num_query_groups != model.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(model.num_query_groups)]
    if model.num_experts:
        words += ["--num-experts", str(model.num_experts), "--moe-router-topk", str(model.moe_router_topk)]
        words += ["--moe-router-pre-softmax"] * (model.moe_router_topk == 1)  # Megatron takes one only so.
        words += _mixture_flags(model)
    if model.multi_latent_attention:
        words += _latent_flags(model)
    if model.mtp_num_layers:
        words += ["--mtp-num-layers", str(model.mtp_num_layers)]
    if model.make_vocab_size_divisible_by != 128:
        words += ["--make-vocab-size-divisible-by", str(model.make_vocab_size_divisible_by)]
    switches = {
        "--swiglu": model.swiglu,
        "--disable-bias-linear": not model.bias,
        "--normalization RMSNorm": model.rmsnorm,
        "--qk-layernorm": model.qk_layernorm,
        f"--position-embedding-type {'rope' if model.rotary else 'none'}": not model.learned_positions,
        " ".join(f"{flag} 0" for flag in DROPOUT): not model.dropout,
        "--untie-embeddings-and-output-weights": not model.tied,
    }
    return [*words, *(word for switch, on in switches.items() if on for word in switch.split())]


def _mixture_flags(model: Model) -> list[str]:
    """What a mixture of experts has beside the experts that a router chooses from."""
    words = []
    if model.dense_layers:
        words += ["--moe-layer-freq", pattern_of(model.dense_layers, model.num_layers)]
        words += ["--moe-ffn-hidden-size", str(model.ffn_hidden_size)]
    if model.moe_shared_expert_intermediate_size:
        words += ["--moe-shared-expert-intermediate-size", str(model.moe_shared_expert_intermediate_size)]
    return words + ["--moe-shared-expert-gate"] * model.moe_shared_expert_gate


def _latent_flags(model: Model) -> list[str]:
    """Of attention to latent vectors."""
    words = ["--multi-latent-attention"]
    for flag, name in MODEL_NUMBERS.items():
        if getattr(model, name) != {"q_lora_rank": 0, **LATENT_SIZES}.get(name, getattr(model, name)):
            words += [flag, str(getattr(model, name))]
    return words
