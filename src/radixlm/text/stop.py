"""This module owns stop strings and stop patterns over text that arrives in pieces.

The text ends at the first character that completes a stop. Of several that are complete there, the longest is the
match, so it cuts the most; what comes after it is dropped. All of it goes character by character, so the result is the
same however the text was split. Text that may still become a stop is held back and never shown.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Sequence

from radixlm.base.errors import BadRequest
from radixlm.text.pattern import PatternScan, PatternSet

#: Most characters of all stop strings and stop patterns of a request together.
MAX_STOP_CHARS = 4096


class StopRules:
    """The stops of a request, compiled. Frozen and shareable; `scan` starts on one text.

    Attributes:
        keep: the match stays in the text.
        begin: finds where a stop can begin, which lets a scan skip what cannot; None if that depends on what is before.
    """

    def __init__(self, strings: StopStrings | None, patterns: PatternSet | None, keep: bool) -> None:
        self.strings = strings
        self.patterns = patterns
        self.keep = keep
        sources = [strings.begin if strings is not None else "", patterns.begin if patterns is not None else ""]
        self.begin = None if None in sources else re.compile("|".join(source for source in sources if source))

    def __bool__(self) -> bool:
        return self.strings is not None or self.patterns is not None

    def scan(self) -> StopScan:
        return StopScan(self)


def compile_stops(stop: Sequence[str], stop_regex: Sequence[str] = (), keep: bool = False) -> StopRules:
    """Compile the stops of a request. Empty strings are ignored. `keep` leaves the match in the text.

    Raises:
        BadRequest: they exceed `MAX_STOP_CHARS`, or a pattern is malformed, unsupported or too large (`text.pattern`).
    """
    strings = tuple(string for string in stop if string)
    patterns = tuple(pattern for pattern in stop_regex if pattern)
    for name, texts in (("stop", strings), ("stop_regex", patterns)):
        size = sum(map(len, texts))
        if size > MAX_STOP_CHARS:
            raise BadRequest(f"{name} holds {size} characters in all; at most {MAX_STOP_CHARS} are allowed", param=name)
    return StopRules(StopStrings(strings) if strings else None, PatternSet(patterns) if patterns else None, keep)


class StopStrings:
    """Strings as one automaton (A. Aho, M. Corasick, "Efficient string matching", 1975). State 0 has matched nothing.

    Attributes:
        longest: state -> length of the longest string that ends here, 0 if none does.
        held: state -> length of the longest end of the text that a further character can extend towards a string.
        begin: a regular expression of the characters that strings begin with.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.longest = [0]
        depth = [0]
        for string in strings:
            state = 0
            for char in string:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.longest.append(0)
                    depth.append(depth[state] + 1)
                state = self._next[state][char]
            self.longest[state] = len(string)
        self.held = [0] * len(depth)
        waiting = deque(self._next[0].values())
        while waiting:  # breadth first: a state's shorter suffixes are complete before it
            state = waiting.popleft()
            self.longest[state] = self.longest[state] or self.longest[self._fail[state]]
            self.held[state] = depth[state] if self._next[state] else self.held[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                waiting.append(child)
        self.begin = f"[{''.join(map(re.escape, self._next[0]))}]"

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


class StopScan:
    """The stops over one text.

    Attributes:
        matched: the text that stopped it, once one did; nothing may be fed after that.
    """

    __slots__ = ("_held", "_patterns", "_rules", "_state", "matched")

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._state = 0
        self._patterns = PatternScan(rules.patterns) if rules.patterns is not None else None
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Take more text; return what can be shown. Unless `armed`, stops completed within `text` do not count."""
        strings, patterns, begin = self._rules.strings, self._patterns, self._rules.begin
        position = 0
        while position < len(text):
            if begin is not None and self._state == 0 and (patterns is None or patterns.idle):
                found = begin.search(text, position)
                start = found.start() if found is not None else len(text)
                if patterns is not None:
                    patterns.skip(start - position)
                position = start
                if found is None:
                    break
            char = text[position]
            position += 1
            length = 0
            if strings is not None:
                self._state = strings.step(self._state, char)
                length = strings.longest[self._state]
            if patterns is not None:
                length = max(length, patterns.step(char))
            if length and armed:
                return self._stop(self._held + text[:position], length)
        whole = self._held + text
        by_string = strings.held[self._state] if strings is not None else 0
        by_pattern = patterns.held() if patterns is not None else 0
        shown = len(whole) - max(by_string, by_pattern)
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """What was held back, now that no text follows."""
        text, self._held = self._held, ""
        return text

    def stops_on(self, text: str) -> bool:
        """Would `text` complete a stop? The scan itself stays where it is."""
        twin = copy.copy(self)
        twin._patterns = self._patterns.copy() if self._patterns is not None else None
        twin.feed(text)
        return twin.matched is not None

    def _stop(self, text: str, length: int) -> str:
        begin = len(text) - length
        self.matched = text[begin:]
        self._held = ""
        return text if self._rules.keep else text[:begin]
