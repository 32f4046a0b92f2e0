"""This module owns stop patterns: regular expressions matched character by character, in time no pattern can blow up.

Python's `re` backtracks: one pattern such as `(a+)+b` would stall every stream of the process. Nor can it say whether
the end of a text may still become a match. So patterns are read by `re`'s own parser and run as a set of states that
move together (K. Thompson, "Regular expression search algorithm", 1968). Each live state remembers where its match
began: from there on the text has to be held back.

The text so far is searched after every character, for a match that ends there: `re.search(f"(?:{pattern})\\Z", text)`.
The first one found counts, so a match is no longer than it needs to be, and `$` and `\\b` at the end of a pattern hold
at the end of the text so far. A match of no characters does not count. Look-around, back-references, conditional and
atomic groups and possessive repeats need a backtracking matcher and are refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from radixlm.base.errors import BadRequest

#: Most states of all patterns of a request together: what one character may cost.
MAX_STATES = 256
#: Most characters of a match that are cut from the text, and so the most that patterns hold back.
MAX_MATCH = 256

# `re` keeps its parser in a private module whose tree has been the same from Python 3.11 on; there is no public one.
_parser: Any = importlib.import_module("re._parser")
_op: Any = importlib.import_module("re._constants")

_ACCEPT = 0  # the state in which a match is complete

# What a character is to `^`, `$`, `\b` beside it.
_EDGE, _NEWLINE, _OTHER, _ASCII_WORD, _WORD = range(5)


class PatternSet:
    """Patterns compiled into one machine. A pattern that is malformed, unsupported or too large is a `BadRequest`.

    Attributes:
        entry: the state before a match.
        begin: a regular expression of the characters that matches begin with; None if that depends on the one before.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._nodes: list[_Node] = [_Node()]
        entries = tuple(self._compile(pattern) for pattern in patterns)
        self.entry = self._add(_Node(entries))
        self._sees_edges = any(node.edge is not None for node in self._nodes)
        self._reached: dict[tuple[int, int, int], _Reach] = {}
        firsts = self.reach(self.entry, _EDGE, _EDGE).takes
        self.begin = None if self._sees_edges else "|".join(dict.fromkeys(chars.source for chars, _ in firsts))

    def context(self, char: str) -> int:
        """The part of a character (or of none, "") that the characters beside it depend on."""
        return _kind(char) if self._sees_edges else _EDGE

    def reach(self, state: int, before: int, after: int) -> _Reach:
        """Where a state leads between two characters of these contexts."""
        key = (state, before, after)
        if key not in self._reached:
            self._reached[key] = self._walk(*key)
        return self._reached[key]

    def _walk(self, state: int, before: int, after: int) -> _Reach:
        seen, waiting = {state}, [state]
        takes = []
        while waiting:
            node = self._nodes[waiting.pop()]
            if node.take is not None:
                takes.append(node.take)
            elif node.edge is None or node.edge.holds(before, after):
                fresh = [jump for jump in node.jumps if jump not in seen]
                seen.update(fresh)
                waiting += fresh
        return _Reach(tuple(takes), _ACCEPT in seen)

    def _compile(self, pattern: str) -> int:
        try:
            re.compile(pattern)
            tree = _parser.parse(pattern)
            return self._sequence(tree, tree.state.flags, _ACCEPT)
        except re.error as error:
            raise _refused(pattern, f"is not a valid regular expression: {error}") from None
        except _Unsupported as error:
            raise _refused(pattern, f"uses {error}, which stop patterns do not support") from None
        except _TooLarge:
            raise _refused(pattern, f"is too large: stop patterns may have {MAX_STATES} states in all") from None
        except (RecursionError, OverflowError):
            raise _refused(pattern, "is nested too deep or counts too far") from None

    def _sequence(self, nodes: Iterable[tuple[Any, Any]], flags: int, then: int) -> int:
        """Add the states of a parsed sequence, last first, and return where it begins; it goes on to state `then`."""
        for op, value in reversed(list(nodes)):
            then = self._one(op, value, flags, then)
        return then

    def _one(self, op: Any, value: Any, flags: int, then: int) -> int:
        if op in (_op.LITERAL, _op.NOT_LITERAL, _op.ANY, _op.IN):
            return self._add(_Node(take=(_Chars(_source(op, value), flags), then)))
        if op is _op.BRANCH:
            return self._add(_Node(tuple(self._sequence(branch, flags, then) for branch in value[1])))
        if op is _op.SUBPATTERN:
            _, added, removed, body = value
            return self._sequence(body, (flags | added) & ~removed, then)
        if op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
            least, most, body = value
            return self._repeat(least, most, body, flags, then)
        if op is _op.AT:
            return self._add(_Node((then,), edge=_Edge(value, flags)))
        raise _Unsupported(_UNSUPPORTED.get(str(op), str(op).lower()))

    def _repeat(self, least: int, most: int, body: Any, flags: int, then: int) -> int:
        entry = then
        if most is _op.MAXREPEAT:
            loop = _Node()
            entry = self._add(loop)
            loop.jumps = (self._sequence(body, flags, entry), then)
        else:
            for _ in range(most - least):
                entry = self._add(_Node((self._sequence(body, flags, entry), then)))
        for _ in range(least):
            last, entry = entry, self._sequence(body, flags, entry)
            if entry == last:  # a body of no states: the other rounds would add none either
                break
        return entry

    def _add(self, node: _Node) -> int:
        if len(self._nodes) > MAX_STATES:
            raise _TooLarge
        self._nodes.append(node)
        return len(self._nodes) - 1


class PatternScan:
    """The patterns over one text. Positions are in characters from its beginning."""

    __slots__ = ("_before", "_live", "_patterns", "_position")

    def __init__(self, patterns: PatternSet) -> None:
        self._patterns = patterns
        self._live: dict[int, int] = {}  # state -> where the longest match on its way through it began
        self._before = patterns.context("")
        self._position = 0

    def step(self, char: str) -> int:
        """Take the next character. The length of the match that ends with it, at most `MAX_MATCH`; 0 if none does."""
        patterns, before, here = self._patterns, self._before, self._patterns.context(char)
        end = patterns.context("")
        live: dict[int, int] = {}
        found = self._position + 1
        for state, start in [*self._live.items(), (patterns.entry, self._position)]:
            for chars, target in patterns.reach(state, before, here).takes:
                if chars[char] and live.get(target, found) > start:
                    live[target] = start
        self._position += 1
        for state, start in live.items():
            if start < found and patterns.reach(state, here, end).match:
                found = start
        live.pop(_ACCEPT, None)
        self._live, self._before = live, here
        return min(self._position - found, MAX_MATCH)

    @property
    def idle(self) -> bool:
        """No match is on its way."""
        return not self._live

    def skip(self, count: int) -> None:
        """Take so many characters at which no match begins (see `PatternSet.begin`), while idle."""
        self._position += count

    def held(self) -> int:
        """How many characters at the end may yet become part of a match."""
        if not self._live:
            return 0
        return min(self._position - min(self._live.values()), MAX_MATCH)

    def copy(self) -> PatternScan:
        twin = PatternScan(self._patterns)
        twin._live, twin._before, twin._position = self._live, self._before, self._position
        return twin


class _Node:
    """A state. It takes a character and goes on to one state, or goes on to `jumps` at once, where `edge` holds."""

    __slots__ = ("edge", "jumps", "take")

    def __init__(
        self, jumps: tuple[int, ...] = (), edge: _Edge | None = None, take: tuple[_Chars, int] | None = None
    ) -> None:
        self.jumps = jumps
        self.edge = edge
        self.take = take


class _Reach(NamedTuple):
    """Where a state leads: the (characters, next state) it waits for, and whether it completes a match as it is."""

    takes: tuple[tuple[_Chars, int], ...]
    match: bool


class _Chars(dict[str, bool]):
    """Which characters an element of a pattern takes, asked of `re` once per character."""

    def __init__(self, source: str, flags: int) -> None:
        super().__init__()
        letters = "".join(letter for letter, flag in (("a", re.A), ("i", re.I), ("s", re.S)) if flags & flag)
        self.source = f"(?{letters}:{source})"
        self._takes = re.compile(self.source).fullmatch

    def __missing__(self, char: str) -> bool:
        if len(self) >= 1024:  # a text in a script of many characters must not grow the table for ever
            self.clear()
        self[char] = taken = self._takes(char) is not None
        return taken


class _Edge:
    """A condition on the characters around a position: `^ $ \\A \\Z \\b \\B`."""

    __slots__ = ("_at", "_multiline", "_word")

    def __init__(self, at: Any, flags: int) -> None:
        self._at = at
        self._multiline = bool(flags & re.MULTILINE)
        self._word = (_ASCII_WORD,) if flags & re.ASCII else (_ASCII_WORD, _WORD)

    def holds(self, before: int, after: int) -> bool:
        line = (_EDGE, _NEWLINE) if self._multiline else (_EDGE,)
        if self._at is _op.AT_BEGINNING:
            return before in line
        if self._at is _op.AT_END:
            return after in line
        if self._at is _op.AT_BEGINNING_STRING:
            return before == _EDGE
        if self._at is _op.AT_END_STRING:
            return after == _EDGE
        boundary = (before in self._word) != (after in self._word)
        return boundary if self._at is _op.AT_BOUNDARY else not boundary


class _Unsupported(Exception):
    pass


class _TooLarge(Exception):
    pass


_UNSUPPORTED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "FAILURE": "look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}

_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}


def _refused(pattern: str, reason: str) -> BadRequest:
    shown = pattern if len(pattern) <= 80 else pattern[:77] + "..."
    return BadRequest(f"stop_regex {shown!r} {reason}", param="stop_regex")


def _source(op: Any, value: Any) -> str:
    """A parsed element that takes one character, written as a pattern again."""
    if op is _op.ANY:
        return "."
    if op is _op.LITERAL:
        return re.escape(chr(value))
    if op is _op.NOT_LITERAL:
        return f"[^{re.escape(chr(value))}]"
    parts = []
    for kind, item in value:
        if kind is _op.NEGATE:
            parts.append("^")
        elif kind is _op.RANGE:
            parts.append(f"{re.escape(chr(item[0]))}-{re.escape(chr(item[1]))}")
        elif kind is _op.CATEGORY:
            parts.append(_CATEGORIES[str(item)])
        else:
            parts.append(re.escape(chr(item)))
    return f"[{''.join(parts)}]"


def _kind(char: str) -> int:
    if not char:
        return _EDGE
    if char == "\n":
        return _NEWLINE
    if char.isalnum() or char == "_":
        return _ASCII_WORD if char.isascii() else _WORD
    return _OTHER
