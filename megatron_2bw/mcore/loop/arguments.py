"""Our command-line arguments."""

from __future__ import annotations

import argparse
import math
from typing import Any

from megatron_2bw.mcore.receives import are_late
from megatron_2bw.planner.flag_table.conditions import CORRECTIONS, LEAD, depends_on_data
from megatron_2bw.planner.papers.automatic import AUTO
from megatron_2bw.schedule.commands.arguments import count, natural
from megatron_2bw.schedule.registry import ALIASES, MEGATRON, SCHEDULES
from megatron_2bw.schedule.systems.two_bw import MOST_EXTRA_IN_FLIGHT


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group to Megatron's parser."""
    group = parser.add_argument_group("pipeline schedule (megatron_2bw)")
    group.add_argument(
        "--pipeline-schedule",
        default=MEGATRON,
        choices=[MEGATRON, *SCHEDULES, *ALIASES],
        help="2bw: never drain the pipeline, update with gradients one batch old (PipeDream-2BW); pipedream: update "
        "after every microbatch, with a delay per stage; 1f1b-flush, gpipe and inter-layer: synchronous; gems, chimera "
        "and mixpipe: synchronous, in both directions, with two stages per rank; megatron: Megatron's own, untouched.",
    )
    group.add_argument(
        "--pipeline-gradient-buffers",
        type=int,
        default=2,
        choices=[1, 2],
        help="2bw: with 2, finished gradients (with the distributed optimizer: this rank's shard) are kept apart, and "
        "their update waits for nobody before its weights are needed. 1 saves that memory; the update then "
        "comes before the next batch's first backward, which costs speed.",
    )
    group.add_argument(
        "--pipeline-extra-in-flight",
        type=natural,
        default=0,
        choices=range(MOST_EXTRA_IN_FLIGHT + 1),
        metavar="N",
        help="2bw: keep N more activations in flight per stage boundary than its d-s. That hides transfers and "
        "uneven moments of neighbouring stages, costs the memory of the activations, and needs "
        "(1+N)*(d-1) microbatches per batch.",
    )
    group.add_argument(
        "--pipeline-delayed-microbatches",
        type=count,
        default=None,
        metavar="N",
        help="2bw: compute the first N microbatches of a batch with the weights of one update before, the others with "
        "the newest, so that the delay costs less progress. At least what the first stage runs ahead, d-1 or with "
        "--pipeline-extra-in-flight X (1+X)*(d-1); one more leaves time to hide an update. By default all are delayed, "
        "the paper's rule.",
    )
    group.add_argument(
        "--pipeline-receives",
        choices=("late", "early"),
        default=None,
        help="late, the default on GPUs: post each receive no earlier than its tensor is sent, by the schedule. Then "
        "all ranks get through, whatever waits for the whole GPU: an allocator without free memory, a kernel that is "
        "first used late, wide norms of Transformer Engine. early, the default without a GPU: one computation before "
        "that, so that transfers have more time beside computations.",
    )
    group.add_argument(
        "--mixpipe-k",
        type=_count_or_auto,
        default=None,
        metavar="K",
        help="mixpipe: forwards that a rank starts with, over both directions; even. By default as many as stages, "
        "which is Chimera's order. auto: with --mixpipe-gamma, the fastest that the planner expects to fit.",
    )
    group.add_argument(
        "--mixpipe-gamma",
        type=natural,
        default=None,
        metavar="G",
        help="mixpipe: so many more forwards are in flight once backwards have begun.",
    )
    group.add_argument(
        "--delay-correction",
        default="none",
        choices=CORRECTIONS,
        help="2bw: none is the paper's exact rule. lead updates with the average of gradients --delay-lead steps ahead "
        "of time, as its trend has it, which allows larger learning rates; use it with a larger --adam-beta1, such as "
        "0.95. update-lead computes, evaluates and saves the model with weights that are --delay-lead updates ahead of "
        "the optimizer's, in bf16 or fp16. Neither keeps more memory.",
    )
    group.add_argument(
        "--delay-lead",
        type=_positive,
        default=LEAD,
        metavar="C",
        help="Steps that --delay-correction looks ahead.",
    )
    group.add_argument(
        "--synchronous-warmup-iters",
        type=natural,
        default=0,
        metavar="N",
        help="2bw: run the first N iterations of a training as 1f1b-flush does, without a delay, which costs most "
        "while the loss falls fast. They have its bubble. --delay-correction looks one step less ahead in them.",
    )
    group.add_argument(
        "--pipeline-trace",
        default=None,
        metavar="FILE",
        help="At the end of training, write when every forward, backward and update ran on every stage "
        "of the first pipeline, as a Chrome/Perfetto trace.",
    )
    group.add_argument(
        "--log-pipeline",
        action="store_true",
        help="Log the pipeline's bubble, how much busier the busiest stage is than the least busy one and, "
        "under 2bw, how long before an update its reductions are complete; also to Tensorboard and W&B.",
    )
    return parser


def options_of(args: Any) -> dict[str, int | None]:
    """What the flags say of the schedule beside its size."""
    return {
        "extra_in_flight": args.pipeline_extra_in_flight,
        "delayed_microbatches": args.pipeline_delayed_microbatches,
        "k": args.mixpipe_k,
        "gamma": args.mixpipe_gamma,
    }


def has_late_receives(args: Any) -> bool:
    """Whether ranks get through whatever waits for the whole GPU."""
    given = getattr(args, "pipeline_receives", None)
    return are_late(None if given is None else given == "late", kernels_depend_on_data=depends_on_data(args))


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTO else count(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number
