"""``megatron-2bw plan``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.commands.arguments import (
    add_cluster,
    add_formats,
    add_kernels,
    add_model,
    add_run_args,
    check_size,
    described_cluster,
    described_model,
    listed,
)
from megatron_2bw.planner.commands.launched import add_script, changes, of_script, planned
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import (
    BACKEND,
    FLEX,
    MODULES,
    PIPELINE_LAYOUT,
    PRECISION_AWARE,
    STORED_IN,
    check_in_fp32,
)

if TYPE_CHECKING:
    from megatron_2bw.planner.search.search import Plan
    from megatron_2bw.planner.specs.adam_state import AdamState
    from megatron_2bw.planner.specs.cluster import Cluster
    from megatron_2bw.planner.specs.layout import Dispatcher
    from megatron_2bw.planner.specs.model import Model
    from megatron_2bw.planner.specs.space import Space

_PLAN = """Find the fastest layout of a model on a cluster. The model is --model, or Megatron's own flags: --num-layers,
--hidden-size, --num-attention-heads, --seq-length, --vocab-size, and whatever else of them describes it; or that of a
launch script (--from-script), whose batch size, number of GPUs, precision and optimizer then count, too."""
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
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


def add(commands: Any) -> None:
    """Add the command."""
    plan = commands.add_parser("plan", help="find the fastest layout of a model", description=_PLAN, allow_abbrev=False)
    plan.set_defaults(command=_plan, takes_flags=True)
    add_model(plan)
    add_script(plan)
    add_cluster(plan)
    plan.add_argument("--global-batch-size", type=int, metavar="B", help="samples; B = b * w * m")
    plan.add_argument(
        "--sample-efficiency",
        metavar="E",
        help="progress per sample with gradients one batch old, where 1 is that of a flush; auto: as measured with the "
        "recommended correction, alone, after a beginning without a delay, with half of every batch delayed, or with "
        "an eighth and no correction, whichever is faster (default: 1)",
    )
    plan.add_argument(
        "--synchronous-warmup-fraction",
        type=float,
        metavar="F",
        help="share of the run for which --synchronous-warmup-iters keeps 2bw from its delay (default: 0)",
    )
    plan.add_argument(
        "--delayed-microbatches-fraction",
        type=float,
        metavar="F",
        help="share of a batch's microbatches that 2bw may delay; the plan says how few suffice to hide an update, for "
        "--pipeline-delayed-microbatches (default: 1)",
    )
    _add_limits(plan)
    plan.add_argument(
        "--cost-model",
        choices=("default", "paper", "mixpipe"),
        default="default",
        help="paper: PipeDream-2BW's own planner, Appendix A; mixpipe: MixPipe's (default: %(default)s)",
    )
    plan.add_argument("--top", type=int, default=10, metavar="N", help="layouts to show (default: %(default)s)")
    plan.add_argument(
        "--verify-top",
        type=int,
        metavar="K",
        help="run the best K briefly on this machine, rank them again",
    )
    plan.add_argument("--script", type=Path, metavar="FILE", help="what --verify-top runs (default: the GPT example)")
    add_run_args(plan)
    plan.add_argument("--explain", metavar="LAYOUT", help="why this one, such as 2bw:d8,t4 or as in the table, lost")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of throughput against memory (SVG)")
    add_formats(plan, flags_only=True)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits of the search; lists are separated by commas")
    for flag, (dimension, _) in _LIMITS.items():
        limits.add_argument(flag, dest=dimension, metavar="LIST")
    example = "what each stage holds, such as 'Et|(tt|)*15tL' of 32 layers; one alone"
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
    limits.add_argument("--fp8-recipe", choices=FP8_RECIPES, help="matrix products of layers in 8 bits (default: none)")
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
    limits.add_argument("--allow-fewer-microbatches", action="store_true", help="let 2bw run with d-1 (default: d)")


def _plan(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.report.report import planned_flags
    from megatron_2bw.planner.specs.inputs import sized

    _check(args)
    script = None if args.from_script is None else planned(args, words)
    model = described_model(args, words) if script is None else script.model
    notes = [] if script is None else script.notes
    if args.global_batch_size is None:
        raise PlanError("--global-batch-size is missing: the number of microbatches depends on it; give it")
    node = described_cluster(args)
    cluster = sized(node, nodes=args.nodes, gpus=args.gpus)
    check_size(args, node, cluster.gpus)
    if args.cost_model != "default":
        return _plan_of_paper(args, model, cluster, notes)
    try:
        space = _space(args, model)
    except PlanError as error:
        raise of_script(error, args) from error
    if cluster.profile is not None:
        space = cluster.profile.limited(space)
    keep = max(args.top, args.verify_top or 0, 100 if args.plot else 10)
    try:
        plan = _searched(args, model, cluster, space, keep)
    except PlanError as error:
        from megatron_2bw.planner.flags.flags import in_flags

        raise PlanError(in_flags(str(error))) from error
    if args.verify_top:
        from megatron_2bw.planner.measure.verify import measured
        from megatron_2bw.planner.report.report import shown

        plan = measured(plan, shown(plan, args.verify_top), args.script, args.run_args)
    if args.plot:
        from megatron_2bw.planner.report.plot import plot

        args.plot.write_text(plot(plan), encoding="utf-8")
    if script is not None:
        notes = [*notes, *changes(script, plan, planned_flags(plan, plan.best))]
    _print(args, plan, space, notes)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Whether options go together, before anything is searched.

    Raises:
        PlanError: they do not.
    """
    for flag, count in (("--top", args.top), ("--verify-top", args.verify_top)):
        if count is not None and count < 1:
            raise PlanError(f"{flag} {count}: give a whole number of at least 1")
    if args.from_script is None and (args.script_args or args.ignore):
        raise PlanError("--script-args and --ignore say how to read --from-script; give that too, or leave them out")
    if args.verify_top is None and (args.script or args.run_args):
        raise PlanError("--script and --run-args say how --verify-top runs layouts; give that too, or leave them out")
    if args.plot and args.plot.suffix != ".svg":
        raise PlanError(f"--plot {args.plot}: it is an SVG; give a name ending in .svg")
    if args.plot:
        _check_writable(args.plot)
    if args.verify_top is not None and args.explain:
        raise PlanError("--explain says why a layout lost, --verify-top runs the best; leave one out")
    for flag, given in (("--json", args.json), ("--flags-only", args.flags_only)):
        if args.explain is not None and given:
            raise PlanError(f"--explain says why in words, {flag} prints the plan; leave one out")


def _print(args: argparse.Namespace, plan: Plan, space: Space, notes: Sequence[str]) -> None:
    """In the form that was asked for."""
    from megatron_2bw.planner.report.report import noted, paragraph, plan_json, plan_lines, planned_flags, sentences

    if args.explain is not None:
        from megatron_2bw.planner.report.explain import explain

        print("\n".join([*explain(plan, space, args.explain), *noted(notes)]))
    elif args.flags_only:
        print(*planned_flags(plan, plan.best))
        said = [*paragraph(sentences(plan)), *noted(notes)]
        if said:  # Not where the flags are pasted, but where who pastes them reads.
            print("\n".join(["megatron-2bw:", *said]), file=sys.stderr)
    elif args.json:
        print(json.dumps({**plan_json(plan, args.top, space), "notes": notes}, indent=2))
    else:
        print("\n".join(plan_lines(plan, args.top, space, notes)))


def _searched(args: argparse.Namespace, model: Model, cluster: Cluster, space: Space, keep: int) -> Plan:
    """By the progress that is given, or with the better of those that were measured."""
    from megatron_2bw.planner.search.efficiency import AUTO, MEASURED, Progress, assumption
    from megatron_2bw.planner.search.search import search
    from megatron_2bw.schedule.registry import TWO_BW

    shares = {
        "--synchronous-warmup-fraction": args.synchronous_warmup_fraction,
        "--delayed-microbatches-fraction": args.delayed_microbatches_fraction,
    }
    if args.sample_efficiency != AUTO:
        synchronous, delayed = shares.values()
        progress = Progress(
            efficiency=1.0 if args.sample_efficiency is None else _number(args.sample_efficiency),
            synchronous=synchronous or 0.0,
            delayed=1.0 if delayed is None else delayed,
        )
        return search(model, cluster, args.global_batch_size, space, progress=progress, keep=keep)
    for flag, share in shares.items():
        if share is not None:
            raise PlanError(f"{flag} {share:g}: --sample-efficiency auto chooses the share; leave one out")

    times_s: dict[Progress, float] = {}
    # Only layouts with a delay take another time to a loss with other progress.
    delayed = replace(space, schedules=space.allows("schedules", tuple(TWO_BW)))
    for progress in MEASURED if delayed.schedules else ():
        with suppress(PlanError):  # The batch may have too few microbatches for it.
            found = search(model, cluster, args.global_batch_size, delayed, progress=progress, keep=1)
            times_s[progress] = found.best.loss_time_s
    progress = min(times_s, key=times_s.__getitem__, default=MEASURED[-1])  # Which asks for least.
    plan = search(model, cluster, args.global_batch_size, space, progress=progress, keep=keep)
    return replace(plan, assumption=assumption(progress, plan.best.layout))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise PlanError(f"sample_efficiency {text}: give a number above 0, such as 0.9, or auto") from error


def _plan_of_paper(args: argparse.Namespace, model: Model, cluster: Cluster, notes: Sequence[str]) -> int:
    from megatron_2bw.planner.report.papers import paper_flags, paper_json, paper_lines
    from megatron_2bw.planner.report.report import noted

    given = {
        "--sample-efficiency": args.sample_efficiency,
        "--synchronous-warmup-fraction": args.synchronous_warmup_fraction,
        "--delayed-microbatches-fraction": args.delayed_microbatches_fraction,
        "--verify-top": args.verify_top,
        "--explain": args.explain,
        "--plot": args.plot,
        "--profile": args.profile,
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
        "--allow-fewer-microbatches": args.allow_fewer_microbatches or None,
    }
    for flag, value in given.items():
        if value is not None:
            raise PlanError(f"--cost-model {args.cost_model} has no {flag}; leave it out, or use default")
    problem = (args.cost_model, model, cluster, args.global_batch_size)
    if args.flags_only:
        flags, gpus = paper_flags(*problem)
        print(*flags)
        if gpus < cluster.gpus:
            print(f"megatron-2bw: these flags are for {gpus} of the {cluster.gpus} GPUs", file=sys.stderr)
        for line in noted(notes):
            print(f"megatron-2bw: {line}", file=sys.stderr)
    elif args.json:
        print(json.dumps({**paper_json(*problem, args.top), "notes": list(notes)}, indent=2))
    else:
        print("\n".join([*paper_lines(*problem, args.top), *noted(notes)]))
    return 0


def _check_writable(file: Path) -> None:
    """Before a search, and perhaps runs, whose outcome would be lost; leaves no file behind."""
    is_new = not file.exists()
    file.open("a").close()
    if is_new:
        file.unlink()


def _space(args: argparse.Namespace, model: Model) -> Space:
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
    return Space(
        **limits,
        precision=layout.Precision(args.precision) if args.precision else None,
        fp8=layout.Fp8(args.fp8_recipe or "none"),
        dispatcher=_dispatcher(args, model, limits),
        fused_attention=None if args.attention_backend is None else args.attention_backend != "unfused",
        tight=args.allow_fewer_microbatches,
    )


def _stored_in(args: argparse.Namespace) -> dict[str, str | None]:
    return {flag: getattr(args, flag[2:].replace("-", "_")) for flag in STORED_IN}


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
