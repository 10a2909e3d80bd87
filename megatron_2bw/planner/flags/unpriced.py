"""Flags that change time or memory in ways that the cost model does not cover."""

from __future__ import annotations

from collections.abc import Callable

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import (
    BACKEND,
    DIST_MUON,
    FLEX,
    GROUP,
    GROUPED,
    STEPS,
    WARMUP_FLUSH,
    gathers_tokens,
    interleaves,
    is_local,
    stages,
)
from megatron_2bw.planner.flags.model_flags import positions_of
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.specs.layout import Dispatcher, Optimizer


def _above_one(options: Options, flag: str) -> bool:
    return options.number(flag, 1) > 1


def _given(options: Options, flag: str) -> bool:
    return options.values.get(flag, ["none"])[:1] not in (["none"], ["0"])


def _present(options: Options, flag: str) -> bool:
    """Of a list, in which 0 is one more number."""
    return flag in options


def _shards_weights(options: Options, flag: str) -> bool:
    tensor = options.number("--tensor-model-parallel-size", 1)
    whole = options.number("--expert-tensor-parallel-size", tensor) if flag.startswith("--expert") else tensor
    return flag in options and options.number(flag) > whole


def _dispatches_otherwise(options: Options, flag: str) -> bool:
    return _above_one(options, flag) and gathers_tokens(options)


def _gathers_in_price(options: Options, flag: str) -> bool:
    shared = _above_one(options, "--expert-model-parallel-size")
    split = options.number("--expert-tensor-parallel-size", options.number("--tensor-model-parallel-size", 1)) > 1
    return options.text(flag) == Dispatcher.ALLTOALL and not shared and split


def _loops_over_experts(options: Options, flag: str) -> bool:
    return _above_one(options, "--num-experts") and GROUPED not in options


def _is_local(options: Options, flag: str) -> bool:
    return flag in options and is_local(options)


def _has_unknown_state(options: Options, flag: str) -> bool:
    return optimizer_of(options.text(flag, Optimizer.ADAM)) is None


def optimizer_of(text: str) -> Optimizer | None:
    """The optimizer that Megatron calls so, today or before; None for one whose state is not known.

    >>> optimizer_of("dist_muon"), optimizer_of("soap")
    (<Optimizer.MUON: 'muon'>, None)
    """
    text = "muon" if text == DIST_MUON else text
    return Optimizer(text) if text in Optimizer else None


def _has_other_groups(options: Options, flag: str) -> bool:
    """Whether ``flag`` changes the interleaved schedule, the only one that looks at it."""
    return flag in options and interleaves(options) and options.number(flag) != stages(options)


def _has_more_positions(options: Options, flag: str) -> bool:
    length = options.number("--seq-length", options.number("--encoder-seq-length", 0))
    return positions_of(options)["learned_positions"] and options.number(flag, 0) > length


def _scales_by_own_rule(options: Options, flag: str) -> bool:
    return "--fp8-format" in options and options.text(flag) == "custom"


_OF_MUON = {"--muon-num-ns-steps": "5", "--muon-tp-mode": "blockwise", "--muon-fp32-matmul-prec": "medium"}
"""What changes how long an update takes, and its default."""


def _orthogonalizes_otherwise(options: Options, flag: str) -> bool:
    is_muon = optimizer_of(options.text("--optimizer", Optimizer.ADAM)) is Optimizer.MUON
    return is_muon and options.text(flag, _OF_MUON[flag]) != _OF_MUON[flag]


_OF_PICTURES = {"--img-h": "224", "--img-w": "224", "--patch-dim": "16"}
"""What only models of pictures look at, and its default."""


def _has_pictures(options: Options, flag: str) -> bool:
    return options.text(flag, _OF_PICTURES[flag]) != _OF_PICTURES[flag]


_ADAPTERS = ("--lora-r", "--lora-target-modules")
_EXCHANGED = ("--swap-attention", "--swap-optimizer")
_UNUSED_LAYERS = ("--noop-layers", "--num-layer-list")
_ATTENDING_IN_TURN = ("--full-attention-interval", "--interleave-sliding-window")
_ZERO_BUBBLE = ("--enable-zero-bubble", "--enable-zb-runtime", "--enable-zbh1-pipeline", "--zero-bubble-v-schedule")
"""Of forks of Megatron, these and those above."""
_REFUSED: dict[str, tuple[Callable[[Options, str], bool], str]] = {
    "--hybrid-layer-pattern": (_given, "layers of several kinds"),
    "--hybrid-override-pattern": (_given, "layers of several kinds"),
    "--heterogeneous-layers-config-path": (_given, "layers of several kinds"),
    "--moe-latent-size": (_given, "experts of another width"),
    "--moe-expert-capacity-factor": (_given, "a capacity of experts"),
    "--freeze-all-layers": (_given, "frozen layers"),
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
    "--tensor-parallel-num-weight-shards": (_shards_weights, "sharded parameters"),
    "--expert-tensor-parallel-num-weight-shards": (_shards_weights, "sharded parameters"),
    **dict.fromkeys(("--cpu-offloading", "--cpu-offloading-num-layers"), (_given, "offloading")),
    "--optimizer-cpu-offload": (_given, "offloading"),
    "--fine-grained-activation-offloading": (_given, "offloading"),
    "--distribute-saved-activations": (_given, "distributed inputs of layers"),
    "--decoder-num-layers": (_given, "a decoder beside the encoder"),
    **dict.fromkeys(("--language-model-type", "--vision-model-type"), (_given, "models of pictures beside text")),
    **dict.fromkeys(_OF_PICTURES, (_has_pictures, "models of pictures beside text")),
    "--model-provider": (lambda options, flag: options.text(flag, "gpt") != "gpt", "models of pictures beside text"),
    "--is-hybrid-model": (_given, "layers of several kinds"),
    "--fp32-residual-connection": (_given, "a sum of the layers in fp32"),
    "--attention-output-gate": (_given, "gates behind attention"),
    **dict.fromkeys(
        ("--experimental-attention-variant", "--linear-attention-freq"), (_given, "attention of other kinds")
    ),
    "--moe-expert-rank-capacity-factor": (_given, "a capacity of experts"),
    "--moe-paged-stash": (_given, "offloading"),
    BACKEND: (lambda options, flag: options.text(flag) == "ncclep", "NCCL's own exchanges of tokens"),
    "--perform-rl-step": (_given, "rollouts between updates"),
    "--yaml-cfg": (_given, "a file in place of flags"),
    "--deepspeed": (_given, "DeepSpeed, whose file says what it shards and recomputes"),
    **dict.fromkeys(_ZERO_BUBBLE, (_given, "backward passes in two parts, as of zero-bubble pipelines")),
    "--hetero-mode": (_given, "stages on unequal GPUs"),
    **dict.fromkeys(_ADAPTERS, (_given, "adapters that are trained in place of the weights")),
    **dict.fromkeys(_EXCHANGED, (_given, "offloading")),
    **dict.fromkeys(_UNUSED_LAYERS, (_present, "layers that do nothing, or are counted by stage")),
    **dict.fromkeys(_ATTENDING_IN_TURN, (_given, "layers that attend in different ways")),
    GROUP: (_has_other_groups, "groups of more microbatches than there are stages"),
}
_NOTED: dict[str, tuple[Callable[[Options, str], bool], str]] = {
    "--optimizer": (_has_unknown_state, "priced with Adam's state, a fifth of SOAP's"),
    "--transformer-impl": (
        lambda options, flag: _is_local(options, flag) and not {"--bf16", "--fp16"} & options.values.keys(),
        "priced, from Ampere on, with products of Transformer Engine, which are in TF32; torch's take several times as "
        "long",
    ),
    "--muon-scalar-optimizer": (
        lambda options, flag: options.text(flag, "adam") != "adam",
        "priced with Adam for what is no matrix",
    ),
    **{flag: (_orthogonalizes_otherwise, f"priced with {usual}") for flag, usual in _OF_MUON.items()},
    "--ddp-reduce-scatter-with-fp32-accumulation": (
        lambda options, flag: flag in options and "--grad-reduce-in-bf16" in options,
        "priced without a second copy of the gradients in bf16 while replicas sum them",
    ),
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
    "--deterministic-mode": (_given, "priced with Megatron's usual kernels, which take less time"),
    "--spec": (_given, "priced with the layers that other flags describe"),
    "--sft": (_given, "priced with sequences of --seq-length tokens"),
    "--rampup-batch-size": (_given, "not priced, as Megatron no longer reads it"),
    STEPS: (_given, "priced at its last batch size"),
    "--expert-model-parallel-size": (
        _dispatches_otherwise,
        f"priced with --moe-token-dispatcher-type {Dispatcher.ALLTOALL}",
    ),
    "--num-experts": (
        _above_one,
        "priced with experts that are nearly equally busy; before they are, the busiest takes more",
    ),
    "--moe-router-group-topk": (
        lambda options, flag: flag in options and options.text("--moe-token-dispatcher-type") == FLEX,
        "priced with experts of any group, which are on more nodes",
    ),
    GROUPED: (_loops_over_experts, "priced as if it were given"),
    "--multi-latent-attention": (_is_local, "priced with Transformer Engine's layers"),
    "--mtp-detach-heads": (_given, "priced with gradients of embedding and output layer by further tokens' losses"),
    "--mla-down-proj-fusion": (_given, "priced without that fusion"),
    "--moe-shared-expert-overlap": (_given, "priced without that overlap"),
    "--moe-token-dispatcher-type": (_gathers_in_price, "priced as allgather, where no ranks share the experts"),
    "--use-tp-pp-dp-mapping": (_given, "priced with Megatron's usual order of ranks"),
    "--cp-comm-type": (lambda options, flag: options.text(flag, "p2p") != "p2p", "priced as p2p"),
    **dict.fromkeys(
        ("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph"), (_given, "priced without CUDA graphs")
    ),
    "--window-size": (_given, "priced with attention over whole sequences"),
    "--fp16-lm-cross-entropy": (_given, "priced with logits in fp32"),
    WARMUP_FLUSH: (lambda options, flag: flag in options and interleaves(options), "priced without that overlap"),
    "--delay-wgrad-compute": (_given, "priced without that overlap"),
    **dict.fromkeys(
        ("--recompute-activation-function", "--recompute-in-advance"), (_given, "priced without that recomputation")
    ),
    "--reuse-fp32-param": (_given, "priced with weights beside the optimizer's"),
    "--no-gradient-accumulation-fusion": (_given, "priced with that fusion"),
    "--no-masked-softmax-fusion": (_given, "priced with that fusion"),
    "--no-bias-dropout-fusion": (_given, "priced with that fusion"),
    "--use-transformer-engine-op-fuser": (_given, "priced without that fusion"),
    "--mlp-chunks-for-training": (
        _above_one,
        "priced with all tokens of a microbatch in the MLP at once",
    ),
    "--max-position-embeddings": (_has_more_positions, "priced with weights of as many positions as --seq-length"),
    "--cross-entropy-fusion-impl": (
        lambda options, flag: "--cross-entropy-loss-fusion" in options and options.text(flag) == "te",
        "priced, but megatron-core 0.18 and 0.19 refuse it as unstable: leave it out",
    ),
    "--cross-entropy-loss-fusion": (
        lambda options, flag: flag in options and options.text("--cross-entropy-fusion-impl", "native") == "native",
        "priced without that fusion",
    ),
    "--data-parallel-size": (_given, "no flag of Megatron, which derives it from the number of GPUs; give --gpus"),
}
CHECKED = frozenset(
    {
        *(*_REFUSED, *_NOTED, "--overlap-param-gather", "--clip-grad"),
        *("--mrope-section", "--rotary-interleaved"),
    }
)
"""Flags that are looked at here."""


def check_priced(options: Options) -> tuple[str, ...]:
    """What the estimate leaves out, one note per flag.

    Raises:
        PlanError: a flag that would make the estimate wrong.
    """
    if found := {flag: what for flag, (is_set, what) in _REFUSED.items() if is_set(options, flag)}:
        reasons = "; ".join(f"{flag}: the cost model does not cover {what}" for flag, what in found.items())
        raise PlanError(f"{reasons}; to price the rest, give --ignore {','.join(flag[2:] for flag in found)}")
    return tuple(f"{flag}: {how}" for flag, (is_set, how) in _NOTED.items() if is_set(options, flag))
