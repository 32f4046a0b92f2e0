"""Structural tags: free text, and JSON where a tag opens it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixlm.grammar.base import GrammarError
from support.grammars import accepts, compiled

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"enum": [1]}, "end": "</f>"},
        {"begin": "[[", "schema": True, "end": "]]"},
    ],
    "triggers": ["<f", "[["],
}


def grammar(**changes: Any) -> Any:
    return compiled("structural_tag", json.dumps({**TAG, **changes}))


def test_text_is_free_and_tags_are_not() -> None:
    tag = grammar()
    for text in ("", "no tags at all", 'Hello <f=x>{"a": 5}</f> bye', "<f=y>1</f>[[null]]<f=y>1</f>", "a < b [ c"):
        assert accepts(tag, text), text
    for text in ('<f=x>{"a": "s"}</f>', "<f=z>1</f>", "<f=x>{}</f>", "<f=y>2</f>", "[[nul]]", "half <f=x>"):
        assert not accepts(tag, text), text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"triggers": []}, "triggers"),
        ({"triggers": [""]}, "empty"),
        ({"structures": []}, "structures"),
        ({"triggers": ["<g"]}, "begins with none"),
        ({"structures": [{"begin": "<f"}]}, "end"),
        ({"structures": [{"begin": "<f", "end": "x", "schema": {"not": {}}}]}, "'not'"),
    ],
)
def test_what_is_malformed_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        grammar(**changes)


def test_forms_that_are_not_served_are_named() -> None:
    with pytest.raises(GrammarError, match="format"):
        compiled("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "any_text"}}))
