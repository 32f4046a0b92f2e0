"""This module owns `Reader`: a text that is still coming, read by generators, and what has been made of it so far.

A generator reads one character after the other and yields when it needs one that has not come. It never sees how the
text was cut into chunks, so the result cannot depend on that. It may go back to any place after `mark`: up to there the
text is accounted for (it was given out, or is a marker). Where the text is not what a generator wants it raises
`Mismatch`, and whoever called it decides what the text is instead. So nothing is lost and nothing is said twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from radixlm.base.pieces import Kind, Piece

T = TypeVar("T")

#: What a parser is: a generator that yields (nothing) whenever it needs more text, and returns a `T`.
Steps = Generator[None, None, T]

#: White space beside markers. JSON's, so that it can be left out between JSON values too.
SPACE = " \t\r\n"
_SPACE = re.compile(f"[{SPACE}]*")


class Mismatch(Exception):
    """The text is not what was expected. `at` of the reader is the first character that does not fit."""


class Reader:
    """
    Attributes:
        at: place of the next character to read. Places count from the start of the whole text.
        mark: before it everything is accounted for.
        ended: no text follows.
        passing: text that is read is given out as arguments just as it is.
        thinking: what is read now is reasoning.
        committed: something was given out since `attempt`; there is no way back.
    """

    def __init__(self) -> None:
        self.at = 0
        self.mark = 0
        self.ended = False
        self.passing = False
        self.thinking = False
        self.committed = False
        self.call = -1  # number of the tool call that was announced last
        self._text = ""
        self._start = 0  # the place of the first character of `_text`
        self._pieces: list[Piece] = []

    # ---- the text

    def add(self, text: str) -> None:
        self._text = self._text[self.mark - self._start :] + text
        self._start = self.mark

    def slice(self, begin: int, end: int) -> str:
        return self._text[begin - self._start : end - self._start]

    @property
    def known(self) -> int:
        """The place after the last character that has come."""
        return self._start + len(self._text)

    def search(self, pattern: re.Pattern[str]) -> int | None:
        """The place from `at` on where a pattern matches first in the text that has come."""
        found = pattern.search(self._text, self.at - self._start)
        return None if found is None else found.start() + self._start

    def char(self) -> Steps[str]:
        """The next character, without reading it; "" at the end."""
        while self.at - self._start == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.at - self._start]

    def run(self, pattern: re.Pattern[str]) -> Steps[None]:
        """Read on while a pattern matches. It must match any number of characters, each for itself (`[abc]*`)."""
        while True:
            found = pattern.match(self._text, self.at - self._start)
            assert found is not None, "a pattern that does not match the empty text"
            self.at = found.end() + self._start
            if found.end() < len(self._text) or self.ended:
                return
            yield

    def space(self) -> Steps[None]:
        """Read white space, if there is any."""
        char = yield from self.char()
        if char and char in SPACE:
            yield from self.run(_SPACE)

    def literal(self, text: str) -> Steps[None]:
        for expected in text:
            char = yield from self.char()
            if char != expected:
                raise Mismatch
            self.at += 1

    def one_of(self, texts: Sequence[str]) -> Steps[str]:
        """Read one of several texts and say which. None of them may begin another; "" stands for the end."""
        begin = self.at
        rest = texts
        while True:
            char = yield from self.char()
            if not char and "" in texts and self.at == begin:
                return ""
            size = self.at - begin
            rest = [text for text in rest if text[size : size + 1] == char != ""]
            if not rest:
                self.at = begin
                raise Mismatch
            self.at += 1
            if len(rest[0]) == size + 1:
                return rest[0]

    def scan(self, until: Until, out: Callable[[str], None]) -> Steps[bool]:
        """Read up to the first marker of `until` and past it; what is before it goes `out` as it comes.

        Returns:
            False if the text ended without one.
        """
        while True:
            begin = self.at - self._start
            found = until.pattern.search(self._text, begin)
            if found is not None:
                end, after = found.start(), found.end()
            else:
                end = after = len(self._text) - (0 if self.ended else until.held(self._text[begin:]))
            if end > begin:
                out(self._text[begin:end])
            self.at = self.mark = after + self._start
            if found is not None:
                return True
            if self.ended:
                return False
            yield

    # ---- what is made of it

    def attempt(self) -> None:
        """From here on `Mismatch` may go back, until something is given out."""
        self.committed = False

    def settle(self) -> None:
        """What was read is accounted for."""
        self._pass_on()
        self.mark = self.at
        self.committed = True

    def stop_passing(self) -> None:
        """What is read from here on is no arguments."""
        self._pass_on()
        self.passing = False

    def give(self, kind: Kind, text: str) -> None:
        """Give out text in the place of what was read since `mark`."""
        if text:
            self._pieces.append(Piece(kind, text, max(self.call, 0) if kind in ("call", "arguments") else 0))
        self.mark = self.at
        self.committed = True

    def announce(self, name: str) -> None:
        """A tool call begins."""
        self.call += 1
        self.give("call", name)

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        self._pass_on()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _pass_on(self) -> None:
        if self.passing and self.at > self.mark:
            self.give("arguments", self.slice(self.mark, self.at))


class Until:
    """Markers that end a stretch of text. `trim`: white space before them belongs to them.

    Attributes:
        pattern: finds the first of them.
    """

    def __init__(self, markers: Sequence[str], trim: bool = False) -> None:
        self._markers = tuple(markers)
        self._longest = max(map(len, markers)) - 1
        self._trim = trim
        words = "|".join(map(re.escape, markers))
        # The look behind keeps a long run of white space from being tried from each of its characters on.
        self.pattern = re.compile(rf"(?:(?<![{SPACE}])[{SPACE}]+)?(?:{words})" if trim else words)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may yet be part of a marker."""
        held = 0
        for size in range(min(self._longest, len(text)), 0, -1):
            if any(marker.startswith(text[-size:]) for marker in self._markers):
                held = size
                break
        if self._trim:
            before = text[: len(text) - held]
            held += len(before) - len(before.rstrip(SPACE))
        return held


@lru_cache(maxsize=64)
def until(markers: tuple[str, ...], trim: bool = False) -> Until:
    return Until(markers, trim)
