"""This module owns the parts that formats of tool calls are made of. Each reads its stretch of the text.

A format is data: a tuple of parts that follow each other. A call is announced as soon as its function and the start of
its arguments are known; from then on its arguments are given out as JSON, as they come.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from radixlm.text.parsers.reader import SPACE, Mismatch, Reader, Steps, until
from radixlm.text.parsers.values import (
    comma,
    identifier,
    json_value,
    python_value,
    quoted,
    settled,
    text_of_string,
)

#: Longer names of functions and parameters are no match.
MAX_NAME = 256

_NAME = re.compile(r"[A-Za-z0-9_.:-]*")
_PATH = re.compile(r"[A-Za-z0-9_.-]*")


@dataclass(slots=True)
class Job:
    """What is known while a section is read.

    Attributes:
        names: functions that may be called; empty: all.
        texts: (function, parameter) pairs whose value is a text, whatever it looks like.
        name: the function named last, until its call is announced.
    """

    names: Collection[str] = ()
    texts: Collection[tuple[str, str]] = ()
    name: str = ""

    def check(self, name: str) -> str:
        """Take the name of a function. Raises `Mismatch` if there is no such function."""
        if not name or (self.names and name not in self.names):
            raise Mismatch
        self.name = name
        return name


class Part(Protocol):
    def read(self, reader: Reader, job: Job) -> Steps[None]:
        """Raises `Mismatch` if the text is something else."""
        ...


def read_all(parts: Sequence[Part], reader: Reader, job: Job) -> Steps[None]:
    for part in parts:
        yield from part.read(reader, job)


@dataclass(frozen=True, slots=True)
class Mark:
    """Fixed text, white space around it left out.

    Attributes:
        final: the end of the whole text may stand for it, or for the rest of it.
    """

    text: str
    final: bool = False

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from reader.space()
        for expected in self.text:
            char = yield from reader.char()
            if self.final and not char:
                break
            if char != expected:
                raise Mismatch
            reader.at += 1


@dataclass(frozen=True, slots=True)
class Maybe:
    """Parts that may be missing."""

    parts: tuple[Part, ...]

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from first_of(((*self.parts,), ()), reader, job)


@dataclass(frozen=True, slots=True)
class Either:
    """The first of several alternatives that fits."""

    choices: tuple[tuple[Part, ...], ...]

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from first_of(self.choices, reader, job)


def first_of(choices: Sequence[Sequence[Part]], reader: Reader, job: Job) -> Steps[None]:
    """Read the first of the choices that fits. One that has given something out is the choice."""
    begin, name = reader.at, job.name
    outer, reader.committed = reader.committed, False
    for parts in choices[:-1]:
        try:
            yield from read_all(parts, reader, job)
        except Mismatch:
            if reader.committed:
                raise
            reader.at, job.name = begin, name
        else:
            reader.committed = reader.committed or outer
            return
    reader.committed = outer
    yield from read_all(choices[-1], reader, job)


@dataclass(frozen=True, slots=True)
class Many:
    """The parts once or more often, with a separator in between.

    Attributes:
        between: separators of which one is enough; with "" among them there may be none.
    """

    parts: tuple[Part, ...]
    between: tuple[str, ...] = ("",)

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from read_all(self.parts, reader, job)
        while True:
            begin = reader.at
            outer, reader.committed = reader.committed, False
            try:
                yield from reader.space()
                yield from self._separator(reader)
                yield from read_all(self.parts, reader, job)
            except Mismatch:
                if reader.committed:
                    raise
                reader.at = begin
                return
            finally:
                reader.committed = reader.committed or outer

    def _separator(self, reader: Reader) -> Steps[None]:
        marks = tuple(mark for mark in self.between if mark)
        try:
            if marks:
                yield from reader.one_of(marks)
        except Mismatch:
            if "" not in self.between:
                raise
        yield from reader.space()


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a function, up to a character that is not part of it.

    Attributes:
        prefix, suffix: regular expressions of what stands around the name in the text.
        any: it is no name but something of that form that is passed over.
    """

    prefix: str = ""
    suffix: str = ""
    any: bool = False

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from reader.space()
        begin = reader.at
        yield from reader.run(_NAME)
        word = reader.slice(begin, reader.at)
        found = re.fullmatch(f"(?:{self.prefix})(?P<name>.*?)(?:{self.suffix})", word)
        if found is None or len(word) > MAX_NAME:
            raise Mismatch
        if not self.any:
            job.check(found["name"])


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of the call named before, as a JSON object. `null` and, if `optional`, nothing are an empty one."""

    optional: bool = False

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from reader.space()
        char = yield from reader.char()
        if char == "{":
            yield from streamed(reader, job)
        elif char == "n":
            yield from reader.literal("null")
            empty(reader, job)
        elif self.optional:
            empty(reader, job)
        else:
            raise Mismatch


def streamed(reader: Reader, job: Job) -> Steps[None]:
    """Announce the call, and give out the JSON object that follows as it comes."""
    reader.announce(job.name)
    job.name = ""
    reader.passing = True
    yield from json_value(reader)
    reader.settle()
    reader.stop_passing()


def empty(reader: Reader, job: Job) -> None:
    reader.announce(job.name)
    job.name = ""
    reader.give("arguments", "{}")


@dataclass(frozen=True, slots=True)
class CallObject:
    """A JSON object that holds the name of the function and its arguments. Other keys are passed over.

    Attributes:
        arguments: keys that the arguments may have.
        leading: keys that may come before the name; None: any. A text that begins like JSON but is an answer is told
            from a call by its first key.
    """

    arguments: tuple[str, ...] = ("arguments", "parameters")
    leading: tuple[str, ...] | None = None

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from reader.space()
        yield from reader.literal("{")
        job.name = ""
        held = ""  # arguments that came before the name
        announced = False
        while True:
            yield from reader.space()
            key = yield from text_of_string(reader)
            yield from reader.space()
            yield from reader.literal(":")
            yield from reader.space()
            if announced:
                yield from json_value(reader)
            elif key == "name" and not job.name:
                job.check((yield from text_of_string(reader)))
            elif key in self.arguments and job.name:
                yield from Arguments().read(reader, job)
                announced = True
            elif not job.name and self.leading is not None and key not in self.leading:
                raise Mismatch
            else:
                begin = reader.at
                yield from json_value(reader)
                if key in self.arguments:
                    held = reader.slice(begin, reader.at)
            if not (yield from comma(reader, "}")):
                break
        reader.at += 1
        if not announced:
            self._announce(reader, job, held)
        reader.settle()

    def _announce(self, reader: Reader, job: Job, held: str) -> None:
        """Arguments that came before the name, or none at all."""
        if not job.name or (held and held[0] != "{" and held != "null"):
            raise Mismatch
        if held[:1] != "{":
            empty(reader, job)
            return
        reader.announce(job.name)
        job.name = ""
        reader.give("arguments", escaped(held))


def escaped(text: str) -> str:
    """JSON with the control characters within its strings escaped. (Outside of strings they are white space.)"""
    return re.sub(
        r'"(?:[^"\\]|\\.)*"', lambda string: re.sub("[\x00-\x1f]", lambda char: quoted(char[0]), string[0]), text,
        flags=re.DOTALL,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments as pairs of a parameter and a value, each between markers. The call is announced at the first one.

    A value that the function takes as a text is given out as it comes. Any other is given out once it has ended: JSON
    if it is JSON, else a text.

    Attributes:
        key: markers around a parameter's name.
        value: markers around its value.
        end: what follows the last pair.
        trim: one line break at either end of a value is not part of it.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    trim: bool = False

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        name = ""
        first = True
        while True:
            yield from reader.space()
            found = yield from reader.one_of((self.key[0], self.end))
            if first:
                name, job.name = job.name, ""
                reader.announce(name)
            if found == self.end:
                break
            key = yield from self._key(reader)
            reader.give("arguments", f'{"{" if first else ", "}"{quoted(key)}": ')
            first = False
            yield from self._value(reader, (name, key) in job.texts)
        reader.give("arguments", "{}" if first else "}")

    def _key(self, reader: Reader) -> Steps[str]:
        begin = reader.at
        while True:
            char = yield from reader.char()
            if not char or reader.at - begin > MAX_NAME:
                raise Mismatch
            if char == self.key[1][0]:
                break
            reader.at += 1
        key = reader.slice(begin, reader.at).strip(SPACE)
        yield from reader.literal(self.key[1])
        if self.value[0]:
            yield from reader.space()
            yield from reader.literal(self.value[0])
        return key

    def _value(self, reader: Reader, text: bool) -> Steps[None]:
        close = self.value[1]
        ends = until(("\n" + close, close) if self.trim else (close,))
        if self.trim and (yield from reader.char()) == "\n":
            reader.at += 1
        reader.settle()
        if text:
            reader.give("arguments", '"')
            closed = yield from reader.scan(ends, lambda part: reader.give("arguments", quoted(part)))
            if closed:
                reader.give("arguments", '"')
            return
        parts: list[str] = []
        closed = yield from reader.scan(ends, parts.append)
        value = "".join(parts)
        reader.give("arguments", settled(value) if closed else f'"{quoted(value)}')


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`f(a=1, b="x")`: literals by keyword."""

    def read(self, reader: Reader, job: Job) -> Steps[None]:
        yield from reader.space()
        begin = reader.at
        yield from identifier_path(reader)
        job.check(reader.slice(begin, reader.at))
        yield from reader.literal("(")
        reader.announce(job.name)
        job.name = ""
        first = True
        while True:
            yield from reader.space()
            char = yield from reader.char()
            if char == ")":
                break
            key = yield from identifier(reader)
            yield from reader.space()
            yield from reader.literal("=")
            reader.give("arguments", f'{"{" if first else ", "}"{key}": ')
            first = False
            yield from python_value(reader)
            if not (yield from comma(reader, ")")):
                break
        reader.at += 1
        reader.give("arguments", "{}" if first else "}")


def identifier_path(reader: Reader) -> Steps[None]:
    """The name of a function: an identifier, though names with dots and dashes are called too."""
    char = yield from reader.char()
    if not char or not (char.isalpha() or char == "_"):
        raise Mismatch
    yield from reader.run(_PATH)
