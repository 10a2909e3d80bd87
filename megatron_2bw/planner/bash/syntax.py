"""The grammar of bash: simple commands, pipelines, lists and compound commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron_2bw.planner.bash.scope import unknown
from megatron_2bw.planner.bash.tokens import Token, tokens
from megatron_2bw.planner.errors import PlanError

_REDIRECT = {">", ">>", "<", "<<<", "<<", ">&", "<&", "&>", "&>>", ">|", "<>"}
_CLAUSE_ENDS = (";;", ";&", ";;&")
_ENDS = {";", "&", "&&", "||", "|", "|&", *_CLAUSE_ENDS, ")"}


class Simple(NamedTuple):
    """Assignments, and a command."""

    words: list[Token]
    redirections: list[tuple[Token, Token]]
    """Operators and what they name."""


class Pipeline(NamedTuple):
    commands: list[Command]
    negated: bool
    place: str
    """Where it begins, such as ``line 3``; empty in the text of another command."""


class AndOr(NamedTuple):
    """Pipelines joined by ``&&`` and ``||``."""

    first: Pipeline
    rest: list[tuple[str, Pipeline]]
    background: bool


class If(NamedTuple):
    condition: list[AndOr]
    body: list[AndOr]
    otherwise: list[AndOr]


class While(NamedTuple):
    condition: list[AndOr]
    body: list[AndOr]
    until: bool


class For(NamedTuple):
    name: str
    values: list[Token]
    body: list[AndOr]


class ArithmeticFor(NamedTuple):
    header: str
    """``first; condition; step``"""
    body: list[AndOr]


class Case(NamedTuple):
    subject: Token
    clauses: list[tuple[list[Token], list[AndOr]]]
    """Patterns, and what follows them."""


class Group(NamedTuple):
    body: list[AndOr]
    subshell: bool


class Function(NamedTuple):
    name: str
    body: list[AndOr]


class Arithmetic(NamedTuple):
    expression: str


class Conditional(NamedTuple):
    """``[[ ... ]]``"""

    words: list[Token]


Command = Simple | If | While | For | ArithmeticFor | Case | Group | Function | Arithmetic | Conditional


@lru_cache(maxsize=64)
def parse(text: str, *, where: str | None = "line ") -> list[AndOr]:
    """The list of commands that ``text`` is; a file that a script reads in many ways is parsed once.

    Args:
        text: of a script.
        where: what to write before the number of a line; None where ``text`` has no lines that somebody would look up.

    Raises:
        PlanError: it is malformed.
    """
    parser = _Parser(list(tokens(text)), where)
    found = parser.list()
    if token := parser.peek():
        raise parser.misplaced(token)
    return found


def written(body: Sequence[AndOr]) -> str:
    """The one command that ``body`` is, as a script writes it; empty where it is more, or one with others within it."""
    if len(body) != 1 or body[0].rest or len(body[0].first.commands) != 1:
        return ""
    mark = "! " * body[0].first.negated
    match body[0].first.commands[0]:
        case Simple(words):
            return mark + " ".join(token.text for token in words)
        case Conditional(words):
            return f"{mark}[[ {' '.join(token.text for token in words)} ]]"
        case Arithmetic(expression):
            return f"{mark}(({expression}))"
    return ""


def sequence(text: str) -> list[Simple]:
    """The simple commands that ``text`` is, where it has nothing but ``;`` and ``&&`` between them; none where not."""
    try:
        links = [link for statement in parse(text) for link in (("&&", statement.first), *statement.rest)]
    except PlanError:
        return []
    commands = [command for _, pipeline in links for command in pipeline.commands]
    is_sequence = len(commands) == len(links) and all(operator == "&&" for operator, _ in links)
    return commands if is_sequence and all(isinstance(command, Simple) for command in commands) else []


class _Parser:
    """A position in a list of tokens; each method raises PlanError where they are malformed."""

    def __init__(self, of: list[Token], where: str | None) -> None:
        self.tokens, self.where, self.at = of, where, 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self) -> Token:
        token = self.peek()
        if token is None:
            line = self.tokens[-1].line if self.tokens else 0
            raise PlanError(f"line {line}: the script ends within an if, for, while, case or function; close it")
        self.at += 1
        return token

    def misplaced(self, token: Token) -> PlanError:
        return PlanError(
            f"line {token.line}: {token.text!r} in a place where bash does not take it; correct the script"
        )

    def follows(self, *texts: str, operator: bool = True) -> bool:
        token = self.peek()
        return token is not None and token.text in texts and token.is_operator is operator and token.elements is None

    def expect(self, text: str) -> None:
        if (token := self.next()).text != text:
            raise self.misplaced(token)

    def skip_newlines(self) -> None:
        while self.follows(";"):
            self.at += 1

    def list(self, *ends: str) -> list[AndOr]:
        """Up to one of ``ends``, or the end."""
        found = []
        self.skip_newlines()
        while (token := self.peek()) is not None and token.text not in ends:
            if token.is_operator and token.text in (")", *_CLAUSE_ENDS):
                break
            found.append(self.and_or())
            self.skip_newlines()
        return found

    def until(self, end: str) -> list[AndOr]:
        body = self.list(end)
        self.expect(end)
        return body

    def and_or(self) -> AndOr:
        first, rest = self.pipeline(), []
        while self.follows("&&", "||"):
            operator = self.next().text
            self.skip_newlines()
            rest.append((operator, self.pipeline()))
        background = self.follows("&")
        self.at += background
        return AndOr(first, rest, background)

    def pipeline(self) -> Pipeline:
        negated, line = False, self.next().line
        place = "" if self.where is None else f"{self.where}{line}"
        self.at -= 1
        while self.follows("!", "time", operator=False):
            negated ^= self.next().text == "!"
        commands = [self.command()]
        while self.follows("|", "|&"):
            self.at += 1
            self.skip_newlines()
            commands.append(self.command())
        return Pipeline(commands, negated, place)

    def command(self) -> Command:
        token = self.next()
        if token.elements is None and not token.is_operator:
            if [following.text for following in self.tokens[self.at : self.at + 2]] == ["(", ")"]:
                return self.function(token.text)
            if token.text in _COMPOUND:
                return self.redirected(_COMPOUND[token.text](self))
            if token.text.startswith("(("):
                return self.redirected(Arithmetic(token.text[2:-2]))
        elif token.text == "(" and token.is_operator:
            return self.redirected(Group(self.until(")"), subshell=True))
        self.at -= 1
        simple = self.simple()
        if not simple.words and not simple.redirections:
            raise self.misplaced(token)
        return simple

    def redirected(self, command: Command) -> Command:
        """``command``; what its redirections name is not followed."""
        if (words := self.simple().words) != []:
            raise self.misplaced(words[0])
        return command

    def simple(self) -> Simple:
        words: list[Token] = []
        redirections: list[tuple[Token, Token]] = []
        while (token := self.peek()) is not None and not (token.is_operator and token.text in _ENDS):
            self.at += 1
            if not token.is_operator:
                words.append(token)
            elif token.text in _REDIRECT:
                redirections.append((token, token if token.document else self.next()))
            else:
                raise self.misplaced(token)
        return Simple(words, redirections)

    def if_(self) -> If:
        condition, body = self.until("then"), self.list("elif", "else", "fi")
        match self.next():
            case Token(text="elif"):
                return If(condition, body, [_alone(self.if_())])
            case Token(text="else"):
                return If(condition, body, self.until("fi"))
        return If(condition, body, [])

    def while_(self, *, until: bool = False) -> While:
        return While(self.until("do"), self.until("done"), until)

    def for_(self) -> For | ArithmeticFor:
        name, values = self.next().text, [Token(text='"$@"')]
        self.skip_newlines()
        if name.startswith("(("):
            self.expect("do")
            return ArithmeticFor(name[2:-2], self.until("done"))
        if self.follows("in", operator=False):
            self.at += 1
            values = self.simple().words
            self.skip_newlines()
        self.expect("do")
        return For(name, values, self.until("done"))

    def select(self) -> For:
        """A loop over choices that nobody knows."""
        command = self.for_()
        return command._replace(values=[Token(text=unknown(f"${command.name}"))])

    def case(self) -> Case:
        subject, clauses = self.next(), []
        self.skip_newlines()
        self.expect("in")
        while True:
            self.skip_newlines()
            if self.follows("esac", operator=False):
                self.at += 1
                return Case(subject, clauses)
            clauses.append((self.patterns(), self.list("esac")))
            if self.follows(*_CLAUSE_ENDS):
                self.expect(";;")
            elif not self.follows("esac", operator=False):
                raise self.misplaced(self.next())

    def patterns(self) -> list[Token]:
        self.at += self.follows("(")
        found = [self.next()]
        while self.follows("|"):
            self.at += 1
            found.append(self.next())
        self.expect(")")
        return found

    def named_function(self) -> Function:
        return self.function(self.next().text)

    def function(self, name: str) -> Function:
        if self.follows("("):
            self.at += 1
            self.expect(")")
        self.skip_newlines()
        return Function(name, [_alone(self.command())])

    def conditional(self) -> Conditional:
        words = []
        while (token := self.next()).text != "]]":
            words += [] if token.is_operator and token.text == ";" else [token]
        return Conditional(words)


def _alone(command: Command) -> AndOr:
    return AndOr(Pipeline([command], False, ""), [], False)


_COMPOUND: dict[str, Callable[[_Parser], Command]] = {
    "if": _Parser.if_,
    "for": _Parser.for_,
    "select": _Parser.select,
    "while": _Parser.while_,
    "until": lambda parser: parser.while_(until=True),
    "case": _Parser.case,
    "function": _Parser.named_function,
    "{": lambda parser: Group(parser.until("}"), subshell=False),
    "[[": _Parser.conditional,
}
