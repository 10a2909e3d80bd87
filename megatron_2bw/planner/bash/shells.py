"""Shells that a command starts, and what they are to run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
_WITH_VALUE = {"--rcfile", "--init-file"}
JOB = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1"}
"""By which a script knows that Slurm runs it; which job it is matters to no price."""
_SET = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class Call(NamedTuple):
    """A shell with its options read."""

    launcher: list[str]
    """Words before the shell, such as those of srun."""
    reads: str
    """What it runs: ``c``, its first operand; ``s``, the standard input; ``f``, the file that its first operand names,
    or the standard input where it has none."""
    operands: list[str]

    @property
    def name(self) -> str:
        """``$0``"""
        return "".join(self.operands[{"c": slice(1, 2), "s": slice(0), "f": slice(1)}[self.reads]]) or "bash"

    @property
    def arguments(self) -> list[str]:
        """``$1``, ``$2``, ..."""
        return self.operands[{"c": 2, "s": 0, "f": 1}[self.reads] :]


def started(words: Sequence[str]) -> Call | None:
    """The shell that ``words`` start, behind whatever launches it; None if there is none.

    >>> started("srun -N 2 bash -ex -o pipefail -c text name a".split())
    Call(launcher=['srun', '-N', '2'], reads='c', operands=['text', 'name', 'a'])
    >>> started("sbatch -N 2 --wrap=text".split())
    Call(launcher=['sbatch', '-N', '2'], reads='c', operands=['text'])
    """
    if Path(words[0]).name == "sbatch":
        return _submitted(words)
    found = None
    for index, word in enumerate(words):
        if Path(word).name in _SHELLS and "=" not in word:
            call = Call(list(words[:index]), *_options(words[index + 1 :]))
            if call.reads == "c":
                return call
            found = found or call
    return found


def sent(launcher: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Of ``variables`` those that ``launcher`` hands on, and those that it sets: ``env``, and ``--export`` of Slurm.

    >>> sent("srun --export=ALL,A=1 env B=2".split(), {"C": "3"})
    {'C': '3', 'A': '1', 'B': '2'}
    >>> sent("srun --export NONE".split(), {"C": "3", "SLURM_NNODES": "4"})
    {'SLURM_NNODES': '4'}
    """
    found = {**variables, **(JOB if launcher and Path(launcher[0]).name == "sbatch" else {})}
    exported = [
        part
        for word, following in zip(launcher, [*launcher[1:], ""], strict=False)
        if (flag := word.partition("="))[0] == "--export"
        for part in (flag[2] if flag[1] else following).split(",")
    ]
    if exported and "ALL" not in exported:
        found = {name: value for name, value in found.items() if name in exported or name.startswith("SLURM_")}
    more = launcher[launcher.index("env") :] if "env" in launcher else []
    return found | {one[1]: one[2] for word in (*exported, *more) if (one := _SET.fullmatch(word))}


def _options(words: Sequence[str]) -> tuple[str, list[str]]:
    """What a shell with these words runs, and its operands."""
    reads, at = "f", 0
    while at < len(words) and words[at][:1] in ("-", "+") and len(words[at]) > 1:
        word = words[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            at += word in _WITH_VALUE
            continue
        at += word[1:].count("o") + word[1:].count("O")  # Each takes the name of an option.
        reads = next((letter for letter in "cs" if letter in word[1:]), reads)
    return reads, list(words[at:])


def _submitted(words: Sequence[str]) -> Call:
    """What sbatch submits: ``--wrap``, or a script, its last word where it has no arguments."""
    for index, word in enumerate(words):
        if word.startswith("--wrap="):
            return Call([*words[:index], *words[index + 1 :]], "c", [word.removeprefix("--wrap=")])
        if word == "--wrap":
            return Call([*words[:index], *words[index + 2 :]], "c", list(words[index + 1 : index + 2]))
    is_script = len(words) > 1 and not words[-1].startswith("-") and words[-1].endswith((".sh", ".sbatch", ".slurm"))
    return Call(list(words[:-1]), "f", [words[-1]]) if is_script else Call(list(words), "s", [])
