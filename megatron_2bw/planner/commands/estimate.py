"""``megatron-2bw estimate``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.commands.arguments import (
    add_cluster,
    add_formats,
    add_model_kind,
    check_size,
    described_cluster,
)
from megatron_2bw.planner.errors import PlanError

if TYPE_CHECKING:
    from megatron_2bw.planner.cluster import Cluster

_ESTIMATE = """Predict time and memory of one configuration. All other flags are Megatron's, as in a launch script."""


def add(commands: Any) -> None:
    """Add the command."""
    estimate = commands.add_parser(
        "estimate", help="predict time and memory of a configuration", description=_ESTIMATE, allow_abbrev=False
    )
    estimate.set_defaults(command=_estimate, takes_flags=True)
    add_model_kind(estimate)
    add_cluster(estimate)
    estimate.add_argument("--from-script", type=Path, metavar="FILE", help="a launch script in bash; read, never run")
    estimate.add_argument("--script-args", default="", metavar="TEXT", help="arguments of that script, in one string")
    estimate.add_argument("--ignore", default="", metavar="LIST", help="flags to leave out, such as fp8-format,seed")
    rows = "one configuration per line: a JSON object with fields of Model and Layout, or with Megatron's arguments"
    estimate.add_argument("--jsonl", type=Path, metavar="FILE", help=rows)
    add_formats(estimate)


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
    options, kind, gpus, notes = _described(args, words, cluster)
    fused = None if cluster.profile is None else cluster.profile.setting.fused_attention
    configuration = read(options, gpus=gpus, kind=kind, gpu=cluster.gpu, fused=fused)
    check_size(args, cluster, configuration.layout.gpus)
    cluster = sized(cluster, gpus=configuration.layout.gpus)
    choice = price(configuration.model, configuration.layout, cluster)
    notes += configuration.notes
    if args.json:
        print(json.dumps({**choice_json(configuration.model, choice), "notes": notes}, indent=2))
    else:
        print("\n".join(estimate_lines(configuration.model, cluster, choice, notes)))
    return 0


def _described(
    args: argparse.Namespace, words: Sequence[str], cluster: Cluster
) -> tuple[Any, Any, int, tuple[str, ...]]:
    """Flags, kind of model, number of GPUs and notes, from the command line behind those of the script."""
    from megatron_2bw.planner.inputs import sized
    from megatron_2bw.planner.model import Kind
    from megatron_2bw.planner.options import Options

    kind, gpus, notes = Kind(args.model_kind or "gpt"), None, ()
    if args.from_script is None:
        options = Options.parse(words)
    else:
        from megatron_2bw.planner.bash.expand import is_known, shown
        from megatron_2bw.planner.launch import read_script

        launch = read_script(args.from_script, environment=os.environ, arguments=args.script_args.split())
        options = Options.parse([*launch.words, *words], explain=shown, is_known=is_known)
        kind, gpus = Kind(args.model_kind) if args.model_kind else launch.kind, launch.gpus
    options = options.without(f"--{flag.removeprefix('--')}" for flag in args.ignore.split(",") if flag)
    is_sized = args.nodes is not None or args.gpus is not None
    if args.from_script is not None and gpus is None and not is_sized:
        notes = (f"the script does not say how many GPUs it uses: priced on the cluster's {cluster.gpus}; give --gpus",)
    if is_sized or gpus is None:
        gpus = sized(cluster, nodes=args.nodes, gpus=args.gpus).gpus
    return options, kind, gpus, notes
