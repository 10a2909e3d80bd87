"""What matrix products in 8 bits cost beside their speed, and what they save: casts, copies of weights, kept inputs.

As in Transformer Engine's ``LayerNormLinear``, ``Linear`` and ``GroupedLinear`` (in ``transformer_engine/pytorch``).
Hopper's products want both factors with the summed dimension last: every factor is cast twice, as it is and transposed.
Blackwell's take one copy for both, but where a scale is that of a block, which another block has along the other
dimension (``nvte_is_non_tn_fp8_gemm_supported``). Scale factors are small and left out, and so is that Hopper's
sequence-parallel ranks transpose what they have gathered, each for itself (``_all_gather_fp8``).
"""

from __future__ import annotations

from megatron_2bw.planner.specs.layout import FP8_BYTES, Fp8

COPIES = 2
"""As it is, and transposed."""
_BY_BLOCK = (Fp8.BLOCKWISE, Fp8.MXFP8)


def cast_bytes(recipe: Fp8, width: int, *, transposes: bool = True, in_norm: bool = False) -> float:
    """Moved per number to cast it, beyond what products in ``width`` bytes need.

    Args:
        recipe: its scale; ``tensorwise`` reads everything once more, for the largest number.
        width: bytes per number before.
        transposes: whether the GPU's products want all factors transposed, too.
        in_norm: of what a norm writes. With ``delayed``, its kernel casts, so that nothing is written and read again;
            with ``tensorwise``, it finds the largest number (``transformer_engine/pytorch/csrc/extensions/
            normalization.cpp``, without ``NVTE_NORM_FWD_USE_CUDNN``).

    >>> cast_bytes(Fp8.DELAYED, 2), cast_bytes(Fp8.TENSORWISE, 2), cast_bytes(Fp8.DELAYED, 2, in_norm=True)
    (4, 6, 0)
    >>> cast_bytes(Fp8.MXFP8, 2, transposes=False), cast_bytes(Fp8.TENSORWISE, 2, transposes=False, in_norm=True)
    (4, 3)
    """
    if recipe is Fp8.NONE:
        return 0
    written = _copies(recipe, transposes) * FP8_BYTES
    if in_norm and recipe is Fp8.DELAYED:
        return written - width
    return cast_kernels(recipe, in_norm=in_norm) * width + written


def cast_kernels(recipe: Fp8, *, in_norm: bool = False) -> int:
    """Of one cast; each reads everything.

    >>> cast_kernels(Fp8.BLOCKWISE), cast_kernels(Fp8.TENSORWISE), cast_kernels(Fp8.TENSORWISE, in_norm=True)
    (1, 2, 1)
    """
    if recipe is Fp8.NONE:
        return 0
    reads = 2 if recipe is Fp8.TENSORWISE else 1
    return reads - (in_norm and recipe not in _BY_BLOCK)


def _copies(recipe: Fp8, transposes: bool) -> int:
    """That products need."""
    return COPIES if transposes or recipe in _BY_BLOCK else 1


def operand_width(recipe: Fp8, width: int) -> int:
    """Bytes per number that a product reads, and that is kept of its input for the backward."""
    return width if recipe is Fp8.NONE else FP8_BYTES


def weight_cast_bytes(recipe: Fp8, width: int, *, parameters: bool, transposes: bool = True) -> float:
    """Moved per weight and batch: its copies are made before the first microbatch and last until the update.

    Args:
        recipe: of the products.
        width: bytes per weight in the parameters' precision.
        parameters: whether the update writes weights in 8 bits, so that only the transposed ones are left to make;
            not with ``mxfp8``, see `gathered_width`.
        transposes: whether the GPU's products want these.

    >>> weight_cast_bytes(Fp8.DELAYED, 2, parameters=False), weight_cast_bytes(Fp8.DELAYED, 2, parameters=True)
    (4, 2)
    """
    if recipe is Fp8.NONE:
        return 0
    if parameters and recipe is not Fp8.MXFP8:
        return (_copies(recipe, transposes) - 1) * 2 * FP8_BYTES
    return cast_bytes(recipe, width, transposes=transposes)


def weight_copy_bytes(recipe: Fp8, width: int, *, parameters: bool) -> float:
    """Kept per weight beside the parameters' precision; with ``parameters``, the copies take its place.

    Both copies, on Blackwell, too, where scales of whole tensors need one.

    >>> weight_copy_bytes(Fp8.DELAYED, 2, parameters=False), weight_copy_bytes(Fp8.DELAYED, 2, parameters=True)
    (2, 0)
    """
    if recipe is Fp8.NONE:
        return 0
    return COPIES * FP8_BYTES - (width if parameters else 0)


def kept_copies(recipe: Fp8) -> int:
    """Bytes per number that a product keeps of an input that another module keeps in 16 bits anyway.

    Outputs of attention, and what a router and shared experts read. But with delayed scaling, Megatron has products
    keep that very input and cast it again: ``set_save_original_input`` in ``megatron/core/transformer/attention.py``
    and ``moe/shared_experts.py``.

    >>> kept_copies(Fp8.DELAYED), kept_copies(Fp8.TENSORWISE), kept_copies(Fp8.NONE)
    (1, 0, 0)
    """
    return FP8_BYTES if recipe is Fp8.DELAYED else 0


def gathered_width(recipe: Fp8, width: int, *, parameters: bool) -> int:
    """Bytes per weight that replicas gather after an update.

    ``mxfp8`` weights are gathered before they are cast: ``is_mxfp8tensor`` in Megatron-Core's
    ``param_and_grad_buffer.py``.

    >>> gathered_width(Fp8.DELAYED, 2, parameters=True), gathered_width(Fp8.MXFP8, 2, parameters=True)
    (1, 2)
    """
    return FP8_BYTES if parameters and recipe not in (Fp8.NONE, Fp8.MXFP8) else width


def gathered_share(recipe: Fp8, width: int) -> float:
    """Bytes that sequence-parallel ranks move per number, over those without 8 bits.

    What they gather is cast before; what they scatter are sums in ``width`` bytes.

    >>> gathered_share(Fp8.DELAYED, 2), gathered_share(Fp8.NONE, 2)
    (0.75, 1.0)
    """
    return (operand_width(recipe, width) + width) / (2 * width)
