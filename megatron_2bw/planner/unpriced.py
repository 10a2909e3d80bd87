"""Flags that Megatron refuses, or that change time or memory in ways that the cost model does not cover."""

from __future__ import annotations

from collections.abc import Callable

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.layout import Optimizer
from megatron_2bw.planner.multiples import nearest_divisor
from megatron_2bw.planner.options import Options
from megatron_2bw.planner.pipeline_layout import chunks_of

DIST_MUON = "dist_muon"
"""Muon with the distributed optimizer, as it was called."""
DISPATCHER = "alltoall"
"""How tokens get to experts of other ranks: sent to those alone. Megatron's default gathers all of them everywhere."""
GROUPED = "--moe-grouped-gemm"
"""The experts of a rank in one matrix product; Megatron's default is one after the other."""
_OF_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
"""Two ways to interleave; the third is `PIPELINE_LAYOUT`."""
PIPELINE_LAYOUT = "--pipeline-model-parallel-layout"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def _above_one(options: Options, flag: str) -> bool:
    return options.number(flag, 1) > 1


def _given(options: Options, flag: str) -> bool:
    return flag in options


def _dispatches_otherwise(options: Options, flag: str) -> bool:
    return _above_one(options, flag) and options.text("--moe-token-dispatcher-type", "allgather") != DISPATCHER


def _gathers_in_price(options: Options, flag: str) -> bool:
    shared = _above_one(options, "--expert-model-parallel-size")
    split = options.number("--expert-tensor-parallel-size", options.number("--tensor-model-parallel-size", 1)) > 1
    return options.text(flag) == DISPATCHER and not shared and split


def _loops_over_experts(options: Options, flag: str) -> bool:
    return _above_one(options, "--num-experts") and GROUPED not in options


def _is_local(options: Options, flag: str) -> bool:
    return flag in options and options.text("--transformer-impl", "transformer_engine") == "local"


def _has_unknown_state(options: Options, flag: str) -> bool:
    return optimizer_of(options.text(flag, Optimizer.ADAM)) is None


def optimizer_of(text: str) -> Optimizer | None:
    """The optimizer that Megatron calls so, today or before; None for one whose state is not known.

    >>> optimizer_of("dist_muon"), optimizer_of("soap")
    (<Optimizer.MUON: 'muon'>, None)
    """
    text = "muon" if text == DIST_MUON else text
    return Optimizer(text) if text in Optimizer else None


def _stages(options: Options) -> int:
    return options.number("--pipeline-model-parallel-size", 1)


def _interleaves(options: Options) -> bool:
    """Whether stages have several chunks: one that holds all layers of its stage is none."""
    per_chunk, chunks = _OF_CHUNKS
    if PIPELINE_LAYOUT in options:
        return chunks_of(options.text(PIPELINE_LAYOUT), _stages(options)) > 1
    if per_chunk in options:
        return options.number(per_chunk) * _stages(options) != options.number("--num-layers")
    return options.number(chunks, 1) > 1


def _has_other_groups(options: Options, flag: str) -> bool:
    """Whether ``flag`` changes the interleaved schedule, the only one that looks at it."""
    return flag in options and _interleaves(options) and options.number(flag) != _stages(options)


def _scales_by_own_rule(options: Options, flag: str) -> bool:
    return "--fp8-format" in options and options.text(flag) == "custom"


_OF_MUON = {"--muon-num-ns-steps": "5", "--muon-tp-mode": "blockwise", "--muon-fp32-matmul-prec": "medium"}
"""What changes how long an update takes, and its default."""


def _orthogonalizes_otherwise(options: Options, flag: str) -> bool:
    is_muon = optimizer_of(options.text("--optimizer", Optimizer.ADAM)) is Optimizer.MUON
    return is_muon and options.text(flag, _OF_MUON[flag]) != _OF_MUON[flag]


_ZERO_BUBBLE = ("--enable-zero-bubble", "--enable-zb-runtime", "--enable-zbh1-pipeline", "--zero-bubble-v-schedule")
"""Of forks of Megatron."""
_REFUSED: dict[str, tuple[Callable[[Options, str], bool], str]] = {
    "--hybrid-layer-pattern": (_given, "layers of several kinds"),
    "--hybrid-override-pattern": (_given, "layers of several kinds"),
    "--heterogeneous-layers-config-path": (_given, "layers of several kinds"),
    "--moe-latent-size": (_given, "experts of another width"),
    "--moe-expert-capacity-factor": (_given, "a capacity of experts"),
    "--hybrid-context-parallel": (_given, "sequences shared by numbers of ranks of their own"),
    "--mtp-use-repeated-layer": (_given, "one layer that predicts several tokens"),
    "--fp8-recipe": (_scales_by_own_rule, "a recipe of 8-bit products of your own"),
    "--te-precision-config-file": (_given, "precisions of single layers"),
    "--kitchen-config-file": (_given, "precisions of single layers"),
    "--kitchen-recipe-number": (_given, "precisions of single layers"),
    "--fp4-format": (_given, "4-bit matrix products"),
    "--use-megatron-fsdp": (_given, "sharded parameters"),
    "--use-custom-fsdp": (_given, "sharded parameters"),
    "--use-torch-fsdp2": (_given, "sharded parameters"),
    "--tensor-parallel-num-weight-shards": (_given, "sharded parameters"),
    "--cpu-offloading": (_given, "offloading"),
    "--optimizer-cpu-offload": (_given, "offloading"),
    "--fine-grained-activation-offloading": (_given, "offloading"),
    "--distribute-saved-activations": (_given, "distributed inputs of layers"),
    "--account-for-embedding-in-pipeline-split": (_given, "the embedding counted as a layer"),
    "--account-for-loss-in-pipeline-split": (_given, "the loss counted as a layer"),
    "--decoder-num-layers": (_given, "a decoder beside the encoder"),
    "--yaml-cfg": (_given, "a file in place of flags"),
    "--deepspeed": (_given, "DeepSpeed, whose file says what it shards and recomputes"),
    **dict.fromkeys(_ZERO_BUBBLE, (_given, "backward passes in two parts, as of zero-bubble pipelines")),
    "--hetero-mode": (_given, "stages on unequal GPUs"),
    _GROUP: (_has_other_groups, "groups of more microbatches than there are stages"),
}
_NOTED: dict[str, tuple[Callable[[Options, str], bool], str]] = {
    "--optimizer": (_has_unknown_state, "priced with Adam's state"),
    "--muon-scalar-optimizer": (
        lambda options, flag: options.text(flag, "adam") != "adam",
        "priced with Adam for what is no matrix",
    ),
    **{flag: (_orthogonalizes_otherwise, f"priced with {usual}") for flag, usual in _OF_MUON.items()},
    "--use-precision-aware-optimizer": (_given, "priced with Adam's state in fp32"),
    "--first-last-layers-bf16": (_given, "priced with all layers in 8 bits"),
    **dict.fromkeys(
        ("--no-fp8-wgrad", "--disable-fp8-wgrad"), (_given, "priced with gradients of weights from products in 8 bits")
    ),
    "--fp8-output-proj": (_given, "priced with logits in 16 bits"),
    **dict.fromkeys(
        ("--fp8-dot-product-attention", "--fp8-multi-head-attention"), (_given, "priced with attention in 16 bits")
    ),
    **dict.fromkeys(
        ("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"),
        (_given, "priced with tokens padded before the experts"),
    ),
    "--activation-func-fp8-input-store": (_given, "priced with that input kept in 16 bits"),
    "--recompute-modules": (_given, "priced with the attention's core recomputed"),
    "--rampup-batch-size": (_given, "priced at the final batch size"),
    "--step-batch-size-schedule": (_given, "priced at --global-batch-size"),
    "--expert-model-parallel-size": (_dispatches_otherwise, f"priced with --moe-token-dispatcher-type {DISPATCHER}"),
    "--num-experts": (
        _above_one,
        "priced with experts that are nearly equally busy; before they are, the busiest takes more",
    ),
    GROUPED: (_loops_over_experts, "priced as if it were given"),
    "--multi-latent-attention": (_is_local, "priced with Transformer Engine's layers"),
    "--mla-down-proj-fusion": (_given, "priced without that fusion"),
    "--moe-shared-expert-overlap": (_given, "priced without that overlap"),
    "--moe-token-dispatcher-type": (_gathers_in_price, "priced as allgather, where no ranks share the experts"),
    "--use-tp-pp-dp-mapping": (_given, "priced with Megatron's usual order of ranks"),
    "--cp-comm-type": (lambda options, flag: options.text(flag, "p2p") != "p2p", "priced as p2p"),
    "--cuda-graph-impl": (_given, "priced without CUDA graphs"),
    "--cross-entropy-loss-fusion": (
        lambda options, flag: flag in options and options.text("--cross-entropy-fusion-impl", "native") == "native",
        "priced without that fusion",
    ),
    "--data-parallel-size": (_given, "no flag of Megatron, which derives it from the number of GPUs; give --gpus"),
}
_OF_FULL = {"--recompute-method": "uniform", "--recompute-num-layers": "1"}
"""What full recomputation needs, and nothing else may have; with an example."""
_FULL = " ".join(["--recompute-granularity full", *(f"{flag} {example}" for flag, example in _OF_FULL.items())])
_REPLACED = {
    "--checkpoint-activations": _FULL,
    "--activations-checkpoint-method": _FULL,
    "--activations-checkpoint-granularity": "--recompute-granularity",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    **dict.fromkeys(("--num-key-value-heads", "--n-head-kv"), "--group-query-attention --num-query-groups"),
    "--attention-head-type": "--group-query-attention for multiquery",
    "--ds-sequence-parallel-size": "--context-parallel-size",
    "--glu-activation": "--swiglu",
    "--geglu": "--quick-geglu",
    **dict.fromkeys(("--intermediate-size", "--hidden-dim-multiplier"), "--ffn-hidden-size"),
    "--pad-vocab-size-to": "--padded-vocab-size",
    "--moe-num-experts": "--num-experts",
    **dict.fromkeys(("--moe-top-k", "--moe-topk", "--topk"), "--moe-router-topk"),
    **dict.fromkeys(
        ("--moe-expert-model-parallelism", "--moe-expert-parallel-size"),
        "--expert-model-parallel-size",
    ),
    **dict.fromkeys(
        ("--use-llama2-rotary-position-embeddings", "--use-mistral-rotary-position-embeddings"),
        "--position-embedding-type rope",
    ),
    **dict.fromkeys(
        ("--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton"),
        "--use-flash-attn",
    ),
}
"""Flags of earlier versions and of forks that change time or memory, and what says the same today."""
_OF_SHARDS = ("--use-distributed-optimizer", "--overlap-grad-reduce")
"""What gathering parameters during forwards needs."""
_ACTIVATIONS = ("--swiglu", "--squared-relu", "--quick-geglu")
"""Functions of the MLP, of which it has one."""
_UNFUSED = ("--no-bias-gelu-fusion", "--disable-bias-linear")
"""What keeps Megatron from its fused kernel of bias and GELU."""
_OF_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""What spreads embedding and loss as if they were layers."""
_PIPEDREAM = ("--loss-scale", "--calculate-per-token-loss", "--log-num-zeros-in-grad")
CHECKED = frozenset(
    {
        *(*_REFUSED, *_NOTED, *_PIPEDREAM, "--overlap-param-gather", "--clip-grad"),
        *("--mrope-section", "--rotary-interleaved"),
    }
)
"""Flags that are looked at here."""


def check_accepted(options: Options) -> None:
    """Whether Megatron takes these flags together: see its ``validate_args`` and ``TransformerConfig``.

    Raises:
        PlanError: it does not.
    """
    if "--bf16" in options and "--fp16" in options:
        raise PlanError("--bf16 and --fp16 exclude each other; leave one out")
    _check_chunks(options)
    is_delayed = "--fp8-format" in options and options.text("--fp8-recipe", "delayed") == "delayed"
    if "--first-last-layers-bf16" in options and is_delayed:
        raise PlanError(
            "--first-last-layers-bf16: delayed scaling is of all layers or none; give --fp8-recipe tensorwise"
        )
    for flag, new in _REPLACED.items():
        if flag in options:
            behind = f", or behind a script with --ignore {flag[2:]}"
            raise PlanError(f"{flag}: no flag of today's Megatron; give {new} in its place{behind}")
    granularity = options.text("--recompute-granularity", "none")
    if "--recompute-activations" in options:
        granularity = "selective"
    for flag, example in _OF_FULL.items():
        if granularity == "full" and flag not in options:
            raise PlanError(f"--recompute-granularity full needs {flag}; give it, such as {flag} {example}")
        if granularity == "selective" and flag in options:
            raise PlanError(f"{flag} needs --recompute-granularity full; leave it out")
    if "--overlap-param-gather" in options:
        shards_by_itself = options.text("--optimizer", "adam") == DIST_MUON
        for flag in _OF_SHARDS[shards_by_itself:]:
            if flag not in options:
                raise PlanError(f"--overlap-param-gather needs {flag}; give it, or leave the overlap out")


def _check_chunks(options: Options) -> None:
    """Whether one flag says how to spread layers, which goes with ends of their own, in groups as long as the pipeline.

    Rules: ``validate_args``, "Uneven virtual pipeline parallelism"; ``TransformerConfig``, "PP layout".
    """
    for flag in (*_OF_CHUNKS, *_OF_ENDS, *_COUNTED):
        if PIPELINE_LAYOUT in options and flag in options:
            raise PlanError(f"{PIPELINE_LAYOUT} and {flag} exclude each other: the layout says it; leave one out")
    per_chunk, chunks = _OF_CHUNKS
    if per_chunk in options and chunks in options:
        raise PlanError(f"{per_chunk} and {chunks} exclude each other; leave one out")
    for flag in _OF_ENDS:
        if per_chunk in options and flag in options:
            raise PlanError(f"{per_chunk} and {flag} exclude each other; give {chunks} in place of the first")
    stages, group = _stages(options), options.number(_GROUP)
    if group is not None and group < stages and _interleaves(options):
        raise PlanError(
            f"{_GROUP} {group}: the {stages} stages need at least one microbatch each; use {stages}, or leave it out"
        )


def check_model(options: Options) -> None:
    """Whether Megatron builds a model with these flags: see its ``validate_args`` and ``TransformerConfig``.

    Raises:
        PlanError: it does not.
    """
    if "--seq-length" in options and "--encoder-seq-length" in options:
        raise PlanError("--seq-length and --encoder-seq-length exclude each other; leave out --encoder-seq-length")
    chosen = [flag for flag in _ACTIVATIONS if flag in options]
    if chosen[1:]:
        raise PlanError(f"{chosen[0]} and {chosen[1]} exclude each other; leave one out")
    if "--squared-relu" in options and not any(flag in options for flag in _UNFUSED):
        raise PlanError(f"--squared-relu has no kernel that is fused with the bias; give {_UNFUSED[0]}")
    if options.text("--position-embedding-type") == "mrope" and "--mrope-section" not in options:
        raise PlanError("--position-embedding-type mrope needs --mrope-section; use --position-embedding-type rope")
    _check_latents(options)
    positions = options.text("--position-embedding-type", "learned_absolute")
    if options.number("--mtp-num-layers", 0) and positions not in ("rope", "none"):
        raise PlanError(
            f"--mtp-num-layers goes with --position-embedding-type rope and none, not {positions}: Megatron predicts "
            "no further tokens with others; use rope"
        )
    _check_groups(options)
    _check_router(options)


def _check_latents(options: Options) -> None:
    """Whether attention to latent vectors goes with what else there is, and its positions with their kernel."""
    has_latents, positions = "--multi-latent-attention" in options, options.text("--rope-type", "yarn")
    if "--rope-type" in options and positions == "yarn" and not has_latents:
        raise PlanError("--rope-type yarn needs --multi-latent-attention; use rope, or leave it out")
    if not has_latents:
        return
    for flag in ("--group-query-attention", "--rotary-interleaved"):
        if flag in options:
            raise PlanError(f"--multi-latent-attention and {flag} exclude each other; leave one out")
    if positions == "rope" and "--no-rope-fusion" not in options:
        raise PlanError("--rope-type rope has no kernel that is fused with latent vectors; give --no-rope-fusion")


def _check_groups(options: Options) -> None:
    """Whether a router can choose groups of experts first, and be led by biases."""
    groups, chosen, experts = (
        options.number(flag, 0) for flag in ("--moe-router-num-groups", "--moe-router-group-topk", "--num-experts")
    )
    needed = {"--moe-router-num-groups": groups, "--num-experts": experts}
    for flag in (flag for flag, count in needed.items() if chosen and not count):
        raise PlanError(f"--moe-router-group-topk {chosen} needs {flag}; give it")
    if chosen and experts % groups:
        raise PlanError(
            f"--moe-router-num-groups {groups} does not divide --num-experts {experts}; use "
            f"{nearest_divisor(experts, groups)}"
        )
    if chosen > groups:
        raise PlanError(f"--moe-router-group-topk {chosen}: there are {groups} groups; use {groups} or less")


def _check_router(options: Options) -> None:
    """Whether the router can learn which expert to take."""
    score = options.text("--moe-router-score-function", "softmax")
    if "--moe-router-enable-expert-bias" in options and score not in ("sigmoid", "sqrtsoftplus"):
        raise PlanError(
            f"--moe-router-enable-expert-bias: Megatron adds no biases to a {score}; give --moe-router-score-function "
            "sigmoid"
        )
    if options.number("--moe-router-topk", 2) != 1:
        return  # Megatron looks at it without experts, too.
    is_softmax = score == "softmax"
    is_sinkhorn = options.text("--moe-router-load-balancing-type", "aux_loss") == "sinkhorn"
    if is_softmax and not is_sinkhorn and "--moe-router-pre-softmax" not in options:
        raise PlanError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one expert has no gradient; give it"
        )


def check_pipedream(options: Options) -> None:
    """Whether pipedream can run at all with these flags: see ``mcore.refused``.

    Raises:
        PlanError: it cannot.
    """
    for flag in _PIPEDREAM:
        if flag in options:
            raise PlanError(f"{flag}: under pipedream nothing spans the stages; leave it out")
    clip = options.text("--clip-grad", "1.0")
    if clip.strip("0."):
        raise PlanError(f"--clip-grad {clip}: under pipedream there is no norm over the stages; give --clip-grad 0")


def check_priced(options: Options) -> tuple[str, ...]:
    """What the estimate leaves out, one note per flag.

    Raises:
        PlanError: a flag that would make the estimate wrong.
    """
    for flag, (is_set, what) in _REFUSED.items():
        if is_set(options, flag):
            raise PlanError(
                f"{flag}: the cost model does not cover {what}; to price the rest, give --ignore {flag[2:]}"
            )
    return tuple(f"{flag}: {how}" for flag, (is_set, how) in _NOTED.items() if is_set(options, flag))


def uncovered(flag: str, value: object) -> str | None:
    """What ``flag`` with that value asks for, if the cost model does not cover it; a switch has the value True.

    >>> uncovered("--use-megatron-fsdp", True), uncovered("--use-megatron-fsdp", False)
    ('sharded parameters', None)
    """
    if flag not in _REFUSED or value in (None, False, "", "none"):
        return None
    is_set, what = _REFUSED[flag]
    return what if is_set(Options.parse([flag] if value is True else [flag, str(value)]), flag) else None
