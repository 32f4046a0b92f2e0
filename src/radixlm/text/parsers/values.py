"""This module owns values within tool calls: JSON as it stands, Python's literals and marked-up text turned into JSON.

All of them take one character after the other. What is read of JSON is a beginning of valid JSON at every moment.
"""

from __future__ import annotations

import json
import re

from radixlm.text.parsers.reader import SPACE, Mismatch, Reader, Steps

#: Deeper values are no match.
MAX_DEPTH = 128

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = re.compile("[0-9]*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PYTHON_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}


def quoted(text: str) -> str:
    """The text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# ---- JSON


def json_value(reader: Reader) -> Steps[None]:
    """Read one JSON value. Control characters in strings, which models write, are given out escaped while passing.

    Raises:
        Mismatch: at the first character with which it is no beginning of a JSON value.
    """
    closing: list[str] = []
    while True:
        yield from _scalar_or_open(reader, closing)
        while closing:
            yield from reader.space()
            char = yield from reader.char()
            if char == ",":
                reader.at += 1
                yield from reader.space()
                if closing[-1] == "}":
                    yield from _key(reader)
                break
            if char != closing[-1]:
                raise Mismatch
            reader.at += 1
            closing.pop()
        else:
            return


def _scalar_or_open(reader: Reader, closing: list[str]) -> Steps[None]:
    """Read a value without parts, or the opening of an object or a list, up to where a value or a comma is next."""
    while True:
        yield from reader.space()
        char = yield from reader.char()
        if char in ("{", "["):
            if len(closing) == MAX_DEPTH:
                raise Mismatch
            reader.at += 1
            yield from reader.space()
            following = yield from reader.char()
            if following == ("}" if char == "{" else "]"):
                reader.at += 1
                return
            closing.append("}" if char == "{" else "]")
            if char == "{":
                yield from _key(reader)
            continue
        if char == '"':
            yield from json_string(reader)
        elif char and char in "-0123456789":
            yield from _number(reader)
        elif char in ("t", "f", "n"):
            yield from reader.literal({"t": "true", "f": "false", "n": "null"}[char])
        else:
            raise Mismatch
        return


def _key(reader: Reader) -> Steps[None]:
    yield from json_string(reader)
    yield from reader.space()
    yield from reader.literal(":")


def json_string(reader: Reader) -> Steps[None]:
    yield from reader.literal('"')
    while True:
        yield from reader.run(_PLAIN)
        char = yield from reader.char()
        if char == '"':
            reader.at += 1
            return
        if char == "\\":
            reader.at += 1
            escape = yield from reader.char()
            if not escape or escape not in '"\\/bfnrtu':
                raise Mismatch
            reader.at += 1
            for _ in range(4 if escape == "u" else 0):
                digit = yield from reader.char()
                if not digit or digit not in "0123456789abcdefABCDEF":
                    raise Mismatch
                reader.at += 1
        elif char:
            control(reader, char)
        else:
            raise Mismatch


def control(reader: Reader, char: str) -> None:
    """A control character within a string: JSON wants it escaped."""
    if not reader.passing:
        reader.at += 1
        return
    reader.settle()
    reader.at += 1
    reader.give("arguments", quoted(char))


def _number(reader: Reader) -> Steps[None]:
    char = yield from reader.char()
    if char == "-":
        reader.at += 1
        char = yield from reader.char()
    if char == "0":
        reader.at += 1
    else:
        yield from _digits(reader)
    char = yield from reader.char()
    if char == ".":
        reader.at += 1
        yield from _digits(reader)
        char = yield from reader.char()
    if char and char in "eE":
        reader.at += 1
        char = yield from reader.char()
        if char and char in "+-":
            reader.at += 1
        yield from _digits(reader)


def _digits(reader: Reader) -> Steps[None]:
    char = yield from reader.char()
    if not char or char not in "0123456789":
        raise Mismatch
    yield from reader.run(_DIGITS)


def text_of_string(reader: Reader) -> Steps[str]:
    """Read a JSON string and return what it says."""
    begin = reader.at
    yield from json_string(reader)
    try:
        text = json.loads(reader.slice(begin, reader.at), strict=False)
    except ValueError:
        raise Mismatch from None
    assert isinstance(text, str)
    return text


# ---- Python


def python_value(reader: Reader, depth: int = 0) -> Steps[None]:
    """Read one Python literal; give it out as JSON. Numbers and words are given out once they have ended.

    Raises:
        Mismatch: it is none, or has no JSON (a set, an infinite number, a key that is no string).
    """
    if depth == MAX_DEPTH // 4:
        raise Mismatch
    yield from reader.space()
    char = yield from reader.char()
    if char in ("'", '"'):
        yield from _python_string(reader, char)
    elif char in ("[", "("):
        yield from _python_items(reader, "]" if char == "[" else ")", depth)
    elif char == "{":
        yield from _python_dict(reader, depth)
    else:
        begin = reader.at
        yield from reader.run(_WORD)
        reader.give("arguments", _python_scalar(reader, begin))


def _python_scalar(reader: Reader, begin: int) -> str:
    word = reader.slice(begin, reader.at)
    known = _PYTHON_WORDS.get(word)
    if known is not None:
        return known
    if _NUMBER.fullmatch(word):
        return word
    try:
        value: float = int(word, 0) if word.lstrip("+-")[:1].isdigit() and "." not in word else float(word)
        return json.dumps(value, allow_nan=False)
    except ValueError:
        pass
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        raise Mismatch from None


def _python_string(reader: Reader, quote: str) -> Steps[None]:
    reader.at += 1
    end = quote
    char = yield from reader.char()
    if char == quote:
        reader.at += 1
        char = yield from reader.char()
        if char != quote:
            reader.give("arguments", '""')
            return
        reader.at += 1
        end = quote * 3
    reader.give("arguments", '"')
    run = re.compile(rf"[^\\{quote}]*")
    while True:
        yield from _given_run(reader, run)
        char = yield from reader.char()
        if char == quote:
            if (yield from _ends(reader, end)):
                reader.give("arguments", '"')
                return
            reader.give("arguments", quoted(reader.slice(reader.mark, reader.at)))
        elif char == "\\":
            yield from _python_escape(reader)
        else:
            raise Mismatch


def _given_run(reader: Reader, pattern: re.Pattern[str]) -> Steps[None]:
    """Read on while the pattern matches, and give it out as part of a string as it comes."""
    step = reader.run(pattern)
    while True:
        try:
            next(step)
        except StopIteration:
            reader.give("arguments", quoted(reader.slice(reader.mark, reader.at)))
            return
        reader.give("arguments", quoted(reader.slice(reader.mark, reader.at)))
        yield


def _ends(reader: Reader, end: str) -> Steps[bool]:
    """Read the quotes that end a string, or those (fewer) that do not."""
    for expected in end:
        char = yield from reader.char()
        if char != expected:
            return False
        reader.at += 1
    return True


def _python_escape(reader: Reader) -> Steps[None]:
    reader.at += 1
    char = yield from reader.char()
    if not char:
        raise Mismatch
    reader.at += 1
    if char in _HEX:
        begin = reader.at
        for _ in range(_HEX[char]):
            digit = yield from reader.char()
            if not digit or digit not in "0123456789abcdefABCDEF":
                raise Mismatch
            reader.at += 1
        code = int(reader.slice(begin, reader.at), 16)
        if code > 0x10FFFF:
            raise Mismatch
        # Half of a surrogate pair cannot be sent as text; as an escape it is JSON.
        reader.give("arguments", f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code)))
        return
    reader.give("arguments", quoted(_PYTHON_ESCAPES.get(char, "\\" + char)))


def _python_items(reader: Reader, close: str, depth: int) -> Steps[None]:
    """A list, or a tuple, which is a list too."""
    reader.at += 1
    reader.give("arguments", "[")
    first = True
    while True:
        yield from reader.space()
        char = yield from reader.char()
        if char == close:
            break
        if not first:
            reader.give("arguments", ", ")
        first = False
        yield from python_value(reader, depth + 1)
        if not (yield from comma(reader, close)):
            break
    reader.at += 1
    reader.give("arguments", "]")


def _python_dict(reader: Reader, depth: int) -> Steps[None]:
    reader.at += 1
    reader.give("arguments", "{")
    first = True
    while True:
        yield from reader.space()
        char = yield from reader.char()
        if char == "}":
            break
        if char not in ("'", '"'):
            raise Mismatch
        if not first:
            reader.give("arguments", ", ")
        first = False
        yield from _python_string(reader, char)
        yield from reader.space()
        yield from reader.literal(":")
        reader.give("arguments", ": ")
        yield from python_value(reader, depth + 1)
        if not (yield from comma(reader, "}")):
            break
    reader.at += 1
    reader.give("arguments", "}")


def comma(reader: Reader, close: str) -> Steps[bool]:
    """Read a comma and say True, or stop before the closing character and say False."""
    yield from reader.space()
    char = yield from reader.char()
    if char == ",":
        reader.at += 1
        return True
    if char != close:
        raise Mismatch
    return False


def identifier(reader: Reader) -> Steps[str]:
    begin = reader.at
    yield from reader.run(_WORD)
    word = reader.slice(begin, reader.at)
    if not _IDENTIFIER.fullmatch(word):
        raise Mismatch
    return word


# ---- text between markers


def settled(text: str) -> str:
    """The JSON of a value that a format writes without quotes: itself where it is JSON, else a string."""
    word = text.strip(SPACE)
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    try:
        json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return f'"{quoted(text)}"'
    return word


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
