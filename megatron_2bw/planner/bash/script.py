"""Follow a script up to the commands it would run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from megatron_2bw.planner.bash.assignments import DECLARE, Hidden, assign, assigns, declare, hide, name_of
from megatron_2bw.planner.bash.braces import braces
from megatron_2bw.planner.bash.builtins import BUILTINS
from megatron_2bw.planner.bash.conditions import holds
from megatron_2bw.planner.bash.expand import document_of, fields, text_of
from megatron_2bw.planner.bash.flow import Flow, Left, Status
from megatron_2bw.planner.bash.folders import moved
from megatron_2bw.planner.bash.scope import Scope, Value, is_gone, is_known, settled, shown, unknown
from megatron_2bw.planner.bash.shells import Call, sent, started
from megatron_2bw.planner.bash.syntax import AndOr, Simple, parse
from megatron_2bw.planner.bash.tokens import Token
from megatron_2bw.planner.errors import PlanError

_SUCCEEDING = {"echo", ":", "true", "trap", "ulimit", "mkdir", "shopt"}
"""Taken to; what other commands do is not known."""
_OF_PROGRAMS = {"activate", ".bashrc", "conda.sh", "modules.sh", "set_env.sh"}
"""Files that only let the shell find programs; no flags come from them."""
_LEAVING = {"exit", "return", "break", "continue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What following a script tells."""

    commands: list[list[str]]
    """That it would run, each as its words, in order; those of other ways behind them."""
    absent: dict[str, set[str]]
    """``source`` of files that are not there, with its line, and the variables behind it that nothing sets."""
    exits: list[tuple[str, str]]
    """Lines where it exits for a test, and that."""
    values: dict[str, Value]
    """Variables at the end."""


def followed(text: str, *, file: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> Followed:
    """What the script ``text`` would do.

    Assignments, arrays, arithmetic, ``if``, ``case``, loops, functions, ``source``, ``eval`` and shells are followed;
    a command of ``srun bash -c '...'`` begins with the words of srun. The output of commands, whether they succeed and
    which files there are is unknown: of what depends on it, both ways are followed. At the first six places where they
    set variables differently, so is all that comes behind, once for each; beyond, and in loops, these are unknown.

    Raises:
        PlanError: the script is malformed, or too deep or long to follow.

    >>> script = '''TP=4
    ... ARGS=(--tensor-model-parallel-size $TP)  # a comment
    ... [ $TP -gt 1 ] && ARGS+=(--sequence-parallel)
    ... torchrun train.py "${ARGS[@]}"'''
    >>> followed(script, file=Path("run.sh"), environment={}).commands
    [['torchrun', 'train.py', '--tensor-model-parallel-size', '4', '--sequence-parallel']]
    """
    found = Followed(commands=[], absent={}, exits=[], values={})
    body, paths, steps = parse(text), [()], 0
    while paths:
        variables = {**environment, "PWD": str(Path.cwd())}
        scope = Scope(values=variables, exported=set(variables), positional=[*arguments], script=str(file))
        scope.absent = found.absent
        reading = _Reading(scope=scope, folder=file.parent, began=variables["PWD"], path=paths.pop(), steps=steps)
        try:
            reading.follow(body)
        except Left as left:
            found.exits.extend([left.where] if left.where else [])
        found.values.update(reading.scope.values)
        found.commands.extend(words for words in reading.commands if not reading.path or words not in found.commands)
        paths += reading.others()
        steps = reading.steps
    return found


@dataclass(slots=True, kw_only=True)
class _Reading(Flow):
    """What simple commands do."""

    folder: Path
    """That of the script."""
    began: str
    """The folder in which it is called."""
    commands: list[list[str]] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    """Words that started this shell."""
    written: dict[str, str] = field(default_factory=dict)
    """Files that the script writes."""
    hidden: list[Hidden] = field(default_factory=list)
    """Per function under way, what its local variables hide."""

    def simple(self, command: Simple) -> Status:
        given = list(takewhile(assigns, command.words))
        words, assigning = [], []
        for token in command.words[len(given) :]:
            if words and words[0] in DECLARE and assigns(token):
                assigning += [replace(token, text=text) for text in braces(token.text)]
            else:
                words += fields(token.text, self.scope)
        if not words:
            assign(self.scope, given)
            return None if any("$(" in token.text or "`" in token.text for token in given) else True
        if words[0] in DECLARE:
            declare(self.scope, words, assigning, hidden=self.hidden)
            return True
        is_own = words[0] in BUILTINS or words[0] in self.scope.functions  # Else what they set ends with the program.
        files = self.files(command.redirections, self.scope if is_own else self.scope.copy())
        with self.given(given):
            return self.execute(words, files)

    @contextmanager
    def given(self, parts: list[Token]) -> Iterator[None]:
        """With the variables that are set for one command."""
        hidden: Hidden = {}
        for name in map(name_of, parts):
            hide(self.scope, hidden, name)
        assign(self.scope, parts)
        self.scope.exported |= hidden.keys()
        try:
            yield
        finally:
            self.scope.restore(hidden)

    def files(self, redirections: list[tuple[Token, Token]], scope: Scope) -> dict[str, str]:
        """The standard input ``<``, where it is known, and the file that the output goes to, by operator."""
        found = {}
        for operator, target in redirections:
            if document := target.document:
                found["<"] = document.text if document.is_quoted else document_of(document.text, scope)
            elif operator.text == "<<<":
                found["<"] = text_of(target.text, scope) + "\n"
            elif operator.text == "<":
                name = shown(text_of(target.text, scope))
                found |= {"<": self.written[name]} if name in self.written else {}
            elif operator.text in (">", ">>", ">|"):
                found[operator.text.rstrip("|")] = shown(text_of(target.text, scope))
        return found

    def execute(self, words: list[str], files: Mapping[str, str]) -> Status:
        name, *arguments = [word for word in words if not is_gone(word)] or [""]
        if name in self.scope.functions:
            return self.call(self.scope.functions[name], arguments)
        if name in ("[", "test"):
            return holds(arguments[:-1] if name == "[" else arguments)
        if name in _LEAVING:
            if name == "exit" or (self.hidden if name == "return" else self.loops):
                raise self.left(name, *arguments[:1])
            return None  # bash goes on, with a message.
        if name == "exec" and arguments:
            raise Left("exit", status=self.execute(arguments, files))
        if name == "cd":
            return self.enter(arguments[-1] if arguments else "-")
        if name == "eval":
            text = " ".join(words[words.index(name) + 1 :])  # With what is gone, for messages.
            return self.follow(parse(text, where=None))
        if name in ("source", "."):
            return self.source(arguments or words[1:])
        if name in BUILTINS:
            return BUILTINS[name](self.scope, arguments, files.get("<"))
        if name == "cat" and not arguments and "<" in files:
            self.write(files)
        if name in _SUCCEEDING or name == "false":
            return name != "false"
        return self.program(words, files.get("<"))

    def enter(self, folder: str) -> Status:
        inside = moved(self.scope.here(), folder) if is_known(folder) else None
        self.scope.values["PWD"] = unknown("$PWD") if inside is None else inside
        return True

    def left(self, word: str, argument: str | None = None) -> Left:
        number = settled(argument or "")
        if word in ("break", "continue"):
            if argument and not (number or "").isdecimal():
                raise PlanError(f"{word} {shown(argument)}: only running the script would tell which loop; write it")
            return Left(word, levels=min(int(number or 1), self.loops))
        where = (self.place, self.test) if word == "exit" and self.test else None
        status = self.scope.status if argument is None else number and not number.strip("0")
        return Left(word, status=status, where=where)

    def program(self, words: list[str], given: str | None) -> Status:
        """Keep a command, or follow the shell that it starts."""
        kept = [word for word in words if not is_gone(word)]
        call = started(kept) if kept else None
        text = None if call is None else self.text_of(call, given)
        if text is None:
            self.commands.append([*self.launcher, *words])
            return None
        values = sent(call.launcher, self.scope.sent())
        scope = Scope(
            values=dict(values),
            exported={*values, *self.scope.exported},
            positional=call.arguments,
            script=call.name,
            functions={name: body for name, body in self.scope.functions.items() if name in self.scope.exported},
            absent=self.scope.absent,
        )
        where = f"{call.operands[0]}, line " if call.reads == "f" and call.operands else None
        before = self.launcher, self.hidden
        self.launcher, self.hidden = [*self.launcher, *call.launcher], []
        try:
            return self.apart(lambda: self.shell(scope, text, where))
        finally:
            self.launcher, self.hidden = before

    def shell(self, scope: Scope, text: str, where: str | None) -> Status:
        self.scope = scope
        return self.follow(parse(text, where=where))

    def write(self, files: Mapping[str, str]) -> None:
        """Keep what goes to a file."""
        for operator in files.keys() & {">", ">>"}:
            name = files[operator]
            self.written[name] = (self.written.get(name, "") if operator == ">>" else "") + files["<"]

    def text_of(self, call: Call, given: str | None) -> str | None:
        """What a shell is to run, with ``given`` as its standard input; None where it is not known."""
        if call.reads == "s" or not call.operands:
            return given
        return call.operands[0] if call.reads == "c" else self.file(call.operands[0])

    def file(self, name: str) -> str | None:
        """Text of a file that the script writes, or that is there."""
        if shown(name) in self.written:
            return self.written[shown(name)]
        known, here = settled(name), self.scope.here()
        if not known:
            return None
        inside = known.removeprefix(f"{here}/") if here else known
        # Scripts are called in their own folder, or in another, and go to a third.
        folders = (self.folder, here or "") if here in (None, self.began) else (here, self.folder)
        for folder in folders:
            with suppress(OSError):  # Another machine may be allowed to read it: what it does is as unknown.
                if (path := Path(folder, inside)).is_file():
                    return path.read_text(encoding="utf-8", errors="replace")
        return None

    def call(self, body: list[AndOr], arguments: list[str]) -> Status:
        """A function, or a file that is read as one."""
        before, self.scope.positional = self.scope.positional, list(arguments)
        self.hidden.append({})
        status: Status = None
        try:
            with self.joining("return") as early:
                status = self.follow(body)
        except Left as left:
            if left.word != "return":
                raise
            status = left.status
        finally:
            self.scope.positional = before
            self.scope.restore(self.hidden.pop())
        return None if early else status

    def source(self, arguments: list[str]) -> Status:
        """Follow another file where there is one."""
        if not arguments:
            return True
        name, text = shown(arguments[0]), self.file(arguments[0])
        if text is None:
            if Path(name).name not in _OF_PROGRAMS:
                short = name if len(name) < 80 else f"...{name[-70:]}"
                self.scope.absent.setdefault(f"{self.place}: source {short}", set())
            return True
        hidden: Hidden = {}
        hide(self.scope, hidden, "BASH_SOURCE")
        self.scope.values["BASH_SOURCE"] = arguments[0]
        try:
            return self.call(parse(text, where=f"{name}, line "), arguments[1:] or self.scope.positional)
        finally:
            self.scope.restore(hidden)
