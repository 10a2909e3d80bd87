"""Words and operators of a bash script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_2bw.planner.errors import PlanError

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_ARRAY = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(\+?)=\(")
_HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"\\]?)([A-Za-z_0-9]+)\2")
_PLACEHOLDER = re.compile(r"<[A-Za-z](?:[^<>|;&\n]*[^<>|;&\s])?>(?=\s|$)")
"""What templates have in place of a value, such as ``<PATH TO DATA>``; taken as one word."""
_ANSI_QUOTED = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)
_DESCRIPTOR = re.compile(r"\d(?=[<>])")
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", "&>>", "&>", ">>", ">&", ">|", "<&", "<>", ">", "<", "|", "&", ";")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass(slots=True, kw_only=True)
class Document:
    """A here-document; it follows the line that it belongs to."""

    delimiter: str
    drops_tabs: bool
    is_quoted: bool
    """Nothing in it is expanded."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A word as written, an operator, or the elements of an array."""

    text: str
    """Of a word: with quotes and ``$``; of an array: its name."""
    is_operator: bool = False
    elements: tuple[str, ...] | None = None
    """Of an array."""
    append: bool = False
    """Of an array: ``+=``."""
    document: Document | None = None
    """Of ``<<``; filled in when the tokens behind it have been read."""
    line: int = 0


@dataclass(slots=True, kw_only=True)
class _Reader:
    """A position in a script."""

    text: str
    at: int = 0
    documents: list[Document] = field(default_factory=list)
    """That begin after this line."""
    _line: int = 1
    _counted: int = 0

    @property
    def line(self) -> int:
        """Of the present position; asked for from the beginning to the end."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def starts(self, text: str) -> bool:
        return self.text.startswith(text, self.at)


def tokens(text: str) -> Iterator[Token]:
    """Words and operators of ``text``; comments, continued lines are dropped.

    >>> [token.text for token in tokens("A='x y' run --b $A # why")]
    ["A='x y'", 'run', '--b', '$A']

    Raises:
        PlanError: a quote or bracket without its end.
    """
    reader = _Reader(text=text)
    while _skip_blanks(reader):
        if reader.starts("\n"):
            reader.at += 1
            _read_documents(reader)
            yield Token(text=";", is_operator=True, line=reader.line)
        else:
            yield _token(reader)


def _skip_blanks(reader: _Reader) -> bool:
    """Go on to the next token; False at the end."""
    text = reader.text
    while reader.at < len(text):
        if text[reader.at] in " \t\r":
            reader.at += 1
        elif reader.starts("\\\n"):
            reader.at += 2
        elif reader.starts("\\\r\n"):
            reader.at += 3
        elif text[reader.at] == "#":
            end = text.find("\n", reader.at)
            reader.at = len(text) if end < 0 else end
        else:
            return True
    return False


def _read_documents(reader: _Reader) -> None:
    for document in reader.documents:
        lines = []
        while reader.at < len(reader.text):
            end = reader.text.find("\n", reader.at)
            end = len(reader.text) if end < 0 else end
            line = reader.text[reader.at : end]
            line = line.lstrip("\t") if document.drops_tabs else line
            reader.at = end + 1
            if line == document.delimiter:
                break
            lines.append(f"{line}\n")
        document.text = "".join(lines)
    reader.documents.clear()


def _token(reader: _Reader) -> Token:
    line = reader.line
    if array := _ARRAY.match(reader.text, reader.at):
        reader.at = array.end()
        return Token(text=array[1], elements=tuple(_elements(reader, line)), append=bool(array[2]), line=line)
    if not reader.starts("<<<") and (heredoc := _HEREDOC.match(reader.text, reader.at)):
        reader.at = heredoc.end()
        document = Document(delimiter=heredoc[3], drops_tabs=bool(heredoc[1]), is_quoted=bool(heredoc[2]))
        reader.documents.append(document)
        return Token(text="<<", is_operator=True, document=document, line=line)
    if placeholder := _PLACEHOLDER.match(reader.text, reader.at):
        reader.at = placeholder.end()
        return Token(text=placeholder[0], line=line)
    if reader.starts("(("):
        end = _closed(reader.text, reader.at, line)
        text, reader.at = reader.text[reader.at : end], end
        return Token(text=text, line=line)
    if _DESCRIPTOR.match(reader.text, reader.at):
        reader.at += 1
    if reader.starts("<(") or reader.starts(">("):  # A file with the output of a command: as unknown as $(...).
        start, reader.at = reader.at + 1, _closed(reader.text, reader.at + 1, line)
        return Token(text=f"${reader.text[start : reader.at]}", line=line)
    for operator in ("<<<", *_OPERATORS, "(", ")"):
        if reader.starts(operator):
            reader.at += len(operator)
            return Token(text=operator, is_operator=True, line=line)
    end = _word_end(reader.text, reader.at, line)
    text, reader.at = reader.text[reader.at : end], end
    return Token(text=text, line=line)


def _elements(reader: _Reader, line: int) -> Iterator[str]:
    """Words up to the closing bracket of an array."""
    while _skip_blanks(reader):
        if reader.starts(")"):
            reader.at += 1
            return
        if reader.starts("\n"):
            reader.at += 1
            continue
        end = _word_end(reader.text, reader.at, line)
        if end == reader.at:
            raise PlanError(f"line {reader.line}: {reader.text[reader.at]!r} within an array; quote it")
        yield reader.text[reader.at : end]
        reader.at = end
    raise PlanError(f"line {line}: the array that begins here has no closing bracket; add it")


def _word_end(text: str, at: int, line: int) -> int:
    while at < len(text) and text[at] not in " \t\r\n;&|<>()":
        at = part_end(text, at, line)
    return at


def part_end(text: str, at: int, line: int = 0) -> int:
    """Where the character, quotation or expansion that begins at ``at`` ends.

    >>> part_end("${TP:-$(cores)}x", 0)
    15

    Raises:
        PlanError: a quote or bracket without its end.
    """
    match text[at]:
        case "\\":
            return min(at + 2, len(text))
        case "'":
            return _after(text, "'", at + 1, line)
        case '"':
            return _quoted_end(text, at + 1, line)
        case "`":
            return _after(text, "`", at + 1, line)
        case "\x01" | "\x02":  # A stand-in, in the text of another shell.
            return text.find("\x03", at) + 1 or len(text)
        case "$":
            if text.startswith(("$(", "${", "$["), at):
                return _closed(text, at + 1, line)
            if text.startswith("$'", at):
                found = _ANSI_QUOTED.match(text, at)
                return found.end() if found else _after(text, "'", len(text), line)
            if name := _NAME.match(text, at + 1):
                return name.end()
            return min(at + 2, len(text)) if at + 1 < len(text) and text[at + 1] in "0123456789@*#?$!-" else at + 1
    return at + 1


def _after(text: str, quote: str, at: int, line: int) -> int:
    end = text.find(quote, at)
    if end < 0:
        raise PlanError(f"line {line}: the quotation {quote} that begins here has no end; add it")
    return end + 1


def _quoted_end(text: str, at: int, line: int) -> int:
    while at < len(text):
        if text[at] == '"':
            return at + 1
        is_part = text[at] in "\\`$\x01\x02" and not text.startswith("$'", at)
        at = part_end(text, at, line) if is_part else at + 1
    raise PlanError(f'line {line}: the quotation " that begins here has no end; add it')


def _closed(text: str, at: int, line: int) -> int:
    """Behind the bracket that closes the one at ``at``."""
    opening, depth = text[at], 0
    while at < len(text):
        if text[at] == opening:
            depth += 1
        elif text[at] == _CLOSING[opening]:
            depth -= 1
            if depth == 0:
                return at + 1
        at = part_end(text, at, line) if text[at] in "\\'\"`$\x01\x02" else at + 1
    raise PlanError(f"line {line}: the bracket {opening} that begins here has no end; add it")
