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
    add_model,
    add_run_args,
    check_size,
    described_cluster,
    described_model,
)
from megatron_2bw.planner.commands.launched import add_script, of_script
from megatron_2bw.planner.commands.limits import add_limits, limits_given, space_of
from megatron_2bw.planner.commands.replanned import changes, decided_otherwise, planned, to_take_out
from megatron_2bw.planner.errors import PlanError

if TYPE_CHECKING:
    from megatron_2bw.planner.commands.replanned import Script
    from megatron_2bw.planner.search.search import Plan
    from megatron_2bw.planner.specs.cluster import Cluster
    from megatron_2bw.planner.specs.model import Model
    from megatron_2bw.planner.specs.space import Space

_PLAN = """Find the fastest layout of a model on a cluster. The model is --model, or Megatron's own flags: --num-layers,
--hidden-size, --num-attention-heads, --seq-length, --vocab-size, and whatever else of them describes it; or that of a
launch script (--from-script), whose batch size, number of GPUs, precision and optimizer then count, too."""


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
    add_limits(plan)
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
        return _plan_of_paper(args, model, cluster, script, notes)
    try:
        space = space_of(args, model)
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
        notes = changes(script, plan, planned_flags(plan, plan.best))
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


def _plan_of_paper(
    args: argparse.Namespace, model: Model, cluster: Cluster, script: Script | None, notes: Sequence[str]
) -> int:
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
        **limits_given(args),
    }
    for flag, value in given.items():
        if value is not None:
            raise PlanError(f"--cost-model {args.cost_model} has no {flag}; leave it out, or use default")
    problem = (args.cost_model, model, cluster, args.global_batch_size)
    if script is not None:
        with suppress(PlanError):  # One that does not run has no flags; below it says why.
            notes = [*notes, *to_take_out(decided_otherwise(script, paper_flags(*problem)[0]))]
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
