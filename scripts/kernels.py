"""Prints Megatron's flags for what has no kernels here: ``scripts/lib/pretrain.sh`` and the benchmarks train with them.

Megatron's own defaults ask for Transformer Engine and for Apex's weight gradients; where a CPU trains, megatron_2bw
does without by itself.
"""

from __future__ import annotations

from importlib.util import find_spec

WITHOUT = {
    "transformer_engine": "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-rope-fusion",
    # The output layer is Megatron's own beside Transformer Engine's, too, and fuses by a module of Apex.
    "fused_weight_gradient_mlp_cuda": "--no-gradient-accumulation-fusion",
}
"""By a module of kernels: Megatron's flags where there is none."""


def flags_without_kernels() -> list[str]:
    """Megatron's flags for the modules that are missing."""
    return " ".join(flags for module, flags in WITHOUT.items() if find_spec(module) is None).split()


if __name__ == "__main__":
    print(*flags_without_kernels())
