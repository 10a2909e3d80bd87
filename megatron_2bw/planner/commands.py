"""The commands ``plan`` and ``estimate``.

What they need is imported where they run, so that the other commands start at once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.errors import PlanError

if TYPE_CHECKING:
    from megatron_2bw.planner.cluster import Cluster
    from megatron_2bw.planner.model import Model
    from megatron_2bw.planner.search import Plan
    from megatron_2bw.planner.space import Space

_PLAN = """Find the fastest layout of a model on a cluster. The model is --model, or Megatron's own flags: --num-layers,
--hidden-size, --num-attention-heads, --seq-length, --vocab-size, and whatever else of them describes it."""
_ESTIMATE = """Predict time and memory of one configuration. All other flags are Megatron's, as in a launch script."""


def add_commands(commands: Any) -> None:
    """Add both commands to the subparsers of ``megatron-2bw``; they take Megatron's flags beside their own."""
    plan = commands.add_parser("plan", help="find the fastest layout of a model", description=_PLAN, allow_abbrev=False)
    plan.set_defaults(command=_plan, takes_flags=True)
    plan.add_argument("--model", metavar="NAME|FILE", help="one that is built in, or a JSON file")
    _add_machine(plan)
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
    plan.add_argument("--explain", metavar="LAYOUT", help="why this one, such as 2bw:d8,t4 or as in the table, lost")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of throughput against memory (SVG)")
    _add_formats(plan, flags_only=True)

    estimate = commands.add_parser(
        "estimate", help="predict time and memory of a configuration", description=_ESTIMATE, allow_abbrev=False
    )
    estimate.set_defaults(command=_estimate, takes_flags=True)
    _add_machine(estimate, required=False)
    estimate.add_argument("--from-script", type=Path, metavar="FILE", help="a launch script in bash; read, never run")
    estimate.add_argument("--script-args", default="", metavar="TEXT", help="arguments of that script, in one string")
    estimate.add_argument("--ignore", default="", metavar="LIST", help="flags to leave out, such as fp8-format,seed")
    estimate.add_argument("--jsonl", type=Path, metavar="FILE", help="one configuration per line, as a JSON object")
    _add_formats(estimate)


def _add_machine(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--cluster", required=required, metavar="NAME|FILE", help="one that is built in, or a JSON file"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="in place of the cluster's")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="in place of the cluster's; less than a node is part of one"
    )
    parser.add_argument("--model-kind", choices=("gpt", "bert"), help="of a model given by flags (default: gpt)")


def _add_formats(parser: argparse.ArgumentParser, *, flags_only: bool = False) -> None:
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON")
    if flags_only:
        formats.add_argument("--flags-only", action="store_true", help="print only the best layout's flags, for $(...)")


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
    precision = limits.add_mutually_exclusive_group()
    for choice in ("fp32", "fp16", "bf16"):
        precision.add_argument(f"--{choice}", dest="precision", action="store_const", const=choice)
    limits.add_argument("--attention-backend", choices=("flash", "fused", "unfused"))
    limits.add_argument("--allow-fewer-microbatches", action="store_true", help="let 2bw run with d-1 (default: d)")


def _plan(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.inputs import load_cluster, sized
    from megatron_2bw.planner.report import flags_of, plan_json, plan_lines
    from megatron_2bw.planner.search import search

    if args.top < 1:
        raise PlanError(f"--top {args.top}: give a whole number of at least 1")
    model = _model(args, words)
    cluster = sized(load_cluster(args.cluster), nodes=args.nodes, gpus=args.gpus)
    if args.cost_model != "default":
        return _plan_of_paper(args, model, cluster)
    space = _space(args)
    keep = max(args.top, 200 if args.plot else 20)
    plan = search(model, cluster, args.global_batch_size, space, efficiency=args.sample_efficiency, keep=keep)
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

    for option in ("explain", "plot", *(dimension for dimension, _ in _LIMITS.values())):
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


def _model(args: argparse.Namespace, words: Sequence[str]) -> Model:
    from megatron_2bw.planner.flags import MODEL_FLAGS, read_model
    from megatron_2bw.planner.inputs import load_model
    from megatron_2bw.planner.model import Kind
    from megatron_2bw.planner.options import Options

    options = Options.parse(words)
    loose = [word for word in words[:1] if not word.startswith("--")]
    strange = [*loose, *(flag for flag in options.values if flag not in MODEL_FLAGS)]
    if strange:
        raise PlanError(f"{strange[0]} is neither an option of plan nor a flag that describes a model; leave it out")
    if args.model is None:
        return read_model(options, kind=Kind(args.model_kind or "gpt"))
    if options.values:
        raise PlanError(
            f"--model {args.model} and {next(iter(options.values))} both describe the model; give one of them"
        )
    return load_model(args.model)


def _space(args: argparse.Namespace) -> Space:
    from megatron_2bw.planner import layout
    from megatron_2bw.planner.space import Space

    limits: dict[str, Any] = {}
    for flag, (dimension, kind) in _LIMITS.items():
        text = getattr(args, dimension)
        if text is not None:
            read = getattr(layout, kind) if isinstance(kind, str) else kind
            limits[dimension] = tuple(_limit(flag, word, read) for word in text.split(","))
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


def _limit(flag: str, word: str, read: Callable[[str], Any]) -> Any:
    try:
        value = read(word)
    except ValueError as error:
        choices = ", ".join(read) if hasattr(read, "__members__") else "whole numbers"
        raise PlanError(f"{flag} {word!r}: give {choices}, separated by commas") from error
    if isinstance(value, int) and value < (0 if "extra" in flag else 1):
        raise PlanError(f"{flag} {word}: give whole numbers of at least 1, separated by commas")
    return value


def _explained(plan: Plan, space: Space, text: str) -> list[str]:
    from megatron_2bw.planner.explain import explain

    return list(explain(plan, space, text))


def _estimate(args: argparse.Namespace, words: Sequence[str]) -> int:
    if args.jsonl:
        from megatron_2bw.planner.rows import predicted_rows

        if words or args.from_script:
            given = words[0] if words else "--from-script"
            raise PlanError(f"--jsonl and {given}: the rows hold all flags; leave one out")
        worst = 0
        for line, failed in predicted_rows(args.jsonl, args.cluster, nodes=args.nodes, gpus=args.gpus):
            print(line)
            worst = max(worst, 2 * failed)
        return worst
    return _estimate_one(args, words)


def _estimate_one(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.flags import read
    from megatron_2bw.planner.inputs import load_cluster, sized
    from megatron_2bw.planner.report import choice_json, estimate_lines
    from megatron_2bw.planner.search import price

    if args.cluster is None:
        raise PlanError("--cluster is missing: time and memory depend on it; give a name or a JSON file")
    cluster = load_cluster(args.cluster)
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
