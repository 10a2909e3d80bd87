"""Follow a script up to the commands it would run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_2bw.planner.bash.assignments import DECLARE, assign, assign_element, assigns, declare, name_of
from megatron_2bw.planner.bash.builtins import BUILTINS
from megatron_2bw.planner.bash.conditions import holds
from megatron_2bw.planner.bash.expand import Scope, Value, compute, document_of, fields, settled, shown, text_of
from megatron_2bw.planner.bash.shells import Call, sent, started
from megatron_2bw.planner.bash.tokens import Token, tokens
from megatron_2bw.planner.errors import PlanError

_REDIRECT = {">", ">>", "<", "<<<", "<<", ">&", "<&", "&>", "&>>", ">|", "<>"}
_ENDS = {";", "&", "&&", "||", "|", "|&", ";;", ";&", ";;&", ")"}
_SILENT = {"echo", "cd", ":", "true", "trap", "ulimit", "mkdir"}
_DEEPEST, _LONGEST = 20, 100_000


def commands(
    text: str, *, file: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> list[list[str]]:
    """The commands that the script ``text`` would run, each as its words, in order.

    Assignments, arrays, arithmetic, ``if``, ``case``, loops, functions, ``source``, ``eval`` and shells are followed;
    a command of ``srun bash -c '...'`` begins with the words of srun. Commands are taken to succeed. The output of
    commands is unknown; a test of it, or of a file, fails, and so does its opposite.

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
    launcher: list[str] = field(default_factory=list)
    """Words that started this shell."""
    written: dict[str, str] = field(default_factory=dict)
    """Files that the script writes."""
    hidden: list[dict[str, Value | None]] = field(default_factory=list)
    """Per function under way, what its local variables hide."""
    depth: int = 0
    steps: int = 0

    def run(self, text: str) -> bool | None:
        """Follow ``text``, whatever leaves it."""
        try:
            return self.follow(list(tokens(text)))
        except _Left:
            return True

    @contextmanager
    def apart(self, scope: Scope, functions: Mapping[str, list[Token]], launcher: Sequence[str] = ()) -> Iterator[None]:
        """In a shell of its own, whose changes end with it."""
        before = self.scope, self.functions, self.launcher, self.hidden
        self.scope, self.functions = scope, dict(functions)
        self.launcher, self.hidden = [*self.launcher, *launcher], []
        try:
            yield
        finally:
            self.scope, self.functions, self.launcher, self.hidden = before

    def start(self, call: Call, text: str, more: Mapping[str, str]) -> None:
        """Follow the ``text`` of another shell, which gets ``more`` variables than are exported."""
        scope = Scope(
            environment=sent(call.launcher, {**self.scope.sent(), **more}),
            positional=call.arguments,
            script=call.name,
            exported=set(self.scope.exported),
        )
        functions = {name: body for name, body in self.functions.items() if name in self.scope.exported}
        with self.apart(scope, functions, call.launcher):
            self.run(shown(text))

    def file(self, name: str) -> str | None:
        """Text of a file that the script writes, or that is there."""
        if shown(name) in self.written:
            return self.written[shown(name)]
        known = settled(name)
        if not known or not (self.folder / known).is_file():
            return None
        with suppress(OSError):  # Another machine may be allowed to read it: what it does is as unknown.
            return (self.folder / known).read_text(encoding="utf-8", errors="replace")

    def step(self, line: int) -> None:
        self.steps += 1
        if self.steps > _LONGEST:
            raise PlanError(f"line {line}: the script takes more than {_LONGEST} steps; give the flags themselves")

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
        self.reading.step(token.line)
        if token.is_operator:
            self.at += 1
            return self.subshell() if token.text == "(" else None
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
            return self.compute(token.text[2:-2])
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

    def compute(self, expression: str) -> bool | None:
        """Whether ``(( expression ))`` is not 0."""
        number = compute(expression, self.scope) if self.active else None
        return None if number is None else number != 0

    def skip(self, *ends: str) -> int:
        """Go on behind ``ends`` and follow nothing; returns where it began."""
        start = self.at
        with self.only_if(False):
            for end in ends:
                self.until(end)
        return start

    def subshell(self) -> bool | None:
        start = self.skip(")")
        end, self.at = self.at, start
        status = None
        if self.active:
            with self.reading.apart(self.scope.copy(), self.reading.functions), suppress(_Left):
                status = self.until(")")
        self.at = end
        return status

    def select(self) -> bool | None:
        """Not followed: somebody chooses."""
        self.skip("do", "done")
        return True

    def loop(self, *, wanted: bool = True) -> bool | None:
        """``while`` and ``until``, as long as it is known that they go on."""
        start = self.skip("do", "done")
        end = self.at
        while self.active and self.round(start, wanted=wanted):
            pass
        self.at = end
        return True

    def round(self, start: int, *, wanted: bool) -> bool:
        """Whether there may be another one; not if this one changes nothing: then something else ends the loop."""
        before = dict(self.scope.values), list(self.scope.positional)
        self.at = start
        return self.until("do") is wanted and self.body() and before != (self.scope.values, self.scope.positional)

    def body(self) -> bool:
        """Follow a loop's body once; False where it leaves the loop."""
        self.reading.step(self.tokens[self.at - 1].line)
        try:
            self.until("done")
        except _Left as left:
            if left.word not in ("break", "continue"):
                raise
            return left.word == "continue"
        return True

    def for_(self) -> bool | None:
        name = self.next().text
        if name.startswith("(("):
            return self.counted(name[2:-2])
        values = [] if (token := self.peek()) and token.text == "in" else list(self.scope.positional)
        while (token := self.next()).text != "do":
            if not token.is_operator and token.text != "in":
                values += fields(token.text, self.scope) if self.active else []
        start = self.skip("done")
        end = self.at
        for value in values if self.active else ():
            self.scope.set(name, value)
            self.at = start
            if not self.body():
                break
        self.at = end
        return True

    def counted(self, header: str) -> bool | None:
        """``for ((first; condition; step))``"""
        first, condition, step = (*header.split(";"), "", "")[:3]
        self.until("do")
        start = self.skip("done")
        end = self.at
        self.compute(first)
        while self.active and self.compute(condition or "1"):
            self.at = start
            if not self.body() or self.compute(step) is None:
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
        redirected: list[tuple[Token, Token]] = []
        while (token := self.peek()) is not None and not (token.is_operator and token.text in _ENDS):
            self.at += 1
            if token.is_operator and token.text in _REDIRECT:
                redirected.append((token, token if token.document else self.next()))
            elif not token.is_operator:
                parts.append(token)
        if not self.active:
            return None
        assigning = next((index for index, token in enumerate(parts) if not assigns(token)), len(parts))
        if assigning == len(parts):
            assign(self.scope, parts)
            return True
        words = [word for token in parts[assigning:] for word in self.words(token)]
        if words and words[0] in DECLARE:
            assigned = [token for token in parts[assigning:] if assigns(token)]
            declare(self.scope, words, assigned, hidden=self.reading.hidden)
            return True
        if not words or assign_element(self.scope, words[0]):
            return True
        given = self.given(parts[:assigning])
        return self.execute(words, given=given, files=self.files(redirected))

    def files(self, redirected: list[tuple[Token, Token]]) -> dict[str, str]:
        """The standard input ``<``, where it is known, and the file that the output goes to, by operator."""
        found = {}
        for operator, target in redirected:
            if target.document:
                document = target.document
                found["<"] = document.text if document.is_quoted else document_of(document.text, self.scope)
            elif operator.text == "<<<":
                found["<"] = text_of(target.text, self.scope) + "\n"
            elif operator.text == "<":
                name = shown(text_of(target.text, self.scope))
                found |= {"<": self.reading.written[name]} if name in self.reading.written else {}
            elif operator.text in (">", ">>", ">|"):
                found[operator.text[:2].rstrip("|")] = text_of(target.text, self.scope)
        return found

    def given(self, parts: list[Token]) -> dict[str, str]:
        """Variables before a command, which only that gets."""
        with self.reading.apart(self.scope.copy(), self.reading.functions):
            assign(self.scope, parts)
            values = {name: self.scope.values.get(name) for name in map(name_of, parts)}
        return {name: value for name, value in values.items() if isinstance(value, str)}

    def words(self, token: Token) -> list[str]:
        return [] if token.elements is not None else fields(token.text, self.scope)

    def execute(self, words: list[str], *, given: Mapping[str, str], files: Mapping[str, str]) -> bool | None:
        name, arguments = words[0], words[1:]
        if name in ("[", "test"):
            return holds(arguments[:-1] if name == "[" else arguments)
        if name in ("exit", "return", "break", "continue"):
            raise _Left(name)
        if name == "exec" and arguments:
            self.execute(arguments, given=given, files=files)
            raise _Left("exit")
        if name == "false":
            return False
        if name in self.reading.functions:
            return self.call(self.reading.functions[name], arguments)
        if name == "eval":
            return self.reading.follow(list(tokens(shown(" ".join(arguments)))))
        if name in ("source", "."):
            self.source(arguments)
            return True
        if name in BUILTINS:
            return BUILTINS[name](self.scope, arguments, None if "IFS" in given else files.get("<"))
        if name == "cat" and not arguments and "<" in files:
            self.write(files)
        if name in _SILENT:
            return True
        call = started(words)
        text = None if call is None else self.text_of(call, files.get("<"))
        if text is None:
            self.reading.commands.append([*self.reading.launcher, *words])
        else:
            self.reading.start(call, text, given)
        return True

    def write(self, files: Mapping[str, str]) -> None:
        """Keep what goes to a file."""
        if ">" in files:
            self.reading.written[shown(files[">"])] = files["<"]
        if ">>" in files:
            name = shown(files[">>"])
            self.reading.written[name] = self.reading.written.get(name, "") + files["<"]

    def text_of(self, call: Call, given: str | None) -> str | None:
        """What a shell is to run, with ``given`` as its standard input; None where it is not known."""
        if call.reads == "s" or not call.operands:
            return given
        return call.operands[0] if call.reads == "c" else self.reading.file(call.operands[0])

    def call(self, body: list[Token], arguments: list[str]) -> bool | None:
        before, self.scope.positional = self.scope.positional, list(arguments)
        self.reading.hidden.append({})
        try:
            return self.reading.follow(body)
        except _Left as left:
            if left.word != "return":
                raise
            return True
        finally:
            self.scope.positional = before
            for name, value in self.reading.hidden.pop().items():
                if value is None:
                    self.scope.values.pop(name, None)
                else:
                    self.scope.values[name] = value

    def source(self, arguments: list[str]) -> None:
        """Follow another file where there is one."""
        text = self.reading.file(arguments[0]) if arguments else None
        if text is not None:
            self.reading.run(text)


_COMPOUND = {
    "if": _Block.if_,
    "for": _Block.for_,
    "select": _Block.select,
    "while": _Block.loop,
    "until": lambda block: block.loop(wanted=False),
    "case": _Block.case,
    "function": _Block.named_function,
    "{": lambda block: block.until("}"),
    "[[": _Block.bracketed,
}
