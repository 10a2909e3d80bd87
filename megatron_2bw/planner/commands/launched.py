"""What a launch script says, with the flags of the command line behind its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_2bw.planner.commands.arguments import shell_words
from megatron_2bw.planner.errors import PlanError

if TYPE_CHECKING:
    from megatron_2bw.planner.flags.options import Options
    from megatron_2bw.planner.specs.cluster import Cluster
    from megatron_2bw.planner.specs.model import Kind, Model

IN_FP32 = "no --bf16 or --fp16: priced in fp32, in which Megatron trains without them"


class Given(NamedTuple):
    """A training command."""

    options: Options
    kind: Kind
    gpus: int | None
    """World size; None where it does not tell."""
    strange: list[str]
    """Flags that neither Megatron has nor we."""


def add_script(parser: argparse.ArgumentParser) -> None:
    """A launch script, and how to read it."""
    parser.add_argument("--from-script", type=Path, metavar="FILE", help="a launch script in bash; read, never run")
    parser.add_argument(
        "--script-args", type=shell_words, default=[], metavar="TEXT", help="arguments of that script, in one string"
    )
    parser.add_argument("--ignore", default="", metavar="LIST", help="flags to leave out, such as fp8-format,seed")


def ignored(args: argparse.Namespace) -> set[str]:
    """Flags to leave out."""
    return {f"--{flag.removeprefix('--')}" for flag in args.ignore.split(",") if flag}


def given(args: argparse.Namespace, words: Sequence[str]) -> list[Given]:
    """The training commands of the script with ``words`` behind them, or what ``words`` alone say.

    Raises:
        PlanError: words that are no flags, a script that cannot be followed, or nothing to leave out.
    """
    from megatron_2bw.planner.flags.names import behind_program, unknown
    from megatron_2bw.planner.flags.options import Options
    from megatron_2bw.planner.specs.model import Kind

    if words and not words[0].startswith("--"):
        is_script = args.from_script is None and Path(words[0]).is_file()
        remedy = f"give --from-script {words[0]}, if its flags are meant" if is_script else "leave it out"
        raise PlanError(f"{words[0]} is no option of this command, and no flag of Megatron's; {remedy}")
    left_out = ignored(args)
    if args.from_script is None and args.script_args:
        raise PlanError("--script-args are arguments of --from-script FILE; give that, too, or leave them out")
    if args.from_script is None:
        options = Options.parse(words)
        found = [Given(options, Kind.GPT, None, unknown(options.values))]
    else:
        from megatron_2bw.planner.bash.scope import is_known, shown
        from megatron_2bw.planner.flags.launch import read_script

        launches = read_script(args.from_script, environment=os.environ, arguments=args.script_args)
        how = {"explain": shown, "is_known": is_known}
        found = [
            Given(
                Options.parse([*launch.words, *words], notes=launch.notes, **how),
                launch.kind,
                launch.gpus,
                [*map(shown, unknown(Options.parse([*behind_program(launch.words), *words]).values))],
            )
            for launch in launches
        ]
    if missing := sorted(left_out.difference(*(one.options.values for one in found))):
        raise PlanError(f"--ignore {missing[0]}: it is not given; leave it out")
    return [
        one._replace(
            options=one.options.without(left_out), strange=[flag for flag in one.strange if flag not in left_out]
        )
        for one in found
    ]


def reading_on(cluster: Cluster, model: Model | None) -> dict[str, Any]:
    """How `flags.flags.read` reads flags for ``cluster``; ``model`` in place of the one that they describe."""
    fused = None if cluster.profile is None else cluster.profile.setting.fused_attention
    return {"node": cluster.gpus_per_node, "gpu": cluster.gpu, "fused": fused, "model": model}


def of_script(error: PlanError, args: argparse.Namespace) -> PlanError:
    """``error`` in flags, and how to say otherwise than a script that nobody wants to change."""
    from megatron_2bw.planner.flags.flags import in_flags

    text = in_flags(str(error))
    if args.from_script is not None and "--ignore" not in text and "behind" not in text:
        text += " (a flag behind --from-script FILE wins over the script's; --ignore leaves one out)"
    return PlanError(text)


def note_of_strange(flags: Sequence[str], notes: Sequence[str]) -> list[str]:
    """A note of ``flags`` that are not Megatron's, where ``notes`` do not speak of them."""
    silent = [flag for flag in flags if not any(note.startswith(f"{flag}:") for note in notes)]
    return [f"{', '.join(silent)}: not among Megatron's flags, so not priced"] if silent else []
