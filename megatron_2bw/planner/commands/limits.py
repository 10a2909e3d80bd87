"""What of a plan's flags limits its search, and the Space that they leave."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.commands.arguments import add_kernels, listed
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import (
    BACKEND,
    FLEX,
    MODULES,
    PIPELINE_LAYOUT,
    PRECISION_AWARE,
    RECEIVES,
    SETTINGS,
    STORED_IN,
    check_in_fp32,
)
from megatron_2bw.planner.spelling import attribute

if TYPE_CHECKING:
    from megatron_2bw.planner.specs.adam_state import AdamState
    from megatron_2bw.planner.specs.layout import Dispatcher
    from megatron_2bw.planner.specs.model import Model
    from megatron_2bw.planner.specs.space import Space

_FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
_LIMITS = {
    "--pipeline-schedule": ("schedules", str),
    "--pipeline-model-parallel-size": ("pipelines", int),
    "--tensor-model-parallel-size": ("tensors", int),
    "--context-parallel-size": ("contexts", int),
    "--expert-model-parallel-size": ("experts", int),
    "--expert-tensor-parallel-size": ("expert_tensors", int),
    "--data-parallel-size": ("widths", int),
    "--micro-batch-size": ("microbatches", int),
    "--num-virtual-stages-per-pipeline-rank": ("chunks", int),
    "--decoder-first-pipeline-num-layers": ("first_stage_layers", int),
    "--decoder-last-pipeline-num-layers": ("last_stage_layers", int),
    "--recompute-granularity": ("recomputes", "Recompute"),
    "--recompute-method": ("recompute_methods", "RecomputeMethod"),
    "--recompute-num-layers": ("recompute_layers", int),
    "--pipeline-extra-in-flight": ("extra_in_flight", int),
    "--pipeline-delayed-microbatches": ("delayed_microbatches", int),
    "--pipeline-gradient-buffers": ("gradient_buffers", int),
    "--mixpipe-k": ("mixpipe_k", int),
    "--mixpipe-gamma": ("mixpipe_gamma", int),
}
"""Flags that limit a dimension of ``Space`` to a list."""
_OF_SCHEDULE = {
    "2bw": ("--pipeline-extra-in-flight", "--pipeline-delayed-microbatches", "--pipeline-gradient-buffers"),
    "mixpipe": ("--mixpipe-k", "--mixpipe-gamma"),
}
"""Limits of which other schedules have no dimension."""


def add_limits(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    limits = parser.add_argument_group("limits of the search; lists are separated by commas")
    for flag, (dimension, _) in _LIMITS.items():
        limits.add_argument(flag, dest=dimension, metavar="LIST")
    example = "what each stage holds, such as 'Ett|(tt|)*14ttL' of 32 layers; one alone"
    limits.add_argument(PIPELINE_LAYOUT, dest="pipeline_layout", metavar="LAYOUT", help=example)
    for flag in ("--sequence-parallel", "--use-distributed-optimizer"):
        limits.add_argument(flag, action=argparse.BooleanOptionalAction)
    add_kernels(limits, "what the GPU has")
    limits.add_argument(
        MODULES,
        nargs="+",
        metavar="MODULE",
        help="of selective recomputation (default: all sets that save memory)",
    )
    limits.add_argument(
        "--fp8-recipe", choices=_FP8_RECIPES, help="matrix products of layers in 8 bits (default: none)"
    )
    limits.add_argument(
        "--moe-token-dispatcher-type",
        choices=("alltoall", FLEX),
        help="flex: one copy of a token for all its experts on a node (default: alltoall)",
    )
    limits.add_argument(BACKEND, choices=("deepep", "hybridep"), help="of flex (default: deepep)")
    limits.add_argument("--optimizer", help="adam, sgd, lion or muon (default: adam)")
    of_engine = "use Transformer Engine's Adam, which can keep its state in fewer bits"
    limits.add_argument(PRECISION_AWARE, action="store_true", help=of_engine)
    for (flag, precisions), kept in zip(STORED_IN.items(), ("main weights", "first", "second moment"), strict=True):
        limits.add_argument(flag, choices=precisions, help=f"{kept} (default: fp32)")
    for flag in SETTINGS:
        limits.add_argument(flag, action="store_true", help="of layouts that can have it")
    limits.add_argument(
        RECEIVES,
        choices=("late", "early"),
        help="early: transfers have more time; see the README for when ranks hang (default: late on GPUs)",
    )
    limits.add_argument("--allow-fewer-microbatches", action="store_true", help="let 2bw run with d-1 (default: d)")


def limits_given(args: argparse.Namespace) -> dict[str, Any]:
    """By flag; None where it is not given."""
    return {
        **{flag: getattr(args, dimension) for flag, (dimension, _) in _LIMITS.items()},
        PIPELINE_LAYOUT: args.pipeline_layout,
        "--sequence-parallel": args.sequence_parallel,
        "--use-distributed-optimizer": args.use_distributed_optimizer,
        f"--{args.precision}": args.precision,
        "--optimizer": args.optimizer,
        PRECISION_AWARE: args.use_precision_aware_optimizer or None,
        **_stored_in(args),
        "--attention-backend": args.attention_backend,
        "--fp8-recipe": args.fp8_recipe,
        MODULES: args.recompute_modules,
        "--moe-token-dispatcher-type": args.moe_token_dispatcher_type,
        BACKEND: args.moe_flex_dispatcher_backend,
        **{flag: getattr(args, attribute(flag)) or None for flag in SETTINGS},
        RECEIVES: args.pipeline_receives,
        "--allow-fewer-microbatches": args.allow_fewer_microbatches or None,
    }


def space_of(args: argparse.Namespace, model: Model) -> Space:
    """The layouts of ``model`` that the limits leave.

    Raises:
        PlanError: limits that leave none, or exclude each other.
    """
    from megatron_2bw.planner.cost.costs import SCHEDULES
    from megatron_2bw.planner.specs import layout
    from megatron_2bw.planner.specs.space import Space

    limits: dict[str, Any] = {}
    for flag, (dimension, kind) in _LIMITS.items():
        text = getattr(args, dimension)
        if text is not None:
            read = getattr(layout, kind) if isinstance(kind, str) else kind
            limits[dimension] = listed(flag, text, read)
    if "schedules" in limits:
        from megatron_2bw.planner.naming import schedule_name

        limits["schedules"] = tuple(schedule_name(word) for word in limits["schedules"])
    for schedule, flags in _OF_SCHEDULE.items():
        for flag in flags:
            if _LIMITS[flag][0] in limits and schedule not in limits.get("schedules", SCHEDULES):
                raise PlanError(
                    f"{flag}: only {schedule} has it, which is not searched; leave it out, or add {schedule}"
                )
    for dimension, value in (
        ("sequence_parallel", args.sequence_parallel),
        ("distributed_optimizer", args.use_distributed_optimizer),
    ):
        if value is not None:
            limits[dimension] = (value,)
    if args.pipeline_layout is not None:
        for flag in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"):
            if _LIMITS[flag][0] in limits:
                raise PlanError(f"{PIPELINE_LAYOUT} and {flag} exclude each other: the layout says it; leave one out")
        if not args.pipeline_layout:
            raise PlanError(f"{PIPELINE_LAYOUT} is empty: leave it out, or give such as 'Et|tL'")
        limits["pipeline_layout"] = (args.pipeline_layout.replace(",", ""),)
    if args.recompute_modules is not None:
        from megatron_2bw.planner.specs.inputs import modules_of

        if layout.Recompute.SELECTIVE not in limits.get("recomputes", layout.Recompute):
            raise PlanError(f"{MODULES} is of --recompute-granularity selective; leave one out")

        limits["recompute_modules"] = (modules_of(args.recompute_modules, MODULES),)
    if args.optimizer is not None:
        first, *others = listed("--optimizer", args.optimizer, layout.Optimizer)
        if others:
            raise PlanError(f"--optimizer {args.optimizer}: a run has one; give {first.value}, or plan once for each")
        limits["optimizer"] = first
    if (state := _adam_state(args)) is not None:
        limits["adam_state"] = state
    if args.fp8_param_gather and not args.fp8_recipe:
        raise PlanError("--fp8-param-gather needs --fp8-recipe; give it, or leave --fp8-param-gather out")
    if args.pipeline_receives and set(limits.get("schedules", SCHEDULES)) == {"megatron"}:
        raise PlanError(f"{RECEIVES}: Megatron's own schedule has one order of receives; leave it out")
    if args.pipeline_receives == "early" and model.num_experts:
        from megatron_2bw.planner.rules import CHANGING_KERNELS

        raise PlanError(f"{RECEIVES} early: {CHANGING_KERNELS}; leave it out")
    return Space(
        **limits,
        receives=layout.Receives(args.pipeline_receives or "default"),
        precision=layout.Precision(args.precision) if args.precision else None,
        fp8=layout.Fp8(args.fp8_recipe or "none"),
        dispatcher=_dispatcher(args, model, limits),
        fused_attention=None if args.attention_backend is None else args.attention_backend != "unfused",
        settings=tuple(said for flag, said in SETTINGS.items() if getattr(args, attribute(flag))),
        tight=args.allow_fewer_microbatches,
    )


def _stored_in(args: argparse.Namespace) -> dict[str, str | None]:
    return {flag: getattr(args, attribute(flag)) for flag in STORED_IN}


def _adam_state(args: argparse.Namespace) -> AdamState | None:
    from megatron_2bw.planner.specs.adam_state import AdamState

    given = _stored_in(args)
    if args.use_precision_aware_optimizer:
        if args.optimizer not in (None, "adam") or args.use_distributed_optimizer is False:
            others = "--optimizer and --no-use-distributed-optimizer"
            raise PlanError(f"{PRECISION_AWARE} is a distributed Adam; leave it out, or {others}")
        return AdamState(*(value or "fp32" for value in given.values()))
    check_in_fp32(given)
    return None


def _dispatcher(args: argparse.Namespace, model: Model, limits: dict[str, Any]) -> Dispatcher:
    from megatron_2bw.planner.specs.layout import Dispatcher

    if args.moe_token_dispatcher_type and not model.num_experts:
        raise PlanError(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}: {model.name or 'the model'} has no "
            "experts; leave it out"
        )
    if args.moe_token_dispatcher_type != FLEX:
        if args.moe_flex_dispatcher_backend:
            raise PlanError(f"{BACKEND} is of --moe-token-dispatcher-type {FLEX}; give that, too, or leave it out")
        return Dispatcher.ALLTOALL
    if limits.get("experts") == (1,):
        raise PlanError(
            f"--moe-token-dispatcher-type {FLEX} and --expert-model-parallel-size 1: no ranks share the experts; leave "
            "one out"
        )
    return Dispatcher(args.moe_flex_dispatcher_backend or Dispatcher.DEEPEP)
