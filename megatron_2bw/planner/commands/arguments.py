"""Arguments that several commands of the planner share, and what they describe."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_2bw.planner.errors import PlanError

if TYPE_CHECKING:
    from megatron_2bw.planner.flags.options import Options
    from megatron_2bw.planner.specs.cluster import Cluster
    from megatron_2bw.planner.specs.model import Model


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model by name; it may also be given by Megatron's own flags."""
    parser.add_argument("--model", metavar="NAME|FILE", help="one that is built in, or a JSON file")
    # Megatron has a script per kind and no flag.
    parser.add_argument("--model-kind", choices=("gpt", "bert"), help="of a model given by flags (default: gpt)")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """The machine: what it is, or what was measured on it."""
    parser.add_argument("--cluster", metavar="NAME|FILE", help="one that is built in, or a JSON file")
    parser.add_argument("--nodes", type=int, metavar="N", help="in place of the cluster's")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="in place of the cluster's; less than a node is part of one"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="price with what megatron-2bw profile measured; without --cluster, on the node where it did",
    )


def add_kernels(parser: Any, default: str) -> None:
    """What decides which kernels run; ``default`` says what does without these."""
    precision = parser.add_mutually_exclusive_group()
    for choice in ("fp32", "fp16", "bf16"):
        text = f"of forward and backward (default: {default})"
        precision.add_argument(f"--{choice}", dest="precision", action="store_const", const=choice, help=text)
    parser.add_argument("--attention-backend", choices=("flash", "fused", "unfused"), help=f"(default: {default})")


def add_run_args(parser: argparse.ArgumentParser) -> None:
    """What runs on this machine may need more than the planner prints."""
    parser.add_argument(
        "--run-args",
        type=shell_words,
        default=[],
        metavar="TEXT",
        help="more flags of Megatron for what runs here, in one string, such as '--no-gradient-accumulation-fusion'",
    )


def shell_words(text: str) -> list[str]:
    """What a shell makes of ``text``; the type of ``--run-args`` and the like.

    Raises:
        ArgumentTypeError: a shell would ask for more.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).lower()}; write it as for a shell") from error


def add_formats(parser: argparse.ArgumentParser, *, flags_only: bool = False) -> None:
    """How to print."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON")
    if flags_only:
        formats.add_argument("--flags-only", action="store_true", help="print only the best layout's flags, for $(...)")


def described_model(args: argparse.Namespace, words: Sequence[str]) -> Model:
    """By ``--model``, or by Megatron's own flags among ``words``.

    Raises:
        PlanError: by both, or there are other words.
    """
    from megatron_2bw.planner.flags.flags import in_flags
    from megatron_2bw.planner.flags.model_flags import read_model
    from megatron_2bw.planner.flags.options import Options
    from megatron_2bw.planner.specs.model import Kind

    check_words(words)
    options = Options.parse(words)
    if (model := named_model(args, options)) is not None:
        return model
    try:
        return read_model(options, kind=Kind(args.model_kind or "gpt"))
    except PlanError as error:
        raise PlanError(in_flags(str(error))) from error


def check_words(words: Sequence[str]) -> None:
    """Whether ``words`` that are no options of a command are Megatron's flags of a model.

    Raises:
        PlanError: some are not.
    """
    from megatron_2bw.planner.flags.model_flags import MODEL_FLAGS, MODEL_SWITCHES, SEVERAL
    from megatron_2bw.planner.flags.options import Options

    options = Options.parse(words)
    loose = [word for word in words[:1] if not word.startswith("--")]
    ours = ((flag, words) for flag, words in options.values.items() if flag not in SEVERAL)
    loose += [word for flag, words in ours for word in words[flag not in MODEL_SWITCHES :]]
    strange = [*(flag for flag in options.values if flag not in MODEL_FLAGS), *loose]
    if strange:
        raise PlanError(
            f"{strange[0]} is neither an option of this command nor a flag that describes a model; leave it out"
        )


def named_model(args: argparse.Namespace, options: Options) -> Model | None:
    """That of ``--model``; None without one.

    Raises:
        PlanError: ``options`` describe a model as well.
    """
    from megatron_2bw.planner.flags.model_flags import MODEL_FLAGS
    from megatron_2bw.planner.specs.inputs import load_model

    if args.model is None:
        return None
    described = [flag for flag in options.values if flag in MODEL_FLAGS]
    described += ["--model-kind"] if args.model_kind else []
    if described:
        raise PlanError(f"--model {args.model} and {described[0]} both describe the model; give one of them")
    return load_model(args.model)


def described_cluster(args: argparse.Namespace) -> Cluster:
    """As named or measured, before its size is changed.

    Raises:
        PlanError: neither is given.
    """
    from megatron_2bw.planner.specs.inputs import load_cluster

    if args.profile is None and args.cluster is None:
        raise PlanError("--cluster is missing: time and memory depend on it; give a name, a JSON file or --profile")
    if args.profile is None:
        return load_cluster(args.cluster)
    from megatron_2bw.planner.measure.profile import Profile

    profile = Profile.load(args.profile)
    return profile.cluster() if args.cluster is None else profile.on(load_cluster(args.cluster))


def check_size(args: argparse.Namespace, cluster: Cluster, gpus: int) -> None:
    """Refuse another number of GPUs than a profile was measured on, where nothing is known of their network.

    Raises:
        PlanError: that is so.
    """
    if args.profile is not None and args.cluster is None and gpus != cluster.gpus:
        raise PlanError(
            f"gpus {gpus}: the profile was measured with {cluster.gpus} busy at once; profile again with --gpus "
            f"{gpus}, or say with --cluster what connects them"
        )


_MAY_BE_0 = (
    "--pipeline-extra-in-flight",
    "--mixpipe-gamma",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
"""Of a stage's layers: as many as the others have."""


def listed(flag: str, text: str, read: Callable[[str], Any]) -> tuple[Any, ...]:
    """The values in ``text``, separated by commas.

    Raises:
        PlanError: one of them is not valid.
    """
    return tuple(_value(flag, word, read) for word in text.split(","))


def _value(flag: str, word: str, read: Callable[[str], Any]) -> Any:
    value = None
    with contextlib.suppress(ValueError):
        value = read(word)
    if value is None:
        choices = ", ".join(read) if hasattr(read, "__members__") else "whole numbers"
        raise PlanError(f"{flag} {word!r}: give {choices}, separated by commas")
    least = 0 if flag in _MAY_BE_0 else 1
    if isinstance(value, int) and value < least:
        raise PlanError(f"{flag} {word}: give whole numbers of at least {least}, separated by commas")
    return value
