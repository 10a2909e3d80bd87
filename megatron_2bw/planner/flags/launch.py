"""Megatron's flags and the number of GPUs out of a launch script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

from megatron_2bw.planner.bash.scope import Value, is_known, may_be_words, settled, shown
from megatron_2bw.planner.bash.script import Followed, followed
from megatron_2bw.planner.bash.shells import JOB
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import SWITCHES, Configuration
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.planner.specs.model import Kind, Model

_TELLING = frozenset({"--num-layers", "--hidden-size", "--micro-batch-size", "--seq-length", "--num-attention-heads"})
"""Flags that a training command has."""
_SWITCHES = SWITCHES | {"--use-mcore-models"}
"""Flags without a value."""
_LISTS = {f"--{part}data-path" for part in ("", "train-", "valid-", "test-")}
"""Flags with any number of values."""
_OTHERS = re.compile(r"pretrain_(?:hybrid|ict|mamba|retro|t5|vision|vlm)\w*\.py")
"""Megatron's scripts of models that are neither GPT nor BERT."""
_TRAINER = re.compile(r"pretrain_(?:gpt|bert)\w*\.py")
_NO_TRAINING = re.compile(
    r"(?!(?:pre)?train|finetune)(?:\w*_)?"
    r"(?:convert|eval|evaluat(?:e|ion)|export|generat(?:e|ion)|hf2\w+|hf_to|inference|preprocess|quantize|to_hf)"
    r"(?:_\w*)?\.py"
)
"""Scripts that take the model's flags and compute no gradients."""
_CONVERTING = re.compile(r"--target-(?:tensor|pipeline|expert)(?:-model)?-parallel-size")
"""What only a change of a checkpoint's layout has."""
_TUNING = re.compile(r"--task|--retro-\w.*")
"""What only Megatron's scripts of other models' tasks have, all called main.py."""
_QUOTED = re.compile(r"\s-[a-z]*c\s+'")
"""The beginning of what a shell is to expand."""
_SLURM = {"--nodes": "SLURM_NNODES", "--ntasks-per-node": "SLURM_NTASKS_PER_NODE", "--ntasks": "SLURM_NTASKS"}
_ALIASES = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-np": "--ntasks",
    "--np": "--ntasks",
    "--num-gpus": "--nproc-per-node",
    "--num-nodes": "--nnodes",
}
"""Of srun, mpirun and deepspeed, for what srun and torchrun call so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A training command of a script."""

    words: tuple[str, ...]
    kind: Kind
    gpus: int | None
    """World size; None where the script does not tell."""
    notes: tuple[str, ...] = ()
    """On files that would set its variables and are not there."""


def read_script(file: Path, *, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> list[Launch]:
    """The different training commands of the bash script ``file``; nothing is executed.

    Args:
        file: to read.
        environment: values of variables that the script does not set.
        arguments: of the script.

    Raises:
        PlanError: it cannot be read or followed, or has no training command, or one with flags that are not known.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlanError(f"--from-script {file}: {error.strerror}; give a bash script") from error
    slurm = _slurm(text, environment)
    try:
        reading = followed(text, file=file, environment={**slurm, **environment}, arguments=arguments)
    except PlanError as error:
        raise PlanError(f"--from-script {file}: {error}") from error
    except RecursionError as error:
        raise PlanError(f"--from-script {file}: it is nested too deeply; give a simpler script") from error
    described = dict.fromkeys(tuple(words) for words in reading.commands if len(_TELLING.intersection(words)) > 1)
    training = [words for words in described if _idle(words) is None]
    if described and not training:
        other = _idle(next(iter(described)))
        raise PlanError(f"--from-script {file}: {other} trains nothing; give the script that trains the model")
    if not training:
        for words in reading.commands:
            if (hidden := _hidden_from_trainer(words)) and not _idle(words):
                raise PlanError(f"--from-script {file}: {_may_be_flags(hidden)}")
        why = "; ".join([_why_none(text, reading, environment), *_absent(reading.absent)])
        raise PlanError(f"--from-script {file}: no command with Megatron's flags, such as --num-layers{why}")
    for words in training:
        if other := _matching(_OTHERS, words) or next(filter(_TUNING.fullmatch, words), None):
            raise PlanError(
                f"--from-script {file}: {other}: the cost model covers GPT and BERT alone; give the flags of one as "
                "large"
            )
        if hidden := _hidden(words):
            raise PlanError(f"--from-script {file}: {_may_be_flags(hidden)}")
    notes = tuple(_absent({source: names for source, names in reading.absent.items() if names}))
    return [
        Launch(words=words, kind=_kind(words), gpus=_gpus(words, slurm, environment), notes=notes) for words in training
    ]


def agreed(configurations: Sequence[Configuration], *, file: Path) -> Configuration:
    """What all training commands of the script ``file`` describe, which may differ in what costs nothing.

    Raises:
        PlanError: they differ in more.
    """
    check_agreed([{**values_of(one.model), **values_of(one.layout)} for one in configurations], file=file)
    return configurations[0]


def values_of(described: Model | Layout) -> dict[str, Any]:
    """By field."""
    return {field.name: getattr(described, field.name) for field in fields(described)}


def check_agreed(found: Sequence[Mapping[str, Any]], *, file: Path) -> None:
    """Whether the training commands of the script ``file`` have the same values.

    Raises:
        PlanError: one has others.
    """
    for name in found[0]:
        values = dict.fromkeys(one[name] for one in found)
        if len(values) > 1:
            listed = " or ".join(str(getattr(value, "value", value)) for value in values)
            raise PlanError(
                f"--from-script {file}: {len(found)} different training commands, {name} {listed}; leave one, or give "
                "its flags"
            )


def _why_none(text: str, reading: Followed, environment: Mapping[str, str]) -> str:
    """Why no command has Megatron's flags, and the remedy."""
    if reading.exits:
        place, test = reading.exits[-1]
        return (
            f", before it exits at {place} ({shorten(shown(test), 80)}); give the variables or arguments "
            "(--script-args) with which it goes on"
        )
    hint = ", or export the variables that the quoted command uses" if _QUOTED.search(text) else ""
    hint += ", or write the flags with hyphens" if "--num_layers" in text else ""
    holding = [name for name in reading.values.keys() - environment.keys() if _tells(reading.values[name])]
    if hint or not holding or any(map(_tells, reading.commands)):
        return f"; give another file{hint}"
    names, hold = " and ".join(sorted(holding)[:3]), "holds" if len(holding) == 1 else "hold"
    return f" (no command uses {names}, which {hold} some); give the script that sources this file"


def _tells(value: Value) -> bool:
    """Whether a text or words have flags of a training command."""
    return any(word in _TELLING for text in ([value] if isinstance(value, str) else value) for word in text.split())


def _absent(absent: Mapping[str, set[str]]) -> Iterator[str]:
    """A note on the files to read that are not there, where there are any."""
    sources, names = list(absent), sorted(set().union(*absent.values()))
    listed = f", perhaps {', '.join(names[:3])}{' or others' * (len(names) > 3)}" if names else ""
    if len(sources) == 1:
        yield f"{sources[0]} is not there; what it sets counts as not set{listed}"
    elif sources:
        more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
        yield f"{', '.join(sources[:3])}{more} are not there; what they set counts as not set{listed}"


def _matching(names: re.Pattern[str], words: Sequence[str]) -> str | None:
    """The first file among ``words`` whose name is one of ``names``."""
    modules = {module: f"{module.rpartition('.')[2]}.py" for flag, module in pairwise(words) if flag == "-m"}
    return next(filter(names.fullmatch, (modules.get(word, Path(word).name) for word in words)), None)


def _idle(words: Sequence[str]) -> str | None:
    """The file that a command runs, or a flag of it, by which it computes no gradients."""
    return _matching(_NO_TRAINING, words) or next(filter(_CONVERTING.fullmatch, words), None)


def _kind(words: Sequence[str]) -> Kind:
    is_bert = any("bert" in Path(word).name.lower() for word in words if word.endswith(".py"))
    return Kind.BERT if is_bert else Kind.GPT


def _hidden(words: Sequence[str]) -> str | None:
    """A word that is no value of a flag and unknown, so that it may be any flags."""
    starts = (index for index, word in enumerate(words, start=1) if word in _TELLING or word.endswith(".py"))
    first = next(starts)
    flag, values = words[first - 1], int(words[first - 1] not in _TELLING)
    for word in words[first:]:
        if may_be_words(word) and (values or flag in _SWITCHES) and flag not in _LISTS:
            return word
        flag, values = (word, "=" in word) if word.startswith("--") else (flag, values + 1)
    return None


def _hidden_from_trainer(words: Sequence[str]) -> str | None:
    """The same of one of Megatron's scripts, with few flags or none beside it."""
    is_trainer = any(_TRAINER.fullmatch(Path(word).name) for word in words)
    return _hidden(words) if is_trainer else None


def _may_be_flags(hidden: str) -> str:
    return (
        f"{shorten(shown(hidden), 80)} may hold flags that only running it would tell; write them instead, or give the "
        "variables and arguments (--script-args) that decide"
    )


def _slurm(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that Slurm would set, from the ``#SBATCH`` lines."""
    words = [word for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE) for word in line.split()]
    if not words:
        return {}
    asked = _options(words)
    variables = JOB | {"SLURM_SUBMIT_DIR": environment.get("PWD", "")}
    variables |= {name: asked[flag] for flag, name in _SLURM.items() if flag in asked}
    if "SLURM_NNODES" in variables:
        variables["SLURM_JOB_NUM_NODES"] = variables["SLURM_NNODES"]
    nodes, per_node = (_count(variables.get(name)) for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE"))
    if nodes is not None and per_node is not None:
        variables.setdefault("SLURM_NTASKS", str(nodes * per_node))
    gpus = asked.get("--gpus-per-node", asked.get("--gres", "").removeprefix("gpu")).rpartition(":")[2]
    if gpus.isdecimal():
        variables |= {"SLURM_GPUS_PER_NODE": gpus, "SLURM_GPUS_ON_NODE": gpus}
    return variables


def _options(words: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Options of a launcher: ``--nodes 4``, ``--nodes=4``, ``-N 4``, ``-N4``, ``-np 4``, ``--nproc_per_node 8``."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if short := re.fullmatch(r"(-N|-np?)(\d*)", word):
            found.setdefault(_ALIASES[short[1]], short[2] or following)
        elif flag.startswith("--"):
            flag = flag.replace("_", "-")
            found.setdefault(_ALIASES.get(flag, flag), value if equals else following)
    return found


def _gpus(words: tuple[str, ...], slurm: Mapping[str, str], environment: Mapping[str, str]) -> int | None:
    """World size, from torchrun's or deepspeed's options, else from srun's or mpirun's, else from Slurm's variables."""
    launcher = _options(words)
    if "--nproc-per-node" in launcher:
        per_node, nodes = _count(launcher["--nproc-per-node"]), _count(launcher.get("--nnodes", "1"))
        return None if per_node is None or nodes is None else nodes * per_node
    variables = {**slurm, **environment}
    asked = {flag: _count(launcher.get(flag, variables.get(name))) for flag, name in _SLURM.items()}
    if asked["--ntasks"] is not None:
        return asked["--ntasks"]
    if None not in (asked["--nodes"], asked["--ntasks-per-node"]):
        return asked["--nodes"] * asked["--ntasks-per-node"]
    return _count(environment.get("WORLD_SIZE"))


def _count(text: str | None) -> int | None:
    """The number in ``text``; of torchrun's ``2:4`` the first."""
    if text is None or not is_known(text):
        return None
    number = re.match(r"\d+", settled(text) or "")
    return int(number[0]) if number else None
