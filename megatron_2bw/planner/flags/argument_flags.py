"""Megatron's arguments and the flags that set them."""

from __future__ import annotations

from megatron_2bw.planner.flags.accepted import GROUP, WARMUP_FLUSH

_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "microbatch_group_size_per_vp_stage": GROUP,
    "nccl_ub": "--use-nccl-ub",
    "overlap_p2p_comm_warmup_flush": WARMUP_FLUSH,
}
"""Of arguments that Megatron keeps under other names than their flags."""
NEGATED = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "fp8_wgrad": "--no-fp8-wgrad",
    "use_layer_wise_param_layout": "--no-use-layer-wise-param-layout",
}
"""Flags that set an argument to false."""


def flag_of(key: str) -> str:
    """The flag that sets an argument of Megatron; of a negated one, the flag that sets it to false."""
    return NEGATED.get(key) or _FLAGS.get(key) or "--" + key.replace("_", "-")
