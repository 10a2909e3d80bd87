"""The commands ``plan``, ``estimate`` and ``profile``.

What they need is imported where they run, so that the other commands start at once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.arguments import (
    add_cluster,
    add_formats,
    add_kernels,
    add_model,
    described_cluster,
    described_model,
    listed,
)
from megatron_2bw.planner.errors import PlanError

if TYPE_CHECKING:
    from megatron_2bw.planner.cluster import Cluster
    from megatron_2bw.planner.model import Model
    from megatron_2bw.planner.search import Plan
    from megatron_2bw.planner.space import Space

_PLAN = """Find the fastest layout of a model on a cluster. The model is --model, or Megatron's own flags: --num-layers,
--hidden-size, --num-attention-heads, --seq-length, --vocab-size, and whatever else of them describes it."""
_ESTIMATE = """Predict time and memory of one configuration. All other flags are Megatron's, as in a launch script."""

_PROFILE = """Time a layer, the embedding, logits, the update and the links on this machine, on all ranks at once. The
model is --model, or Megatron's own flags; its number of layers does not matter."""


def add_commands(commands: Any) -> None:
    """Add them to the subparsers of ``megatron-2bw``; they take Megatron's flags beside their own."""
    plan = commands.add_parser("plan", help="find the fastest layout of a model", description=_PLAN, allow_abbrev=False)
    plan.set_defaults(command=_plan, takes_flags=True)
    add_model(plan)
    add_cluster(plan)
    plan.add_argument("--global-batch-size", type=int, required=True, metavar="B", help="samples; B = b * w * m")
    plan.add_argument(
        "--sample-efficiency",
        type=float,
        default=1.0,
        metavar="E",
        help="progress per sample with gradients one batch old, where 1 is that of a flush (default: 1)",
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
        default=0,
        metavar="K",
        help="run the best K briefly on this machine, rank them again",
    )
    plan.add_argument("--script", type=Path, metavar="FILE", help="what --verify-top runs (default: the GPT example)")
    plan.add_argument("--explain", metavar="LAYOUT", help="why this one, such as 2bw:d8,t4 or as in the table, lost")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of throughput against memory (SVG)")
    add_formats(plan, flags_only=True)

    estimate = commands.add_parser(
        "estimate", help="predict time and memory of a configuration", description=_ESTIMATE, allow_abbrev=False
    )
    estimate.set_defaults(command=_estimate, takes_flags=True)
    estimate.add_argument("--model-kind", choices=("gpt", "bert"), help="of a model given by flags (default: gpt)")
    add_cluster(estimate)
    estimate.add_argument("--from-script", type=Path, metavar="FILE", help="a launch script in bash; read, never run")
    estimate.add_argument("--script-args", default="", metavar="TEXT", help="arguments of that script, in one string")
    estimate.add_argument("--ignore", default="", metavar="LIST", help="flags to leave out, such as fp8-format,seed")
    estimate.add_argument("--jsonl", type=Path, metavar="FILE", help="one configuration per line, as a JSON object")
    add_formats(estimate)

    profile = commands.add_parser(
        "profile", help="time the parts of a model on this machine", description=_PROFILE, allow_abbrev=False
    )
    profile.set_defaults(command=_profile, takes_flags=True)
    add_model(profile)
    profile.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks that will share this node")
    profile.add_argument("--micro-batch-size", default="1,2,4", metavar="LIST", help="(default: %(default)s)")
    profile.add_argument("--tensor-model-parallel-size", default="1", metavar="LIST", help="(default: %(default)s)")
    profile.add_argument("--recompute-granularity", default="none,full", metavar="LIST", help="none is always measured")
    add_kernels(profile)
    profile.add_argument("--output", type=Path, required=True, metavar="FILE", help="finished if it was begun")


_LIMITS = {
    "--pipeline-schedule": ("schedules", str),
    "--pipeline-model-parallel-size": ("pipelines", int),
    "--tensor-model-parallel-size": ("tensors", int),
    "--data-parallel-size": ("widths", int),
    "--micro-batch-size": ("microbatches", int),
    "--num-virtual-stages-per-pipeline-rank": ("chunks", int),
    "--recompute-granularity": ("recomputes", "Recompute"),
    "--recompute-method": ("recompute_methods", "RecomputeMethod"),
    "--recompute-num-layers": ("recompute_layers", int),
    "--pipeline-extra-in-flight": ("extra_in_flight", int),
    "--pipeline-gradient-buffers": ("gradient_buffers", int),
}
"""Flags that limit a dimension of ``Space`` to a list."""


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits of the search; lists are separated by commas")
    for flag, (dimension, _) in _LIMITS.items():
        limits.add_argument(flag, dest=dimension, metavar="LIST")
    for flag in ("--sequence-parallel", "--use-distributed-optimizer"):
        limits.add_argument(flag, action=argparse.BooleanOptionalAction)
    add_kernels(limits)
    limits.add_argument("--allow-fewer-microbatches", action="store_true", help="let 2bw run with d-1 (default: d)")


def _plan(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.inputs import sized
    from megatron_2bw.planner.report import flags_of, plan_json, plan_lines
    from megatron_2bw.planner.search import search

    for flag, count, least in (("--top", args.top, 1), ("--verify-top", args.verify_top, 0)):
        if count < least:
            raise PlanError(f"{flag} {count}: give a whole number of at least 1")
    model = described_model(args, words)
    cluster = sized(described_cluster(args), nodes=args.nodes, gpus=args.gpus)
    if args.cost_model != "default":
        return _plan_of_paper(args, model, cluster)
    space = _space(args)
    if cluster.profile is not None:
        space = cluster.profile.limited(space)
    keep = max(args.top, 200 if args.plot else 20)
    plan = search(model, cluster, args.global_batch_size, space, efficiency=args.sample_efficiency, keep=keep)
    if args.verify_top:
        from megatron_2bw.planner.verify import verified

        plan = verified(plan, args.verify_top, args.script)
    if args.plot:
        from megatron_2bw.planner.plot import plot

        args.plot.write_text(plot(plan), encoding="utf-8")
    if args.explain:
        print("\n".join(_explained(plan, space, args.explain)))
    elif args.flags_only:
        print(*flags_of(model, plan.best.layout))
    elif args.json:
        print(json.dumps(plan_json(plan, args.top), indent=2))
    else:
        print("\n".join(plan_lines(plan, args.top)))
    return 0


def _plan_of_paper(args: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    from megatron_2bw.planner.papers import paper_flags, paper_json, paper_lines

    for option in ("explain", "plot", "profile", "script", *(dimension for dimension, _ in _LIMITS.values())):
        if getattr(args, option) is not None:
            raise PlanError(
                f"--cost-model {args.cost_model} has no {option}; leave it out, or use --cost-model default"
            )
    problem = (args.cost_model, model, cluster, args.global_batch_size)
    if args.flags_only:
        print(*paper_flags(*problem))
    elif args.json:
        print(json.dumps(paper_json(*problem, args.top), indent=2))
    else:
        print("\n".join(paper_lines(*problem, args.top)))
    return 0


def _space(args: argparse.Namespace) -> Space:
    from megatron_2bw.planner import layout
    from megatron_2bw.planner.space import Space

    limits: dict[str, Any] = {}
    for flag, (dimension, kind) in _LIMITS.items():
        text = getattr(args, dimension)
        if text is not None:
            read = getattr(layout, kind) if isinstance(kind, str) else kind
            limits[dimension] = listed(flag, text, read)
    if "schedules" in limits:
        from megatron_2bw.planner.naming import schedule_name

        limits["schedules"] = tuple(schedule_name(word) for word in limits["schedules"])
    for dimension, value in (
        ("sequence_parallel", args.sequence_parallel),
        ("distributed_optimizer", args.use_distributed_optimizer),
    ):
        if value is not None:
            limits[dimension] = (value,)
    return Space(
        **limits,
        precision=layout.Precision(args.precision) if args.precision else None,
        fused_attention=None if args.attention_backend is None else args.attention_backend != "unfused",
        tight=args.allow_fewer_microbatches,
    )


def _explained(plan: Plan, space: Space, text: str) -> list[str]:
    from megatron_2bw.planner.explain import explain

    return list(explain(plan, space, text))


def _estimate(args: argparse.Namespace, words: Sequence[str]) -> int:
    if args.jsonl:
        from megatron_2bw.planner.rows import predicted_rows

        if words or args.from_script or args.profile:
            given = words[0] if words else "--from-script" if args.from_script else "--profile"
            raise PlanError(f"--jsonl and {given}: the rows hold all flags; leave one out")
        worst = 0
        for line, failed in predicted_rows(args.jsonl, args.cluster, nodes=args.nodes, gpus=args.gpus):
            print(line)
            worst = max(worst, 2 * failed)
        return worst
    return _estimate_one(args, words)


def _estimate_one(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.flags import read
    from megatron_2bw.planner.inputs import sized
    from megatron_2bw.planner.report import choice_json, estimate_lines
    from megatron_2bw.planner.search import price

    cluster = described_cluster(args)
    options, kind, gpus = _described(args, words, cluster)
    configuration = read(options, gpus=gpus, kind=kind, gpu=cluster.gpu)
    cluster = sized(cluster, gpus=configuration.layout.gpus)
    choice = price(configuration.model, configuration.layout, cluster)
    if args.json:
        print(json.dumps({**choice_json(configuration.model, choice), "notes": configuration.notes}, indent=2))
    else:
        print("\n".join(estimate_lines(configuration.model, cluster, choice, configuration.notes)))
    return 0


def _described(args: argparse.Namespace, words: Sequence[str], cluster: Cluster) -> tuple[Any, Any, int]:
    """Flags, kind of model and number of GPUs, from the command line behind those of the script."""
    from megatron_2bw.planner.inputs import sized
    from megatron_2bw.planner.model import Kind
    from megatron_2bw.planner.options import Options

    kind, gpus = Kind(args.model_kind or "gpt"), None
    if args.from_script is None:
        options = Options.parse(words)
    else:
        from megatron_2bw.planner.bash.expand import is_known, shown
        from megatron_2bw.planner.launch import read_script

        launch = read_script(args.from_script, environment=os.environ, arguments=args.script_args.split())
        options = Options.parse([*launch.words, *words], explain=shown, is_known=is_known)
        kind, gpus = Kind(args.model_kind) if args.model_kind else launch.kind, launch.gpus
    options = options.without(f"--{flag.removeprefix('--')}" for flag in args.ignore.split(",") if flag)
    if args.nodes or args.gpus or gpus is None:
        gpus = sized(cluster, nodes=args.nodes, gpus=args.gpus).gpus
    return options, kind, gpus


def _profile(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.layout import Precision, Recompute
    from megatron_2bw.planner.profiling import Request, measure

    model = described_model(args, words)
    recomputes = listed("--recompute-granularity", args.recompute_granularity, Recompute)
    request = Request(
        model=model,
        ranks=args.gpus,
        tensors=listed("--tensor-model-parallel-size", args.tensor_model_parallel_size, int),
        microbatches=listed("--micro-batch-size", args.micro_batch_size, int),
        recomputes=tuple(choice for choice in Recompute if choice in (*recomputes, Recompute.NONE)),
        precision=Precision(args.precision or "fp32"),
        fused_attention=args.attention_backend in ("flash", "fused"),
    )
    measure(request, args.output)
    print(f"wrote {args.output}; megatron-2bw plan --profile {args.output} prices with it")
    return 0
