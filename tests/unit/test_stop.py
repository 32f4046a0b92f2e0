"""Stops over text in pieces, against a search of every prefix of the whole text with Python's own `re`."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixlm.base.errors import BadRequest
from radixlm.text.pattern import MAX_MATCH, PatternScan, PatternSet
from radixlm.text.stop import MAX_STOP_CHARS, StopScan, compile_stops


def expected(text: str, strings: list[str], patterns: list[str], armed_from: int = 0) -> tuple[str, str | None]:
    """The text before the first stop to be completed, and that stop: the longest of those complete there."""
    searches = [re.compile(rf"(?:{pattern})\Z").search for pattern in patterns]
    for end in range(armed_from + 1, len(text) + 1):
        begins = [end - len(string) for string in strings if string and text[:end].endswith(string)]
        for search in searches:
            match = search(text[:end])
            if match and match.start() < end:
                begins.append(max(match.start(), end - MAX_MATCH))
        if begins:
            return text[: min(begins)], text[min(begins) : end]
    return text, None


def feed(scan: StopScan, pieces: list[str]) -> str:
    shown = ""
    for piece in pieces:
        shown += scan.feed(piece)
        if scan.matched is not None:
            return shown
    return shown + scan.flush()


def split(text: str, sizes: list[int]) -> list[str]:
    """`text` in pieces of these sizes, the last one repeating."""
    pieces, start = [], 0
    while start < len(text):
        size = sizes[min(len(pieces), len(sizes) - 1)]
        pieces.append(text[start : start + size])
        start += size
    return pieces


def regexes() -> st.SearchStrategy[str]:
    """Patterns of everything that is supported."""
    single = st.sampled_from(
        [
            "a",
            "b",
            "A",
            "é",
            "1",
            " ",
            r"\n",
            ".",
            "[ab]",
            "[^a]",
            "[a-c1]",
            r"[\d\s]",
            r"\w",
            r"\W",
            r"\d",
            r"\S",
            r"\.",
        ]
    )

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}", "{2,}"])
        edges = st.sampled_from(["^", r"\b", r"\B", r"\A"])
        return st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(inner, repeats).map(lambda both: f"({both[0]}){both[1]}"),
            st.tuples(edges, inner).map("".join),
            st.tuples(inner, st.sampled_from([r"\b", r"\B", r"\Z"])).map("".join),
            inner.map(lambda pattern: f"(?i:{pattern})"),
            inner.map(lambda pattern: f"(?s:{pattern})"),
            inner.map(lambda pattern: f"(?m:^{pattern}$)"),
        )

    return st.recursive(single, grow, max_leaves=6)


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
STRINGS = st.lists(st.text("ab\n", max_size=5), max_size=4)
TEXTS = st.text("aabbc1 \nAéÉ.", max_size=16)


@settings(max_examples=500, deadline=None)
@given(text=st.text("ab\nc", max_size=20), strings=STRINGS, sizes=SIZES, keep=st.booleans())
@example(text="one, two, three, four", strings=["two, th"], sizes=[3], keep=False)
@example(text="abcd", strings=["abcd", "bc"], sizes=[1], keep=False)  # the inner one is complete first
@example(text="xab", strings=["b", "ab"], sizes=[3], keep=False)  # both at once: the longer one
def test_strings_stop_at_the_first_to_be_completed(text: str, strings: list[str], sizes: list[int], keep: bool) -> None:
    before, matched = expected(text, strings, [])
    scan = compile_stops(strings, keep=keep).scan()
    shown = feed(scan, split(text, sizes))
    assert scan.matched == matched
    assert shown == (before + (matched or "") if keep else before)


@settings(max_examples=500, deadline=None)
@given(text=TEXTS, pattern=regexes(), strings=STRINGS, sizes=SIZES)
def test_patterns_stop_where_a_search_of_every_prefix_does(
    text: str, pattern: str, strings: list[str], sizes: list[int]
) -> None:
    before, matched = expected(text, strings, [pattern])
    scan = compile_stops(strings, [pattern]).scan()
    assert feed(scan, split(text, sizes)) == before
    assert scan.matched == matched


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=20), strings=STRINGS, sizes=SIZES, armed=st.booleans())
def test_only_what_may_become_a_stop_is_held_back(text: str, strings: list[str], sizes: list[int], armed: bool) -> None:
    scan = compile_stops(strings).scan()
    seen = shown = ""
    for piece in split(text, sizes):
        seen += piece
        shown += scan.feed(piece, armed)
        if scan.matched is not None:
            return
        growing = [s[:k] for s in strings for k in range(1, len(s)) if seen.endswith(s[:k])]
        assert shown == seen[: len(seen) - max(map(len, growing), default=0)]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, armed_from=st.integers(0, 16), strings=STRINGS, sizes=SIZES)
def test_stops_completed_before_they_count_are_text(
    text: str, armed_from: int, strings: list[str], sizes: list[int]
) -> None:
    armed_from = min(armed_from, len(text))
    scan = compile_stops(strings, [r"\n\n+|b1"]).scan()
    shown = "".join(scan.feed(piece, armed=False) for piece in split(text[:armed_from], sizes))
    assert scan.matched is None
    shown += feed(scan, split(text[armed_from:], sizes))
    assert (shown, scan.matched) == expected(text, strings, [r"\n\n+|b1"], armed_from)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, tail=st.text("ab\n1", max_size=3), strings=STRINGS)
def test_looking_ahead_changes_nothing(text: str, tail: str, strings: list[str]) -> None:
    def started() -> tuple[StopScan, str]:
        scan = compile_stops(strings, ["a+1"]).scan()
        return scan, scan.feed(text)

    scan, shown = started()
    if scan.matched is not None:
        return
    would = scan.stops_on(tail)
    twin, _ = started()
    assert shown + scan.feed(tail) == shown + twin.feed(tail)
    assert would == (scan.matched is not None)


def test_no_stops_are_no_rules() -> None:
    assert not compile_stops([])
    assert not compile_stops([""], [""])
    assert compile_stops(["", "x"])
    scan = compile_stops([""]).scan()
    assert scan.feed("one, two") == "one, two"


def test_what_follows_in_the_same_piece_is_dropped() -> None:
    scan = compile_stops(["w"]).scan()
    assert scan.feed("one, two, three") == "one, t"
    assert scan.matched == "w"
    scan = compile_stops(["two, th"], keep=True).scan()
    assert scan.feed("one, two, three") == "one, two, th"


def test_a_match_longer_than_the_bound_loses_its_last_characters_only() -> None:
    text = "<" + "x" * (2 * MAX_MATCH) + ">"
    scan = compile_stops([], ["<x+>"]).scan()
    shown = "".join(scan.feed(char) for char in text[:-1])
    assert len(text) - 1 - len(shown) == MAX_MATCH
    shown += scan.feed(">")
    assert shown == text[:-MAX_MATCH]
    assert scan.matched == text[-MAX_MATCH:]


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+$b", "(.*)*x", "(a?){60}a{60}b", "((a*)*)*b"])
def test_patterns_that_blow_up_a_backtracking_matcher_stay_cheap(pattern: str) -> None:
    scan = compile_stops([], [pattern]).scan()
    begin = time.perf_counter()
    for _ in range(500):
        scan.feed("aaaa")
    assert time.perf_counter() - begin < 5.0
    assert scan.matched is None


def test_a_scan_can_be_copied() -> None:
    scan = PatternScan(PatternSet(["abc"]))
    scan.step("a")
    twin = scan.copy()
    assert (twin.step("x"), scan.step("b")) == (0, 0)
    assert (twin.held(), scan.held()) == (0, 2)
    assert scan.step("c") == 3


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a valid regular expression"),
        ("[z-a]", "not a valid regular expression"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(?!)", "look-around"),
        (r"(a)\1", "back-reference"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("(?>ab)c", "atomic"),
        ("a++", "possessive"),
        ("a{5000}", "too large"),
        ("((a{50}){50}){50}", "too large"),
        ("a{99999999999}", "too deep or counts too far"),
        ("(" * 5000, "characters in all"),
    ],
)
def test_bad_patterns_are_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        compile_stops([], [pattern])
    assert caught.value.param == "stop_regex"
    assert len(str(caught.value)) < 400


def test_deep_nesting_is_compiled_or_refused() -> None:
    for depth in (10, 100, 1000):
        try:
            rules = compile_stops([], ["(" * depth + "ab" + ")" * depth])
        except BadRequest:
            continue
        assert rules.scan().feed("xaby") == "x"


def test_empty_repeats_compile_at_once() -> None:
    begin = time.perf_counter()
    for pattern in ("(?:){4000000000}b", "((){900}){900}b", "(((a{0}){900}){900}){900}b"):
        assert compile_stops([], [pattern]).scan().feed("aab") == "aa"
    assert time.perf_counter() - begin < 2.0


def test_too_many_characters_are_refused() -> None:
    assert compile_stops(["x" * MAX_STOP_CHARS])
    with pytest.raises(BadRequest, match=str(MAX_STOP_CHARS)) as caught:
        compile_stops(["x" * MAX_STOP_CHARS, "y"])
    assert caught.value.param == "stop"
