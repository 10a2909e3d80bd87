"""``megatron-2bw profile``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.planner.commands.arguments import add_kernels, add_model, add_run_args, described_model, listed

_PROFILE = """Time a layer, the embedding, logits, the update and the links on this machine, on all ranks at once. The
model is --model, or Megatron's own flags; its number of layers does not matter."""


def add(commands: Any) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile", help="time the parts of a model on this machine", description=_PROFILE, allow_abbrev=False
    )
    profile.set_defaults(command=_profile, takes_flags=True)
    add_model(profile)
    profile.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks that will share this node")
    profile.add_argument("--micro-batch-size", default="1,2,4", metavar="LIST", help="(default: %(default)s)")
    profile.add_argument("--tensor-model-parallel-size", default="1", metavar="LIST", help="(default: %(default)s)")
    profile.add_argument("--recompute-granularity", default="none,full", metavar="LIST", help="none is always measured")
    add_kernels(profile, "fp32, unfused")
    profile.add_argument(
        "--sequence-parallel", action="store_true", help="with several tensor-parallel ranks; plan with it, too"
    )
    add_run_args(profile)
    profile.add_argument("--output", type=Path, required=True, metavar="FILE", help="finished if it was begun")


def _profile(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.flags.model_flags import flags_beside_sizes
    from megatron_2bw.planner.measure.profile import Setting
    from megatron_2bw.planner.measure.profiling import Request, measure, summary
    from megatron_2bw.planner.specs.layout import Precision, Recompute

    model = described_model(args, words)
    recomputes = listed("--recompute-granularity", args.recompute_granularity, Recompute)
    request = Request(
        model=model,
        setting=Setting(
            ranks=args.gpus,
            precision=Precision(args.precision or "fp32"),
            fused_attention=args.attention_backend in ("flash", "fused"),
            sequence_parallel=args.sequence_parallel,
            flags=" ".join([*flags_beside_sizes(model), *args.run_args]),
        ),
        tensors=listed("--tensor-model-parallel-size", args.tensor_model_parallel_size, int),
        microbatches=listed("--micro-batch-size", args.micro_batch_size, int),
        recomputes=tuple(choice for choice in Recompute if choice in (*recomputes, Recompute.NONE)),
        more_flags=tuple(args.run_args),
    )
    print("\n".join(summary(request, measure(request, args.output))))
    print(f"megatron-2bw plan --profile {args.output} prices with it")
    return 0
