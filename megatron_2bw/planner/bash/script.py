"""Follow a script up to the commands it would run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_2bw.planner.bash.arithmetic import evaluate
from megatron_2bw.planner.bash.conditions import holds
from megatron_2bw.planner.bash.expand import Scope, fields, settled, shown, text_of
from megatron_2bw.planner.bash.tokens import Token, tokens
from megatron_2bw.planner.errors import PlanError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_REDIRECT = {">", ">>", "<", "<<<", "<<", ">&", "<&", "&>", "&>>", ">|", "<>"}
_ENDS = {";", "&", "&&", "||", "|", "|&", ";;", ";&", ";;&", ")"}
_SILENT = {"echo", "printf", "set", "cd", ":", "true", "unset", "trap", "ulimit", "mkdir", "exit", "return"}
_SHELLS = {"bash", "sh", "zsh"}
_DEEPEST, _LONGEST = 20, 100_000


def commands(
    text: str, *, file: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> list[list[str]]:
    """The commands that the script ``text`` would run, each as its words, in order.

    Assignments, arrays, arithmetic, ``if``, ``case``, ``for``, functions, ``source``, ``eval`` and ``bash -c`` are
    followed. Commands are taken to succeed. The output of commands is unknown; a test of it, or of a file, fails,
    and so does its opposite.

    Raises:
        PlanError: the script is malformed, or too deep or long to follow.

    >>> script = '''TP=4
    ... ARGS=(--tensor-model-parallel-size $TP)  # a comment
    ... [ $TP -gt 1 ] && ARGS+=(--sequence-parallel)
    ... torchrun train.py "${ARGS[@]}"'''
    >>> commands(script, file=Path("run.sh"), environment={})
    [['torchrun', 'train.py', '--tensor-model-parallel-size', '4', '--sequence-parallel']]
    """
    scope = Scope(environment=environment, positional=list(arguments), script=str(file))
    reading = _Reading(scope=scope, folder=file.parent)
    reading.run(text)
    return reading.commands


class _Left(Exception):
    """``exit``, ``return``, ``break`` or ``continue``."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


@dataclass(slots=True, kw_only=True)
class _Reading:
    """What is known at one point of a script."""

    scope: Scope
    folder: Path
    commands: list[list[str]] = field(default_factory=list)
    functions: dict[str, list[Token]] = field(default_factory=dict)
    depth: int = 0
    steps: int = 0

    def run(self, text: str) -> bool | None:
        """Follow ``text``, whatever leaves it."""
        try:
            return self.follow(list(tokens(text)))
        except _Left:
            return True

    def follow(self, of: list[Token]) -> bool | None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise PlanError(f"the script calls itself more than {_DEEPEST} levels deep; give the flags themselves")
        try:
            return _Block(reading=self, tokens=of).statements()
        finally:
            self.depth -= 1


@dataclass(slots=True, kw_only=True)
class _Block:
    """A position in a list of tokens."""

    reading: _Reading
    tokens: list[Token]
    at: int = 0
    active: bool = True
    """Off within what the script skips."""

    def statements(self, *ends: str) -> bool | None:
        """Follow statements up to a word of ``ends``; returns the last one's status, None where unknown."""
        status: bool | None = True
        while (token := self.peek()) is not None and token.text not in ends:
            if token.is_operator and token.text in _ENDS - {")"}:
                self.at += 1
            else:
                status = self.chain()
        return status

    def chain(self) -> bool | None:
        """Commands joined by ``&&``, ``||`` and ``|``."""
        status = self.command()
        while (token := self.peek()) is not None and token.is_operator and token.text in ("&&", "||", "|", "|&"):
            self.at += 1
            self.skip_separators()
            runs = {"&&": status is True, "||": status is False}.get(token.text, True)
            with self.only_if(runs):
                answer = self.command()
            status = answer if runs else status
        return status

    def command(self) -> bool | None:
        token = self.tokens[self.at]
        self.reading.steps += 1
        if self.reading.steps > _LONGEST:
            raise PlanError(
                f"line {token.line}: the script takes more than {_LONGEST} steps; give the flags themselves"
            )
        if token.is_operator:
            self.at += 1
            return self.until(")") if token.text == "(" else None
        if token.text == "!":
            self.at += 1
            answer = self.command()
            return None if answer is None else not answer
        compound = _COMPOUND.get(token.text)
        if compound is not None:
            self.at += 1
            return compound(self)
        if token.text.startswith("((") and token.elements is None:
            self.at += 1
            number = evaluate(text_of(token.text[2:-2], self.scope), self.scope.number)
            return None if number is None else number != 0
        if [following.text for following in self.tokens[self.at + 1 : self.at + 3]] == ["(", ")"]:
            self.at += 3
            return self.function(token.text)
        return self.simple()

    @property
    def scope(self) -> Scope:
        return self.reading.scope

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self) -> Token:
        token = self.peek()
        if token is None:
            line = self.tokens[-1].line if self.tokens else 0
            raise PlanError(f"line {line}: the script ends within an if, for, while, case or function; close it")
        self.at += 1
        return token

    def skip_separators(self) -> None:
        while (token := self.peek()) is not None and token.is_operator and token.text in (";", ";;", ";&", ";;&"):
            self.at += 1

    def until(self, end: str) -> bool | None:
        status = self.statements(end)
        self.next()
        return status

    @contextmanager
    def only_if(self, runs: bool) -> Iterator[None]:
        before, self.active = self.active, self.active and runs
        try:
            yield
        finally:
            self.active = before

    def if_(self) -> bool | None:
        taken = False
        word = "if"
        while word != "fi":
            runs = not taken
            if word != "else":
                with self.only_if(runs):
                    runs = self.until("then") is True and runs
            with self.only_if(runs):
                self.statements("elif", "else", "fi")
            taken = taken or runs
            word = self.next().text
        return True

    def loop(self) -> bool | None:
        """``while`` and ``until``: not followed, since what ends them is done by commands."""
        with self.only_if(False):
            self.until("do")
            self.until("done")
        return True

    def for_(self) -> bool | None:
        name = self.next().text
        values: list[str] = []
        while (token := self.next()).text != "do":
            if not token.is_operator and token.text != "in":
                values += fields(token.text, self.scope) if self.active else []
        body = self.at
        with self.only_if(False):
            self.until("done")
        end = self.at
        for value in values:
            self.scope.values[name] = value
            self.at = body
            try:
                self.until("done")
            except _Left as left:
                if left.word not in ("break", "continue"):
                    raise
                if left.word == "break":
                    break
        self.at = end
        return True

    def case(self) -> bool | None:
        subject = settled(text_of(self.next().text, self.scope))
        self.until("in")
        matched = subject is None
        while True:
            self.skip_separators()
            token = self.next()
            if token.text == "esac":
                return True
            patterns = []
            while token.text != ")" or not token.is_operator:
                patterns += [] if token.is_operator else [text_of(token.text, self.scope)]
                token = self.next()
            runs = not matched and any(fnmatchcase(subject or "", pattern) for pattern in patterns)
            with self.only_if(runs):
                self.statements(";;", ";&", ";;&", "esac")
            matched = matched or runs

    def function(self, name: str) -> bool | None:
        self.skip_separators()
        start = self.at
        with self.only_if(False):
            self.command()
        if self.active:
            self.reading.functions[name] = self.tokens[start : self.at]
        return True

    def named_function(self) -> bool | None:
        name = self.next().text
        if [token.text for token in self.tokens[self.at : self.at + 2]] == ["(", ")"]:
            self.at += 2
        return self.function(name)

    def bracketed(self) -> bool | None:
        """``[[ ... ]]``"""
        words = []
        while (token := self.next()).text != "]]":
            words.append(token.text if token.is_operator or not self.active else text_of(token.text, self.scope))
        return holds(words, patterns=True) if self.active else None

    def simple(self) -> bool | None:
        """A command, or assignments."""
        parts: list[Token] = []
        while (token := self.peek()) is not None and not (token.is_operator and token.text in _ENDS):
            self.at += 1
            if token.is_operator and token.text in _REDIRECT:
                if token.text != "<<":
                    self.next()
            elif not token.is_operator:
                parts.append(token)
        if not self.active:
            return None
        assigning = next((index for index, token in enumerate(parts) if not _assigns(token)), len(parts))
        if assigning == len(parts):
            self.assign(parts)
            return True
        words = [word for token in parts[assigning:] for word in self.words(token)]
        if words and words[0] in _DECLARE:
            self.assign([token for token in parts[assigning:] if _assigns(token)])
            return True
        return self.execute(words) if words else True

    def words(self, token: Token) -> list[str]:
        return [] if token.elements is not None else fields(token.text, self.scope)

    def assign(self, parts: list[Token]) -> None:
        values = self.scope.values
        for token in parts:
            if token.elements is not None:
                new = [word for element in token.elements for word in fields(element, self.scope)]
                old = values.get(token.text, []) if token.append else []
                values[token.text] = [*([old] if isinstance(old, str) else old), *new]
                continue
            name, append, raw = _ASSIGNMENT.fullmatch(token.text).groups()
            text, old = text_of(raw, self.scope), self.scope.get(name) if append else None
            values[name] = [old[0] + text, *old[1:]] if isinstance(old, list) and old else (old or "") + text

    def execute(self, words: list[str]) -> bool | None:
        name, arguments = words[0], words[1:]
        if name in ("[", "test"):
            return holds(arguments[:-1] if name == "[" else arguments)
        if name in ("exit", "return", "break", "continue"):
            raise _Left(name)
        if name == "false":
            return False
        if name == "shift":
            count = settled(arguments[0]) if arguments else "1"
            del self.scope.positional[: int(count) if count and count.isdecimal() else 1]
            return True
        if name in self.reading.functions:
            return self.call(self.reading.functions[name], arguments)
        if name == "eval":
            return self.reading.follow(list(tokens(shown(" ".join(arguments)))))
        if name in ("source", "."):
            self.source(arguments)
            return True
        if name in _SILENT:
            return True
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if Path(shell).name in _SHELLS and option.startswith("-") and option.endswith("c"):
                self.reading.run(shown(text))
        self.reading.commands.append(words)
        return True

    def call(self, body: list[Token], arguments: list[str]) -> bool | None:
        before, self.scope.positional = self.scope.positional, list(arguments)
        try:
            return self.reading.follow(body)
        except _Left as left:
            if left.word != "return":
                raise
            return True
        finally:
            self.scope.positional = before

    def source(self, arguments: list[str]) -> None:
        """Follow another file where there is one."""
        name = settled(arguments[0]) if arguments else None
        file = self.reading.folder / name if name else None
        if file is not None and file.is_file():
            self.reading.run(file.read_text(encoding="utf-8", errors="replace"))


def _assigns(token: Token) -> bool:
    return token.elements is not None or _ASSIGNMENT.fullmatch(token.text) is not None


_COMPOUND = {
    "if": _Block.if_,
    "for": _Block.for_,
    "select": _Block.loop,
    "while": _Block.loop,
    "until": _Block.loop,
    "case": _Block.case,
    "function": _Block.named_function,
    "{": lambda block: block.until("}"),
    "[[": _Block.bracketed,
}
