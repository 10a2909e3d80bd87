"""Which flags Megatron takes together: its ``validate_args`` and ``TransformerConfig``."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.multiples import nearest_divisor
from megatron_2bw.planner.specs.pipeline_layout import COUNTED, stages_of
from megatron_2bw.schedule.registry import DELAYED

DIST_MUON = "dist_muon"
"""Muon with the distributed optimizer, as it was called."""
_OF_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
"""Two ways to interleave; the third is `PIPELINE_LAYOUT`."""
PIPELINE_LAYOUT = "--pipeline-model-parallel-layout"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
FLEX = "flex"
"""All dispatchers of tokens but two; which one, `BACKEND` says."""
BACKEND = "--moe-flex-dispatcher-backend"
MODULES = "--recompute-modules"
NO_OVERLAP = "--no-overlap-p2p-communication"
WARMUP_FLUSH = "--overlap-p2p-communication-warmup-flush"
SETTINGS = {
    "--accumulate-allreduce-grads-in-fp32": ("gradients_in_fp32", True),
    "--grad-reduce-in-bf16": ("gradients_in_bf16", True),
    "--tp-comm-overlap": ("overlap_tensor", True),
    "--fp8-param-gather": ("fp8_parameters", True),
    "--no-bias-swiglu-fusion": ("fused_swiglu", False),
    NO_OVERLAP: ("overlap_transfers", False),
}
"""By flag without a value: what it says of a Layout, and no search decides."""
RECEIVES = "--pipeline-receives"
STEPS = "--step-batch-size-schedule"
GROUPED = "--moe-grouped-gemm"
"""The experts of a rank in one matrix product; Megatron's default is one after the other."""
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
    **{f"--fp8-{name}": f"--fp8-format {name}" for name in ("hybrid", "e4m3")},
    "--glu-activation": "--swiglu",
    "--geglu": "--quick-geglu",
    **dict.fromkeys(("--intermediate-size", "--hidden-dim-multiplier"), "--ffn-hidden-size"),
    "--pad-vocab-size-to": "--padded-vocab-size",
    "--moe-num-experts": "--num-experts",
    "--first-k-dense-replace": "--moe-layer-freq",
    "--n-shared-experts": "--moe-shared-expert-intermediate-size",
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
OPTIMIZERS = ("adam", "sgd", "muon", DIST_MUON, "adaptive_muon", "lion", "soap")
"""Those that Megatron 0.18 or 0.19 has."""
PRECISION_AWARE = "--use-precision-aware-optimizer"
STORED_IN = {
    "--main-params-dtype": ("fp32", "fp16"),
    "--exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "--exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
}
"""What that optimizer keeps, in the order of ``AdamState``, and the precisions that Megatron accepts."""
MAIN_GRADIENTS = "--main-grads-dtype"
_OF_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")


def stages(options: Options) -> int:
    """Ranks of a pipeline."""
    return options.number("--pipeline-model-parallel-size", 1)


def is_local(options: Options) -> bool:
    """Whether layers are Megatron's own, not Transformer Engine's."""
    return options.text("--transformer-impl", "transformer_engine") == "local"


def counted(options: Options) -> tuple[bool, bool]:
    """Whether the embedding, and whether the loss, is spread over the stages as if it were a layer."""
    embedding, loss = COUNTED
    return embedding in options, loss in options


def interleaves(options: Options) -> bool:
    """Whether stages have several chunks: one that holds all layers of its stage is none."""
    per_chunk, chunks = _OF_CHUNKS
    if PIPELINE_LAYOUT in options:
        return len(stages_of(options.text(PIPELINE_LAYOUT))) > stages(options)
    if per_chunk in options:
        layers = options.number("--num-layers", 0) + sum(counted(options))
        return options.number(per_chunk) * stages(options) != layers
    return options.number(chunks, 1) > 1


def check_accepted(options: Options) -> None:
    """Whether Megatron takes these flags together: see its ``validate_args`` and ``TransformerConfig``.

    Raises:
        PlanError: it does not.
    """
    if "--bf16" in options and "--fp16" in options:
        raise PlanError("--bf16 and --fp16 exclude each other; leave one out")
    _check_chunks(options)
    _check_precision_aware(options)
    is_delayed = "--fp8-format" in options and options.text("--fp8-recipe", "delayed") == "delayed"
    if "--first-last-layers-bf16" in options and is_delayed:
        raise PlanError(
            "--first-last-layers-bf16: delayed scaling is of all layers or none; give --fp8-recipe tensorwise"
        )
    if options.text("--attention-backend") == "local" and options.text("--spec") != "local":
        raise PlanError("--attention-backend local needs --spec local; give it, or --transformer-impl local alone")
    if STEPS in options and "--global-batch-size" in options:
        raise PlanError(f"{STEPS} and --global-batch-size exclude each other; leave one out, or --ignore it")
    if old := [flag for flag in _REPLACED if flag in options]:
        said = "; ".join(f"{flag}: no flag of today's Megatron; give {_REPLACED[flag]} in its place" for flag in old)
        raise PlanError(f"{said}, or behind a script with --ignore {','.join(flag[2:] for flag in old)}")
    granularity = options.text("--recompute-granularity", "none")
    if "--recompute-activations" in options:
        granularity = "selective"
    modules = options.values.get(MODULES, ()) if granularity == "selective" else ()
    if "moe_act" in modules and GROUPED not in options:
        raise PlanError(f"{MODULES} moe_act needs {GROUPED} of a model with experts; give it, or leave moe_act out")
    shared = {"--moe-shared-expert-overlap", "--moe-shared-expert-intermediate-size"}
    if "shared_experts" in modules and shared.issubset(options.values):
        raise PlanError(f"{MODULES} shared_experts and --moe-shared-expert-overlap exclude each other; leave one out")
    if "--moe-layer-recompute" in options and granularity == "full":
        raise PlanError("--moe-layer-recompute and --recompute-granularity full exclude each other; leave one out")
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


def check_in_fp32(precisions: Mapping[str, str | None]) -> None:
    """Whether flags, by what is given or None, ask for nothing that the precision-aware optimizer alone has.

    Raises:
        PlanError: one does.
    """
    for flag, precision in precisions.items():
        if precision not in (None, "fp32"):
            raise PlanError(f"{flag} {precision} needs {PRECISION_AWARE}; give it, or use fp32")


def _check_precision_aware(options: Options) -> None:
    """Whether Adam's state and gradients may be in those precisions: ``OptimizerConfig``, ``validate_args``."""
    is_adam = options.text("--optimizer", "adam") == "adam"
    if PRECISION_AWARE in options and not (is_adam and "--use-distributed-optimizer" in options):
        raise PlanError(f"{PRECISION_AWARE} needs --use-distributed-optimizer and Adam; give them, or leave it out")
    is_clipped = options.real("--clip-grad", 1.0) and options.text("--pipeline-schedule") not in DELAYED
    sums_in_16_bits = "--fp16" in options and "--accumulate-allreduce-grads-in-fp32" not in options
    if PRECISION_AWARE in options and is_clipped and sums_in_16_bits:
        raise PlanError(f"{PRECISION_AWARE} clips no gradients in fp16; give --accumulate-allreduce-grads-in-fp32")
    if PRECISION_AWARE not in options:
        check_in_fp32({flag: options.text(flag, "fp32") for flag in (MAIN_GRADIENTS, *STORED_IN)})
    if options.text(MAIN_GRADIENTS) == "bf16" and "--accumulate-allreduce-grads-in-fp32" in options:
        raise PlanError(f"{MAIN_GRADIENTS} bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; use fp32")


def _check_chunks(options: Options) -> None:
    """Whether one flag says how to spread layers, which goes with ends of their own, in groups as long as the pipeline,
    and exchanges what several chunks compute as Megatron can.

    Rules: ``validate_args``, "Uneven virtual pipeline parallelism"; ``TransformerConfig``, "PP layout".
    """
    for flag in (*_OF_CHUNKS, *_OF_ENDS, *COUNTED):
        if PIPELINE_LAYOUT in options and flag in options:
            raise PlanError(f"{PIPELINE_LAYOUT} and {flag} exclude each other: the layout says it; leave one out")
    per_chunk, chunks = _OF_CHUNKS
    if per_chunk in options and chunks in options:
        raise PlanError(f"{per_chunk} and {chunks} exclude each other; leave one out")
    for flag in _OF_ENDS:
        if per_chunk in options and flag in options:
            raise PlanError(f"{per_chunk} and {flag} exclude each other; give {chunks} in place of the first")
        for counted in COUNTED:
            if counted in options and flag in options:
                raise PlanError(f"{counted} and {flag} exclude each other; leave one out")
    for flag in _OF_ENDS:
        if options.number(flag) == 0:
            raise PlanError(f"{flag} 0: a stage has a layer at least; give more, or leave it out")
    count, group = stages(options), options.number(GROUP)
    if NO_OVERLAP in options and interleaves(options):
        if count == 2:
            raise PlanError(f"{NO_OVERLAP}: 2 stages interleave with overlap alone; leave it out, or use more stages")
        if WARMUP_FLUSH in options:
            raise PlanError(f"{NO_OVERLAP} and {WARMUP_FLUSH} exclude each other; leave one out")
    if group is not None and group < count and interleaves(options):
        raise PlanError(
            f"{GROUP} {group}: the {count} stages need at least one microbatch each; use {count}, or leave it out"
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
    if "--moe-ffn-hidden-size" in options and not {"--num-experts", "--moe-layer-freq"} & options.values.keys():
        raise PlanError("--moe-ffn-hidden-size needs --num-experts; give it, or leave the size out")
    is_shared = options.number("--expert-model-parallel-size", 1) > 1
    if "--overlap-moe-expert-parallel-comm" in options and is_shared and gathers_tokens(options):
        raise PlanError(
            "--overlap-moe-expert-parallel-comm does not go with the dispatcher allgather; give "
            "--moe-token-dispatcher-type alltoall"
        )
    _check_groups(options)
    _check_router(options)


def gathers_tokens(options: Options) -> bool:
    """Whether every rank gets all tokens, Megatron's default, and not those alone that its experts need."""
    return options.text("--moe-token-dispatcher-type", "allgather") not in ("alltoall", FLEX)


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
