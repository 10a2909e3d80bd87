"""The command ``megatron-2bw``: look at schedules, check them and plan with them, without torch.

What only one command needs is imported where that command runs, so that each starts at once.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_2bw import __version__
from megatron_2bw.planner.commands import estimate, plan, profile
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.spelling import misspelled
from megatron_2bw.schedule.commands import schedules, show, validate
from megatron_2bw.schedule.errors import ScheduleError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Its exit code: 0, 1 when nothing could be validated, 2 for bad input, 130 after Ctrl-C.
    """
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    if flags and not args.takes_flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        return args.command(args, flags) if args.takes_flags else args.command(args)
    except ScheduleError as error:
        message = error.message
    except PlanError as error:
        message = str(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The reader has seen enough.
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # As a shell counts; the user knows why.
    except OSError as error:
        message = f"cannot write {error.filename}: {error.strerror}"
    print(f"megatron-2bw: error: {message}", file=sys.stderr)
    return 2


_IN_OUR_WORDS = {
    r"argument (\S+): ": r"\1 ",
    r"invalid int value: '(.*)'": r"\1: give a whole number of at least 1",
    r"invalid float value: '(.*)'": r"\1: give a number",
    r"invalid choice: '(.*)' \(choose from (.*)\)": r"\1: choose one of \2",
    r"not allowed with argument (\S+)": r"and \1 exclude each other; leave one out",
    r"expected one argument": "has no value; give one",
    r"the following arguments are required: (.*)": r"\1 is missing; give it, --help says what it is",
}
"""What argparse says, as patterns, and what is said in its place."""


_OF_FLAGS = ("--run-args", "--script-args")


def _joined(words: Sequence[str]) -> list[str]:
    """With a value that is itself a flag as ``--run-args=--flag``: argparse would take it for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _OF_FLAGS and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the commands do."""

    words: Sequence[str] = ()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As the base class does."""
        self.words = _joined(sys.argv[1:] if args is None else args)
        for word in self.words:
            if word.startswith("--") and word.endswith("=--"):  # Argparse would take it for no value at all.
                self.error(f"argument {word[:-3]}: expected one argument")
        return super().parse_known_args(self.words, namespace)

    def error(self, message: str) -> NoReturn:
        required = re.fullmatch(r"the following arguments are required: (.*)", message)
        for theirs, ours in _IN_OUR_WORDS.items():
            message = re.sub(theirs, ours, message)
        for flag in (word.partition("=")[0] for word in self.words if required):
            if meant := misspelled(flag, required[1].split(", ")):
                message += f"; did you mean {meant} by {flag}?"
        self.exit(2, f"megatron-2bw: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron-2bw", description="Plan pipelines, look at schedules, check them.")
    parser.set_defaults(takes_flags=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (show, schedules, validate, plan, estimate, profile):
        command.add(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
