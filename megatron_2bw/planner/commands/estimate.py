"""``megatron-2bw estimate``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.commands.arguments import (
    add_cluster,
    add_formats,
    add_model,
    check_size,
    described_cluster,
    named_model,
)
from megatron_2bw.planner.commands.launched import (
    IN_FP32,
    add_script,
    given,
    ignored,
    note_of_strange,
    of_script,
    reading_on,
)
from megatron_2bw.planner.errors import PlanError

if TYPE_CHECKING:
    from megatron_2bw.planner.flags.flags import Configuration
    from megatron_2bw.planner.specs.cluster import Cluster

_ESTIMATE = """Predict time and memory of one configuration. All other flags are Megatron's, as in a launch script."""


def add(commands: Any) -> None:
    """Add the command."""
    estimate = commands.add_parser(
        "estimate", help="predict time and memory of a configuration", description=_ESTIMATE, allow_abbrev=False
    )
    estimate.set_defaults(command=_estimate, takes_flags=True)
    add_model(estimate)
    add_cluster(estimate)
    add_script(estimate)
    rows = "one configuration per line: a JSON object with fields of Model and Layout, or with Megatron's arguments"
    estimate.add_argument("--jsonl", type=Path, metavar="FILE", help=rows)
    add_formats(estimate)


def _estimate(args: argparse.Namespace, words: Sequence[str]) -> int:
    return _estimate_rows(args, words) if args.jsonl else _estimate_one(args, words)


def _estimate_rows(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.rows.rows import predicted_rows

    named = {"--from-script": args.from_script, "--model": args.model, "--model-kind": args.model_kind}
    named |= {"--script-args": args.script_args, "--json": args.json}
    given = [*words[:1], *(flag for flag, value in named.items() if value)]
    if given:
        raise PlanError(f"--jsonl and {given[0]}: the rows hold all that it says; leave one out")
    if args.profile is not None:
        raise PlanError(
            "--jsonl and --profile: a profile is of one model, which --model or the model's flags name; leave one out"
        )
    worst = 0
    defaults = {"cluster": args.cluster, "nodes": args.nodes, "gpus": args.gpus}
    for line, failed in predicted_rows(args.jsonl, defaults, ignored=ignored(args)):
        print(line)
        worst = max(worst, 2 * failed)
    return worst


def _estimate_one(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_2bw.planner.report.report import choice_json, estimate_lines, flags_of
    from megatron_2bw.planner.search.finder import price
    from megatron_2bw.planner.specs.inputs import sized

    cluster = described_cluster(args)
    configuration, notes = _configured(args, words, cluster)
    check_size(args, cluster, configuration.layout.gpus)
    cluster = sized(cluster, gpus=configuration.layout.gpus)
    choice = price(configuration.model, configuration.layout, cluster)
    flags = flags_of(configuration.model, configuration.layout)
    if args.json:
        print(json.dumps({**choice_json(configuration.model, choice, flags), "notes": notes}, indent=2))
    else:
        print("\n".join(estimate_lines(configuration.model, cluster, choice, notes)))
    return 0


def _configured(
    args: argparse.Namespace, words: Sequence[str], cluster: Cluster
) -> tuple[Configuration, tuple[str, ...]]:
    """What the flags of the script, those of the command line behind them, describe; and notes."""
    from megatron_2bw.planner.cost.costs import unpriced_receives
    from megatron_2bw.planner.flags.flags import SPELLED, read
    from megatron_2bw.planner.flags.launch import agreed
    from megatron_2bw.planner.flags.model_flags import model_flags
    from megatron_2bw.planner.flags.names import unknown
    from megatron_2bw.planner.flags.options import Options
    from megatron_2bw.planner.specs.inputs import sized
    from megatron_2bw.planner.specs.layout import Precision
    from megatron_2bw.planner.specs.model import Kind

    if args.model and args.from_script:
        raise PlanError(f"--model {args.model} and --from-script both describe the model; give one of them")

    is_sized = args.nodes is not None or args.gpus is not None
    asked = sized(cluster, nodes=args.nodes, gpus=args.gpus).gpus
    model = named_model(args, Options.parse(words))
    found, notes = [], []
    # What is noted of a model is found in its flags.
    for options, kind, gpus, strange in given(args, [*model_flags(model), *words] if model else words):
        if gpus is None and args.from_script is not None and not is_sized:
            notes.append(f"the script does not say how many GPUs it uses: priced on the cluster's {asked}; give --gpus")
        gpus = asked if is_sized or gpus is None else gpus
        kind = Kind(args.model_kind) if args.model_kind else kind
        try:
            found.append(read(options, gpus=gpus, kind=kind, **reading_on(cluster, model)))
        except PlanError as error:
            raise of_script(error, args) from error
        notes += [*options.notes, *found[-1].notes]
        notes += note_of_strange(strange, notes)
        notes += unpriced_receives(found[-1].layout)
        if found[-1].layout.precision is Precision.FP32 and cluster.profile is None:
            notes.append(IN_FP32)
    unread = Options.parse(words).values.keys() - SPELLED - ignored(args)
    if unread := sorted(unread.difference(unknown(unread))):
        notes.append(f"{', '.join(unread)}: no price depends on it")
    return agreed(found, file=args.from_script), tuple(dict.fromkeys(notes))
