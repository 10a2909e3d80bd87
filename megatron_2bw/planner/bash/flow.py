"""Which commands of a script run, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from megatron_2bw.planner.bash.conditions import holds, opposite
from megatron_2bw.planner.bash.expand import compute, fields, pattern_of, regex_of, text_of
from megatron_2bw.planner.bash.patterns import matches
from megatron_2bw.planner.bash.scope import Scope, is_gone, is_word, settled, unknown
from megatron_2bw.planner.bash.syntax import (
    AndOr,
    Arithmetic,
    ArithmeticFor,
    Case,
    Command,
    Conditional,
    For,
    Function,
    Group,
    If,
    Pipeline,
    Simple,
    While,
    written,
)
from megatron_2bw.planner.bash.tokens import Token
from megatron_2bw.planner.errors import PlanError

_DEEPEST, _LONGEST = 20, 100_000
_PATHS = 6
"""Places where a script is followed once for each way; 2**6 times takes a second."""
Status = bool | None
"""Whether a command succeeds; None where only running the script would tell."""


class Left(Exception):
    """``exit``, ``return``, ``break`` or ``continue``."""

    def __init__(
        self, word: str, *, status: Status = None, levels: int = 1, where: tuple[str, str] | None = None
    ) -> None:
        super().__init__(word)
        self.word, self.status, self.levels, self.where = word, status, levels, where


@dataclass(slots=True, kw_only=True)
class Flow:
    """A position in a script; where only running it would tell what comes next, both ways are followed."""

    scope: Scope
    early: dict[str, list[Scope]] = field(default_factory=dict)
    """Variables where the loop or function under way is perhaps left, by the word that leaves it."""
    loops: int = 0
    """Under way."""
    depth: int = 0
    steps: int = 0
    place: str = ""
    """In the script, or a file that it reads."""
    test: str = ""
    """Why it came here, as the script writes it, where it is simple."""
    path: tuple[int, ...] = ()
    """Which way to go on from, 0 or 1, per place where both ways end differently; the first beyond."""
    taken: list[int] = field(default_factory=list)
    """At the places so far."""
    repeating: int = 0
    """Loops under way whose number of rounds is not known."""

    def simple(self, command: Simple) -> Status:
        raise NotImplementedError

    def step(self, place: str) -> None:
        self.steps += 1
        self.place = place or self.place
        if self.steps > _LONGEST:
            raise PlanError(f"{self.place}: the script takes more than {_LONGEST} steps; give the flags themselves")

    def follow(self, body: list[AndOr]) -> Status:
        """``body`` of a function or another file."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise PlanError(f"the script calls itself more than {_DEEPEST} levels deep; give the flags themselves")
        try:
            return self.list(body)
        finally:
            self.depth -= 1

    def list(self, body: Sequence[AndOr]) -> Status:
        self.scope.status = True if not body else self.scope.status
        for statement in body:
            if statement.background:
                self.apart(partial(self.and_or, statement))
                self.scope.status = True
            else:
                self.scope.status = self.and_or(statement)
        return self.scope.status

    def and_or(self, statement: AndOr) -> Status:
        status = self.pipeline(statement.first)
        for operator, pipeline in statement.rest:
            ways = partial(self.pipeline, pipeline), partial(bool, operator == "||")
            test = written([AndOr(statement.first, [], False)]) if pipeline is statement.rest[0][1] else ""
            status = self.either(status, *(ways if operator == "&&" else ways[::-1]), test)
        return status

    def pipeline(self, pipeline: Pipeline) -> Status:
        self.step(pipeline.place)
        for command in pipeline.commands:
            run = partial(self.command, command)
            status = run() if len(pipeline.commands) == 1 else self.apart(run)
            self.scope.status = opposite(status) if pipeline.negated else status
        return self.scope.status

    def command(self, command: Command) -> Status:
        match command:
            case Simple():
                return self.simple(command)
            case If(condition, body, otherwise):
                ways = partial(self.list, body), partial(self.list, otherwise)
                return self.either(self.list(condition), *ways, written(condition))
            case While():
                return self.while_(command)
            case For():
                return self.for_(command)
            case ArithmeticFor():
                return self.counted(command)
            case Case(subject, clauses):
                return self.case(settled(text_of(subject.text, self.scope)), clauses, subject.text)
            case Group(body, subshell):
                return self.apart(partial(self.list, body)) if subshell else self.list(body)
            case Function(name, body):
                self.scope.functions[name] = body
                return True
            case Arithmetic(expression):
                return self.computed(expression)
            case Conditional(words):
                return self.conditional(words)

    def apart(self, run: Callable[[], Status]) -> Status:
        """In a subshell, whose changes end with it."""
        before = self.scope, self.early, self.loops
        self.scope, self.early = self.scope.copy(), {}
        try:
            return run()
        except Left as left:
            return left.status
        finally:
            self.scope, self.early, self.loops = before

    def either(
        self, status: Status, first: Callable[[], Status], second: Callable[[], Status], test: str = ""
    ) -> Status:
        """The first way where ``status``, of ``test``, says so, or the second; both where it is not known."""
        if status is not None:
            before, self.test = self.test, f"{'if' if status else 'unless'} {test}" if test else self.test
            try:
                return first() if status else second()
            finally:
                self.test = before
        start, ends, leaving = self.scope, [], None
        for way in (first, second):
            self.scope = start.copy()
            try:
                self.scope.status = way()
                ends.append(self.scope)
            except Left as left:
                self.leave_perhaps(left)
                leaving = left if leaving is None or leaving.word == "exit" else leaving
        if not ends:
            raise leaving
        self.scope = ends[0] if len(ends) == 1 else self.end(*ends)
        return self.scope.status

    def end(self, first: Scope, second: Scope) -> Scope:
        """Of two ways, either of which the script may have come."""
        if self.repeating or len(self.taken) == _PATHS or first.sets_as(second):
            return first.joined(second)
        way = self.path[len(self.taken)] if len(self.taken) < len(self.path) else 0
        self.taken.append(way)
        return second if way else first

    def others(self) -> Iterator[tuple[int, ...]]:
        """Paths that part from this one where it had a choice."""
        for place in range(len(self.path), len(self.taken)):
            yield (*self.taken[:place], 1)

    @contextmanager
    def joining(self, word: str) -> Iterator[list[Scope]]:
        """The end of what ``word`` leaves: joins the places where it perhaps does, which it yields."""
        outer, early = self.early.get(word, []), []
        self.early[word] = early
        self.loops += word == "break"
        try:
            yield early
        except Left as left:
            if not early:
                raise
            self.leave_perhaps(left)
            self.scope = early[0]
        finally:
            for scope in early:
                self.scope = self.scope.joined(scope)
            self.loops -= word == "break"
            self.early[word] = outer

    def leave_perhaps(self, left: Left) -> None:
        if left.levels > 1:
            raise PlanError(f"only running the script would tell whether {left.word} is reached") from left
        if left.word != "exit":  # Where it exits it is not what somebody asks about.
            self.early.setdefault(left.word, []).append(self.scope)

    def perhaps(self, way: Callable[[], object]) -> Status:
        """Any number of times: until that changes nothing that is known."""
        self.repeating += 1
        try:
            while True:
                before = self.scope.copy()
                self.either(None, lambda: way() and None, lambda: None)
                self.step("")
                if self.scope == before:
                    return None
        finally:
            self.repeating -= 1

    def while_(self, command: While) -> Status:
        """Endless where nothing changes any more: then something else ends it."""

        def goes_on() -> Status:
            status = self.list(command.condition)
            return opposite(status) if command.until else status

        with self.joining("break") as early:
            while (answer := goes_on()) is not False:
                before = self.scope.copy()
                if answer is None or early:
                    self.perhaps(lambda: self.round(command.body) and goes_on())
                    break
                if not self.round(command.body) or self.scope == before:
                    break
        return None

    def for_(self, command: For) -> Status:
        values = [word for token in command.values for word in fields(token.text, self.scope)]
        with self.joining("break") as early:
            for value in itertools.filterfalse(is_gone, values):
                run = partial(self.round, command.body, name=command.name, value=value)
                if not is_word(value) or early:
                    self.perhaps(lambda run=run: run() or early.append(self.scope.copy()))
                elif not run():
                    break
        return None

    def counted(self, command: ArithmeticFor) -> Status:
        first, condition, step = (*command.header.split(";"), "", "")[:3]
        self.computed(first)
        with self.joining("break") as early:
            while (answer := self.computed(condition.strip() or "1")) is not False:
                if answer is None or early:
                    self.perhaps(lambda: self.round(command.body) and self.computed(step))
                    break
                if not self.round(command.body):
                    break
                self.computed(step)
        return None

    def round(self, body: list[AndOr], *, name: str = "", value: str = "") -> bool:
        """Of a loop, with ``value`` for its variable ``name``; False where it leaves the loop."""
        self.step(body[0].first.place if body else "")
        if name:
            self.scope.set(name, value)
        try:
            with self.joining("continue"):
                self.list(body)
        except Left as left:
            if left.word not in ("break", "continue"):
                raise
            if left.levels > 1:
                raise Left(left.word, levels=left.levels - 1) from left
            return left.word == "continue"
        return True

    def case(self, subject: str | None, clauses: list[tuple[list[Token], list[AndOr]]], text: str) -> Status:
        if not clauses:
            return True
        (patterns, body), *rest = clauses
        answers = {matches(subject, pattern_of(token.text, self.scope)) for token in patterns}
        status = True if True in answers else None if None in answers else False
        test = f"{text} is {'|'.join(token.text for token in patterns)}"
        return self.either(status, partial(self.list, body), partial(self.case, subject, rest, text), test)

    def computed(self, expression: str) -> Status:
        """Whether ``(( expression ))`` is not 0."""
        number = compute(expression, self.scope)
        return None if number is None else number != 0

    def conditional(self, of: list[Token]) -> Status:
        words: list[str] = []
        for before, token in zip([None, *of], of, strict=False):
            operator = before.text if before else ""
            form = {"=": pattern_of, "==": pattern_of, "!=": pattern_of, "=~": regex_of}.get(operator, text_of)
            words.append(token.text if token.is_operator else form(token.text, self.scope))
        if "=~" in words:
            self.scope.set("BASH_REMATCH", [unknown("${BASH_REMATCH}")])
        return holds(words, patterns=True)
