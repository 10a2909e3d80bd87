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
    from megatron_2bw.planner.specs.model import Kind, Model


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
    if args.from_script is None:
        found = [Given(Options.parse(words), Kind.GPT, None, unknown(Options.parse(words).values))]
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
                unknown(Options.parse([*behind_program(launch.words), *words]).values),
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


def planned(args: argparse.Namespace, words: Sequence[str]) -> tuple[Model, list[str], set[str]]:
    """The model of a script, whose other settings ``args`` takes over where it has none.

    Returns:
        The model; notes; and the script's flags that say how to split the model and its batches.

    Raises:
        PlanError: training commands that differ, or flags that cannot be priced.
    """
    from megatron_2bw.planner.flags.flags import DECIDED
    from megatron_2bw.planner.flags.model_flags import guessed_vocabulary, read_model
    from megatron_2bw.planner.flags.unpriced import check_priced
    from megatron_2bw.planner.specs.model import Kind

    if args.model:
        raise PlanError(f"--model {args.model} and --from-script both describe the model; give one of them")
    found, notes, decided = [], [], set()
    for options, kind, gpus, strange in given(args, words):
        kind = Kind(args.model_kind) if args.model_kind else kind
        try:
            priced = check_priced(options)
            found.append((read_model(options, kind=kind), _settings(options, gpus)))
            notes += [*options.notes, *guessed_vocabulary(options, kind), *priced]
        except PlanError as error:
            raise of_script(error, args) from error
        notes += note_of_strange(strange, notes)
        decided |= DECIDED & options.values.keys()
    (model, settings), *others = found
    if any(other != (model, settings) for other in others):
        raise PlanError(
            f"--from-script {args.from_script}: {len(found)} different training commands; leave one, or give its flags"
        )
    if args.nodes is not None or args.gpus is not None:
        del settings["gpus"]
    elif settings["gpus"] is None:
        notes.append("the script does not say how many GPUs it uses: planned for the cluster's; give --gpus")
    if args.cost_model != "default":  # It has no other settings.
        settings = {name: settings[name] for name in ("gpus", "global_batch_size") if name in settings}
    for name, value in settings.items():
        if getattr(args, name) in (None, False):
            setattr(args, name, value)
    return model, list(dict.fromkeys(notes)), decided


def _settings(options: Options, gpus: int | None) -> dict[str, Any]:
    """Of ``plan``'s arguments: what a script says and a search leaves as it is."""
    from megatron_2bw.planner.flags.accepted import BACKEND, FLEX, PRECISION_AWARE, STORED_IN
    from megatron_2bw.planner.flags.flags import fp8_of, fuses, global_batch_of
    from megatron_2bw.planner.flags.unpriced import optimizer_of
    from megatron_2bw.planner.specs.layout import Fp8

    fused, fp8 = fuses(options, None), fp8_of(options)
    is_flexible = options.text("--moe-token-dispatcher-type") == FLEX
    is_aware = PRECISION_AWARE in options
    return {
        "gpus": gpus,
        "global_batch_size": global_batch_of(options, None),
        "precision": next((name for name in ("bf16", "fp16") if f"--{name}" in options), "fp32"),
        "fp8_recipe": None if fp8 is Fp8.NONE else fp8,
        "attention_backend": None if fused is None else "flash" if fused else "unfused",
        "optimizer": optimizer_of(options.text("--optimizer", "adam")),
        "use_precision_aware_optimizer": is_aware,
        **{flag[2:].replace("-", "_"): options.text(flag) if flag in options else None for flag in STORED_IN},
        "moe_token_dispatcher_type": FLEX if is_flexible else None,
        "moe_flex_dispatcher_backend": options.text(BACKEND) if is_flexible and BACKEND in options else None,
    }
