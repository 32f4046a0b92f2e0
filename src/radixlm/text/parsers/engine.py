"""This module owns `Parser`: a generated text goes in as it comes, pieces come out. One engine for every format.

However the text is cut into chunks, the pieces are the same once joined (`base.pieces.joined`). The rules:

- Reasoning is looked for at the start of the text. It lasts until its end marker, or to the end of the text.
- A call that is malformed, or names a function that may not be called, is text, its markers included.
- A call is announced once its function is known and its arguments begin. If it breaks off after that, its arguments end
  where they stopped being JSON, and what follows is text.
- White space beside a marker belongs to the marker. All other text comes out as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial

from radixlm.base.errors import BadRequest
from radixlm.base.pieces import Kind, Piece, joined
from radixlm.base.request import Parsing
from radixlm.text.parsers.formats import REASONING, TOOLS, Channels, Section, Tags
from radixlm.text.parsers.parts import Arguments, Job, read_all
from radixlm.text.parsers.reader import SPACE, Mismatch, Reader, Steps, until


class Parser:
    """The parser of one text."""

    def __init__(self, parsing: Parsing) -> None:
        """Raises `BadRequest` for a format that there is not."""
        for name, known, what in ((parsing.tools, TOOLS, "tool calls"), (parsing.reasoning, REASONING, "reasoning")):
            if name and name not in known:
                raise BadRequest(f"there is no format {name!r} of {what}; there are {', '.join(known)}")
        self._reader = Reader()
        self._work: Steps[None] | None = _document(self._reader, parsing)
        self._advance()

    @property
    def thinking(self) -> bool:
        """What comes next is reasoning, as far as is known."""
        return self._reader.thinking

    def feed(self, text: str) -> list[Piece]:
        """The pieces that the next characters settle."""
        self._reader.add(text)
        self._advance()
        return joined(self._reader.take())

    def finish(self) -> list[Piece]:
        """The pieces that were held back, now that no text follows."""
        self._reader.ended = True
        self._advance()
        return joined(self._reader.take())

    def _advance(self) -> None:
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None


def markers(parsing: Parsing) -> tuple[str, ...]:
    """Control words that the parser must see, even where special tokens are hidden."""
    tools = TOOLS[parsing.tools].words if parsing.tools else ()
    return (*tools, *(REASONING[parsing.reasoning].words if parsing.reasoning else ()))


def parse(text: str, parsing: Parsing) -> list[Piece]:
    """The pieces of a whole text."""
    parser = Parser(parsing)
    return joined([*parser.feed(text), *parser.finish()])


def _document(reader: Reader, parsing: Parsing) -> Steps[None]:
    tools = TOOLS[parsing.tools].shape if parsing.tools else ()
    reasoning = REASONING[parsing.reasoning].shape if parsing.reasoning else None
    job = Job(frozenset(parsing.names), frozenset(parsing.texts))
    for shape in (tools, reasoning):
        if isinstance(shape, Channels):
            yield from _messages(reader, shape, job if isinstance(tools, Channels) else None, reasoning is not None)
            return
    if isinstance(reasoning, Tags):
        yield from _reasoning(reader, reasoning, parsing.thinking)
    yield from _answer(reader, tools if isinstance(tools, tuple) else (), job)


# ---- reasoning between tags


def _reasoning(reader: Reader, tags: Tags, inside: bool) -> Steps[None]:
    """Reasoning at the start of a text, if there is any. One whose start the prompt has may have its marker again."""
    reader.thinking = inside
    try:
        yield from reader.space()
        yield from reader.literal(tags.open)
    except Mismatch:
        reader.at = reader.mark
        if not inside:
            return
    reader.thinking = True
    yield from reader.space()
    reader.settle()
    yield from reader.scan(until((tags.close,), trim=True), lambda text: reader.give("reasoning", text))
    reader.thinking = False
    yield from reader.space()
    reader.settle()


# ---- text with sections of tool calls in it


def _answer(reader: Reader, sections: Sequence[Section], job: Job) -> Steps[None]:
    for section in sections:
        if not section.open and (yield from _section(reader, section, job)):
            break
    marked = {section.open: section for section in sections if section.open}
    candidate = _candidate(tuple(marked))
    while (yield from _plain(reader, candidate)):
        yield from reader.space()
        begin = reader.at
        try:
            section = marked[(yield from reader.one_of(tuple(marked)))]
        except Mismatch:
            _not_a_marker(reader, begin)
            continue
        reader.at = begin
        if not (yield from _section(reader, section, job)):
            _not_a_marker(reader, begin)


@lru_cache(maxsize=64)
def _candidate(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds where one of the marks may begin. White space is held back as long as one may follow it."""
    if not marks:
        return re.compile("(?!)")
    first = f"[{''.join(sorted({re.escape(mark[0]) for mark in marks}))}]"
    return re.compile(rf"(?<![{SPACE}])[{SPACE}]+(?={first}|\Z)|{first}")  # the look behind: once for each run of space


def _plain(reader: Reader, candidate: re.Pattern[str]) -> Steps[bool]:
    """Give out text up to where a marker may begin. False at the end of the text."""
    while True:
        found = reader.search(candidate)
        reader.at = reader.known if found is None else found
        reader.give("text", reader.slice(reader.mark, reader.at))
        if found is not None:
            return True
        if reader.ended:
            return False
        yield


def _not_a_marker(reader: Reader, begin: int) -> None:
    """What was held back is text, with the first character of what looked like a marker."""
    reader.at = min(begin + 1, reader.known)
    reader.give("text", reader.slice(reader.mark, reader.at))


def _section(reader: Reader, section: Section, job: Job) -> Steps[bool]:
    """Read a section. False, and `at` is back at `mark`, if it is none. One that breaks off ends where it does."""
    reader.attempt()
    try:
        yield from reader.space()
        yield from reader.literal(section.open)
        yield from read_all(section.parts, reader, job)
    except Mismatch:
        reader.stop_passing()
        reader.at = reader.mark
        return reader.committed
    yield from reader.space()
    reader.settle()
    return True


# ---- messages with headers


def _messages(reader: Reader, channels: Channels, job: Job | None, reasoning: bool) -> Steps[None]:
    """A header says what its message is: a call if it has a recipient, else what its channel means."""
    opens = (channels.start, channels.channel)
    candidate = re.compile(re.escape(channels.start[0]))
    ends = until(channels.ends)
    while (yield from _plain(reader, candidate)):
        begin = reader.at
        try:
            yield from reader.one_of(opens)
            header = yield from _header(reader, channels)
        except Mismatch:
            _not_a_marker(reader, begin)
            continue
        name = header["first"] or header["second"]
        if name and job is not None:
            yield from _message_call(reader, channels, job, name)
            continue
        reader.settle()
        reader.thinking = channels.kinds.get(header["channel"]) == "reasoning"
        kind: Kind = "reasoning" if reader.thinking and reasoning else "text"
        yield from reader.scan(ends, partial(reader.give, kind))
        reader.thinking = False


def _message_call(reader: Reader, channels: Channels, job: Job, name: str) -> Steps[None]:
    """A message that is a call. If it is none, its header is text, and what follows that is read on."""
    begin = reader.at
    reader.attempt()
    try:
        job.check(name)
        yield from Arguments().read(reader, job)
        yield from reader.space()
        yield from reader.one_of((*channels.ends, ""))
        reader.settle()
    except Mismatch:
        reader.stop_passing()
        if reader.committed:
            reader.at = reader.mark
        else:
            reader.at = begin
            reader.give("text", reader.slice(reader.mark, begin))


def _header(reader: Reader, channels: Channels) -> Steps[re.Match[str]]:
    """The rest of a header, up to where its message begins."""
    begin = reader.mark
    while not reader.slice(begin, reader.at).endswith(channels.message):
        char = yield from reader.char()
        if not char or reader.at - begin > channels.longest:
            raise Mismatch
        reader.at += 1
    found = channels.header.fullmatch(reader.slice(begin, reader.at))
    if found is None:
        raise Mismatch
    return found
