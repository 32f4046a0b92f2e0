"""This module owns regular expressions as grammars: Python's syntax and meaning, written out for a matcher.

The whole text has to match, as with `re.fullmatch`. The supported subset: literals and escapes, `.`, sets, `\\d`,
`\\w`, `\\s` and their opposites, groups (capturing, named or not), alternatives, repeats (greedy or lazy, which makes
no difference to what matches), `^ $ \\A \\Z` where the text begins and ends, the flags `s`, `a`, and `i` for ASCII
letters. Look-around, back-references, `\\b`, conditional and atomic groups and possessive repeats are refused.

A matcher may know other tables of Unicode than Python does. So a class stands for characters that are in it by both:
`\\d` and `\\s` are those of ASCII, `\\w` has the Latin, Greek, Cyrillic, Hebrew, Arabic, Thai, Kana, Han and Hangul
letters of one block each; and what a class leaves out is left out by both.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from radixlm.grammar.base import GrammarError

# `re` keeps its parser in a private module whose tree has been the same from Python 3.11 on; there is no public one.
_parser: Any = importlib.import_module("re._parser")
_op: Any = importlib.import_module("re._constants")

#: Letters that every version of Unicode in use has: ranges within blocks, without gaps.
_LETTERS = (
    "\\u{41}-\\u{5A}\\u{61}-\\u{7A}\\u{C0}-\\u{D6}\\u{D8}-\\u{F6}\\u{F8}-\\u{2C1}\\u{3A3}-\\u{3FF}\\u{400}-\\u{481}"
    "\\u{5D0}-\\u{5EA}\\u{620}-\\u{64A}\\u{E01}-\\u{E30}\\u{3041}-\\u{3096}\\u{30A1}-\\u{30FA}\\u{4E00}-\\u{9FA5}"
    "\\u{AC00}-\\u{D7A3}"
)
_SPACES = "\\u{9}-\\u{D}\\u{20}"

#: Class -> members of a set.
_CLASSES = {
    "CATEGORY_DIGIT": "0-9",
    "CATEGORY_SPACE": _SPACES,
    "CATEGORY_WORD": "0-9_" + _LETTERS.replace("\\u{3A3}-\\u{3FF}", "\\u{3A3}-\\u{3F5}\\u{3F7}-\\u{3FF}"),
    "CATEGORY_NOT_DIGIT": "\\P{Nd}",
    "CATEGORY_NOT_SPACE": "[^\\s\\u{1C}-\\u{1F}]",
    "CATEGORY_NOT_WORD": "[^\\p{L}\\p{N}_]",
}
_ASCII_CLASSES = {
    "CATEGORY_DIGIT": "0-9",
    "CATEGORY_SPACE": _SPACES,
    "CATEGORY_WORD": "0-9A-Za-z_",
    "CATEGORY_NOT_DIGIT": "[^0-9]",
    "CATEGORY_NOT_SPACE": f"[^{_SPACES}]",
    "CATEGORY_NOT_WORD": "[^0-9A-Za-z_]",
}
#: Where the standard's classes, which are those of ASCII, have to hold as well as Python's.
_STANDARD_CLASSES = {**_CLASSES, "CATEGORY_WORD": "0-9A-Za-z_"}
#: Members of a set that contain everything both tables have of a class: for sets that exclude it.
_WIDE_CLASSES = {
    "CATEGORY_DIGIT": "\\p{Nd}",
    "CATEGORY_SPACE": "\\s\\u{1C}-\\u{1F}",
    "CATEGORY_WORD": "\\p{L}\\p{N}_",
    "CATEGORY_NOT_DIGIT": "[^0-9]",
    "CATEGORY_NOT_SPACE": f"[^{_SPACES}]",
    "CATEGORY_NOT_WORD": f"[^0-9_{_LETTERS}]",
}

_BEGINNINGS, _ENDINGS = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")

#: A flag beside those of `re`: a pattern of a JSON schema.
_STANDARD = 1 << 24

_UNSUPPORTED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "back-references",
    "GROUPREF_EXISTS": "conditional groups",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repeats",
    "FAILURE": "sets that match nothing",
}


def translated(pattern: str) -> str:
    """The expression in the syntax of Rust's `regex`, without anchors: it is meant to match the whole text.

    Raises:
        GrammarError: the pattern is malformed or outside of the subset.
    """
    try:
        re.compile(pattern)
        tree = _parser.parse(pattern)
    except re.error as error:
        raise GrammarError(f"the regex is malformed: {error}") from None
    except (RecursionError, OverflowError):
        raise GrammarError("the regex is nested too deep, or counts too far") from None
    try:
        return _sequence(list(tree), tree.state.flags, True, True)
    except RecursionError:
        raise GrammarError("the regex is nested too deep") from None


def searched(pattern: str) -> str:
    """A pattern of a JSON schema, so that what matches it does by the standard (ECMA 262) and by Python alike.

    It need not match the whole text; anchors stay. A pattern that is not in the common subset is returned as it is.
    """
    try:
        re.compile(pattern)
        tree = _parser.parse(pattern)
        nodes, flags = list(tree), tree.state.flags
        first = bool(nodes) and _is_anchor(nodes[0], flags, _BEGINNINGS[:1])
        last = len(nodes) > first and _is_anchor(nodes[-1], flags, _ENDINGS[:1])
        body = _sequence(nodes[first : len(nodes) - last], flags | _STANDARD, False, False)
    except (re.error, RecursionError, OverflowError, GrammarError):
        return pattern
    return f"{'^' if first else ''}(?:{body}){'$' if last else ''}"


def quoted(text: str) -> str:
    """An expression that matches this text alone."""
    return "".join(map(_char, map(ord, text)))


def _sequence(nodes: list[Any], flags: int, first: bool, last: bool) -> str:
    """`first`, `last`: nothing of the text comes before, or after, this sequence."""
    parts = []
    while first and nodes and _is_anchor(nodes[0], flags, _BEGINNINGS):
        nodes = nodes[1:]
    while last and nodes and _is_anchor(nodes[-1], flags, _ENDINGS):
        nodes = nodes[:-1]
    for i, (op, value) in enumerate(nodes):
        parts.append(_one(op, value, flags, first and i == 0, last and i == len(nodes) - 1))
    return "".join(parts)


def _is_anchor(node: Any, flags: int, kinds: tuple[str, ...]) -> bool:
    op, value = node
    return op is _op.AT and str(value) in kinds and not (flags & re.MULTILINE and not str(value).endswith("STRING"))


def _one(op: Any, value: Any, flags: int, first: bool, last: bool) -> str:
    if op is _op.LITERAL:
        return _literal(value, flags)
    if op is _op.NOT_LITERAL:
        return _set([(_op.NEGATE, None), (_op.LITERAL, value)], flags)
    if op is _op.ANY:
        return "(?s:.)" if flags & re.DOTALL else "[^\\n]"
    if op is _op.IN:
        return _set(value, flags)
    if op is _op.BRANCH:
        return "(?:" + "|".join(_sequence(list(branch), flags, first, last) for branch in value[1]) + ")"
    if op is _op.SUBPATTERN:
        _, added, removed, body = value
        return "(?:" + _sequence(list(body), (flags | added) & ~removed, first, last) + ")"
    if op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
        least, most, body = value
        once = most == 1
        inner = _sequence(list(body), flags, first and once, last and once)
        if not inner:
            return ""
        bound = "" if most is _op.MAXREPEAT else str(most)
        return f"(?:{inner}){{{least},{bound}}}"
    if op is _op.AT:
        raise GrammarError(f"the regex uses {_ANCHORS.get(str(value), str(value))}, which is not supported there")
    what = _UNSUPPORTED.get(str(op), str(op).lower())
    raise GrammarError(f"the regex uses {what}, which constrained decoding does not support")


_ANCHORS = {
    "AT_BEGINNING": "^ within the text",
    "AT_BEGINNING_STRING": "\\A within the text",
    "AT_END": "$ within the text",
    "AT_END_STRING": "\\Z within the text",
    "AT_BOUNDARY": "\\b",
    "AT_NON_BOUNDARY": "\\B",
}


def _char(code: int) -> str:
    char = chr(code)
    if 0xD800 <= code <= 0xDFFF:
        raise GrammarError("the regex holds half of a surrogate pair, which no text has")
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:X}}}"


def _literal(code: int, flags: int) -> str:
    twin = _twin(code, flags)
    return _char(code) if twin is None else f"[{_char(code)}{_char(twin)}]"


def _twin(code: int, flags: int) -> int | None:
    """The other case of an ASCII letter, where case is ignored. Of other letters only the one written is allowed."""
    char = chr(code)
    return ord(char.swapcase()) if flags & re.IGNORECASE and char.isascii() and char.isalpha() else None


def _set(members: list[Any], flags: int) -> str:
    negated = members[0][0] is _op.NEGATE
    if negated and flags & re.IGNORECASE:
        raise GrammarError("the regex ignores case in a set that excludes characters, which is not supported")
    if flags & re.ASCII:
        classes = _ASCII_CLASSES
    elif negated:
        classes = _WIDE_CLASSES
    else:
        classes = _STANDARD_CLASSES if flags & _STANDARD else _CLASSES
    parts = []
    for op, value in members[negated:]:
        if op is _op.LITERAL:
            twin = _twin(value, flags)
            parts.append(_char(value) + ("" if twin is None else _char(twin)))
        elif op is _op.RANGE:
            low, high = value
            parts.extend(_ranges(low, high, flags))
        else:
            parts.append(classes[str(value)])
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _ranges(low: int, high: int, flags: int) -> list[str]:
    # Surrogates are no characters: a range passes over them.
    cut = [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]
    found = [f"{_char(a)}-{_char(b)}" for a, b in cut if a <= b]
    if flags & re.IGNORECASE:
        for first, last, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
            a, b = max(low, first), min(high, last)
            if a <= b:
                found.append(f"{_char(a + shift)}-{_char(b + shift)}")
    return found
