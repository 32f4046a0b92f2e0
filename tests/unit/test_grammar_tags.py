"""Structural tags: what a format means, whoever enforces it. The oracle is `support.tags`."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from radixlm.grammar.base import Compiled, GrammarError
from support.grammars import accepts, compiled, draw
from support.tags import Maker, belongs, sample

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


def old(**changes: Any) -> Compiled:
    return compiled("structural_tag", json.dumps({**TAG, **changes}))


def grammar(form: Any) -> Compiled:
    item = form if isinstance(form, dict) else msgspec.to_builtins(form)
    return compiled("structural_tag", json.dumps({"type": "structural_tag", "format": item}))


def const(value: str) -> Any:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any, end: Any) -> Any:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TEXT = {"type": "any_text"}


def test_text_is_free_and_tags_are_not() -> None:
    whole = old()
    for text in ("", "no tags at all", 'Hello <f=x>{"a": 5}</f> bye', "<f=y>1</f>[[null]]<f=y>1</f>", "a < b [ c"):
        assert accepts(whole, text), text
    for text in ('<f=x>{"a": "s"}</f>', "<f=z>1</f>", "<f=x>{}</f>", "<f=y>2</f>", "[[nul]]", "half <f=x>"):
        assert not accepts(whole, text), text


@pytest.mark.parametrize("part", range(6))
def test_a_grammar_has_the_texts_of_its_format(part: int) -> None:
    """Texts of the format are taken; texts that are taken, drawn or spoilt, are of the format."""
    rng, drawn, spoilt = random.Random(part), 0, 0
    for turn in range(12):
        item = Maker(rng).format()
        made = grammar(item)
        texts = [sample(item, rng) for _ in range(4)]
        for text in texts:
            assert belongs(item, text), (item, text)
            assert accepts(made, text), (item, text)
        for text in [draw(made, np.random.default_rng(turn), 60) for _ in range(2)]:
            if text is not None:
                drawn += 1
                assert belongs(item, text), (item, text)
        for text in texts:
            if text:
                at = rng.randrange(len(text))
                text = text[:at] + rng.choice(["", "<", "x", text[at:][:2]]) + text[at + 1 :]
                spoilt += not accepts(made, text)
                assert belongs(item, text) or not accepts(made, text), (item, text)
    assert drawn >= 6 and spoilt >= 12


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        (TEXT, ["", "anything\n漢"], []),
        ({**TEXT, "excludes": ["bad"], "max_chars": 5}, ["", "ba d", "12345"], ["bad", "xbad", "123456"]),
        ({"type": "sequence", "elements": [TEXT, const("END")]}, ["END", "xEND", "ENEND"], ["", "x", "xENDy"]),
        (tag("<a>", TEXT, ["</a>", "</b>"]), ["<a>x</b>", "<a></a>"], ["<a>x", "<a></b></a>"]),
        (tag("<a>", {"type": "regex", "pattern": "[a-z]+"}, "end"), ["<a>abend", "<a>endend"], ["<a>end", "<a>ab"]),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": "[0-9]*"}, const("0"), const("x")]},
            ["0x", "120x", "00x"],
            ["x", "12x"],
        ),
        (
            {"type": "grammar", "grammar": 'root ::= "a" x\nx ::= "b" | "c" x'},
            ["ab", "acccb"],
            ["a", "acc"],
        ),
        ({"type": "grammar", "syntax": "lark", "grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a"]),
        (
            {"type": "dispatch", "rules": [["<x", const("1")], ["<y", TEXT]], "loop": False, "excludes": ["no"]},
            ["", "n o", "a<x1", "a<yb<y"],
            ["no", "a<x1b", "a<x2"],
        ),
        (
            {"type": "dispatch", "rules": [["<x", const("1")], ["x<x", const("2")]]},
            ["<x1 <x1", "x<x2", "y<x1"],
            ["<x2"],
        ),
        (
            {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}},
            ["[]", "[1, 2]"],
            ["[1,2]", "[ ]", "[1.5]"],
        ),
    ],
)
def test_formats_one_by_one(form: Any, yes: list[str], no: list[str]) -> None:
    made = grammar(form)
    assert [text for text in yes if not accepts(made, text)] == []
    assert [text for text in no if accepts(made, text)] == []


CALL = {
    "type": "object",
    "properties": {
        "n": {"type": "string"},
        "a": {"type": "integer"},
        "e": {"type": "string", "enum": ["p", "q"]},
        "o": {"$ref": "#/$defs/O"},
        "s": {"type": "string", "minLength": 1, "maxLength": 2},
    },
    "required": ["n"],
    "$defs": {"O": {"type": "object", "properties": {"k": {"type": "string"}}, "additionalProperties": False}},
}


@pytest.mark.parametrize(
    ("style", "before", "after"),
    [
        ("qwen_xml", "<parameter={}>", "</parameter>"),
        ("minimax_xml", '<parameter name="{}">', "</parameter>"),
        ("glm_xml", "<arg_key>{}</arg_key><arg_value>", "</arg_value>"),
    ],
)
def test_parameters_as_models_write_them(style: str, before: str, after: str) -> None:
    form = {"type": "json_schema", "json_schema": CALL, "style": style}
    made = grammar(tag("<c>", form, "</c>"))

    def write(**values: str) -> str:
        return "<c>" + "\n".join(before.format(key) + value + after for key, value in values.items()) + "</c>"

    for values in (
        {"n": "Bob"},
        {"n": "\nBo < b\n"},
        {"n": "", "a": "5"},
        {"n": "x", "a": "\n5\n", "e": "q", "o": '{"k": "v"}', "s": "漢字"},
    ):
        assert accepts(made, write(**values)), values
    for values in (
        {},
        {"a": "5"},
        {"n": "x", "a": "five"},
        {"n": "x", "e": "r"},
        {"n": "x", "o": '{"z": 1}'},
        {"n": "x", "s": ""},
        {"n": "x", "s": "abc"},
        {"n": "x", "z": "1"},
        {"e": "p", "n": "x"},
    ):
        assert not accepts(made, write(**values)), values
    if style == "qwen_xml":
        assert accepts(grammar({"type": "qwen_xml_parameter", "json_schema": CALL}), write(n="x")[3:-4])


def test_special_tokens_are_tokens() -> None:
    """`<|im_end|>` is one, so that its text, spelled with ordinary tokens, is not it."""
    token = {"type": "token", "token": "<|im_start|>"}
    made = grammar({"type": "sequence", "elements": [TEXT, token, const("a")]})
    matcher = made.matcher()
    assert matcher.accept(1) and not matcher.done
    assert accepts(grammar({"type": "sequence", "elements": [TEXT, const("<|im_start|>")]}), "<|im_start|>")
    assert not accepts(made, "<|im_start|>a")


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
        old(**changes)


def nested(depth: int) -> Any:
    form: Any = const("x")
    for _ in range(depth):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"type": "hologram"}, "hologram"),
        ({"value": "x"}, "type"),
        (5, "object"),
        ({"type": "const_string"}, "value"),
        ({**TEXT, "surprise": 1}, "surprise"),
        ({**TEXT, "max_tokens": 4}, "max_tokens"),
        ({**TEXT, "max_chars": 100_000}, "4096"),
        ({**TEXT, "excludes": [""]}, "empty text"),
        ({"type": "sequence", "elements": []}, "elements"),
        ({"type": "sequence", "elements": [TEXT, TEXT]}, "followed by a fixed text"),
        ({"type": "star", "content": TEXT}, "followed by a fixed text"),
        ({"type": "repeat", "min": 3, "max": 2, "content": const("a")}, "impossible"),
        ({"type": "regex", "pattern": "(?=a)"}, "look-around"),
        ({"type": "grammar", "grammar": "root ::= ("}, "malformed"),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"type": "json_schema", "json_schema": {}, "any_order": True}, "any_order"),
        ({"type": "json_schema", "json_schema": False}, "nothing"),
        ({"type": "json_schema", "json_schema": {"type": "object"}, "style": "cuneiform"}, "cuneiform"),
        ({"type": "qwen_xml_parameter", "json_schema": {"minProperties": 1}}, "minProperties"),
        ({"type": "qwen_xml_parameter", "json_schema": {"required": ["a"]}}, "'a' is required"),
        ({"type": "token", "token": "word"}, "special token"),
        ({"type": "token", "token": 4000}, "special token"),
        ({"type": "any_tokens"}, "any_tokens is not served"),
        (nested(60), "deep"),
        (nested(300), "deep"),
    ],
)
def test_formats_that_are_not_served_are_named(form: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        grammar(form)
