"""What a regular expression allows, Python's `re` matches."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from radixlm.grammar.base import GrammarError
from radixlm.grammar.expression import _CLASSES, searched, translated
from support.grammars import accepts, compiled, draw

COUNT = 500
LETTERS = "abcXYZ019_é漢🙂 /\"'-.\n\t"
CLASSES = ("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", ".")
RANGES = ("a-f", "0-5", "À-ÿ", "一-龥", "\\d", "\\s", "\\w")


def random_regex(rng: random.Random, depth: int = 0) -> str:
    """An expression of the documented subset."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.45 or depth > 2:
            part = re.escape(rng.choice(LETTERS))
        elif kind < 0.6:
            part = rng.choice(CLASSES)
        elif kind < 0.75:
            members = [re.escape(rng.choice(LETTERS)) for _ in range(rng.randint(1, 3))]
            members += [
                rng.choice(("a-f", "0-5", "À-ÿ", "一-龥", "\\d", "\\s", "\\w")) for _ in range(rng.randint(0, 2))
            ]
            part = f"[{rng.choice(('', '^'))}{''.join(members)}]"
        else:
            inner = "|".join(random_regex(rng, depth + 1) for _ in range(rng.randint(1, 3)))
            part = f"{rng.choice(('(', '(?:', f'(?P<g{rng.randrange(10**9)}>'))}{inner})"
        if rng.random() < 0.35:
            part = f"(?:{part})" + rng.choice(("?", "*", "+", "{2}", "{1,3}", "{0,2}", "*?", "+?", "{2,}"))
        parts.append(part)
    text = "".join(parts)
    if depth == 0 and rng.random() < 0.2:
        text = f"^(?:{text})$"
    if depth == 0 and rng.random() < 0.15:
        text = rng.choice(("(?s)", "(?a)", "(?as)")) + text
    return text


@pytest.mark.parametrize("part", range(10))
def test_every_text_matches(part: int) -> None:
    rng, drawn = random.Random(part), np.random.default_rng(part)
    finished = 0
    for _ in range(COUNT // 10):
        pattern = random_regex(rng)
        grammar = compiled("regex", pattern)
        for _ in range(3):
            text = draw(grammar, drawn, most=120)
            if text is not None:
                finished += 1
                assert re.fullmatch(pattern, text), (pattern, text)
    assert finished > COUNT // 10 * 2


@pytest.mark.parametrize("name", ["CATEGORY_WORD", "CATEGORY_DIGIT", "CATEGORY_SPACE"])
def test_classes_hold_nothing_that_python_has_not(name: str) -> None:
    python = {"CATEGORY_WORD": r"\w", "CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s"}[name]
    for low, high in re.findall(r"\\u\{(\w+)\}-\\u\{(\w+)\}", _CLASSES[name]):
        for code in range(int(low, 16), int(high, 16) + 1):
            assert re.fullmatch(python, chr(code)), hex(code)


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z",
        "(ab",
        "a{2,1}",
        "*a",
        "a**",
        "[z-a]",
        "\\",
        "(?=a)b",
        "(?<!a)b",
        "a\\b",
        "(a)\\1",
        "x^a",
        "a$b",
        "(?>a)b",
        "a++",
    ],
)
def test_what_is_malformed_or_unsupported_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="regex"):
        compiled("regex", pattern)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^ab$", ["ab"], ["a", "abc", ""]),
        ("^(?:ab)$|cd", ["ab", "cd"], ["abcd"]),
        ("(?i)yes|No", ["YES", "yEs", "no"], ["maybe"]),
        ("[é]{2}[à-ÿ]{3}[一-龥]{2}", ["éééàü漢字"], ["ééaàü漢字"]),
        ("a.c", ["abc", "a漢c"], ["a\nc"]),
        ("(?s)a.c", ["a\nc"], ["ac"]),
        ("\\w+", ["abc_1", "naïve", "漢字"], ["a b", "-"]),
        ("\\d", ["7"], ["x", "77"]),
        ("a/b\\.c", ["a/b.c"], ["a/bxc"]),
        ("", [""], ["a"]),
    ],
)
def test_texts_are_taken_or_not(pattern: str, yes: list[str], no: list[str]) -> None:
    grammar = compiled("regex", pattern)
    for text in yes:
        assert re.fullmatch(pattern, text) and accepts(grammar, text), text
    for text in no:
        assert not re.fullmatch(pattern, text) and not accepts(grammar, text), text


def test_patterns_of_schemas_keep_their_anchors() -> None:
    assert searched("^a") == "^(?:a)" and searched("a$") == "(?:a)$" and searched("a") == "(?:a)"
    assert searched("^a|b$") == "^a|b$"  # what the anchors mean there is left to the backend
    assert searched("\\p{L}") == "\\p{L}"
    assert translated("a") == "a"
