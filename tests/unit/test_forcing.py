"""Grammars that force calls: what they let through is read as calls whose arguments fit, and nothing else gets by."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from radixlm.base.errors import BadRequest
from radixlm.base.request import Parsing
from radixlm.text.parsers.choose import choose
from radixlm.text.parsers.engine import parse
from radixlm.text.parsers.forcing import WRITINGS, Function, either, is_text, object_schema, required, triggered
from radixlm.text.parsers.formats import TOOLS
from support.server import tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["x", "y z"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "deep": {"$ref": "#/$defs/point"},
    },
    "required": ["a", "flags"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False}},
}
FUNCTIONS = [Function("f", SCHEMA), Function("ping"), Function("free", {"type": "object", "properties": {}})]
NAMES = tuple(function.name for function in FUNCTIONS)
PARAMETERS = ("a", "kind", "flags", "deep")


class Words:
    """A small vocabulary whose control words of one format are special tokens, or not."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.backend = Backend.from_str(tokenizer().backend.to_str())
        self.backend.add_special_tokens([AddedToken(word, special=True) for word in words])
        self.special = {word: self.backend.token_to_id(word) for word in words}
        self.eos = tokenizer().eos_ids[0]
        self.size = self.backend.get_vocab_size()
        self.for_masks = llguidance.LLTokenizer(self.backend.to_str(), n_vocab=self.size, eos_token=self.eos)

    def matcher(self, lark: str) -> Any:
        matcher = llguidance.LLMatcher(self.for_masks, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def say(self, lark: str, seed: int, limit: int = 600) -> str | None:
        """Something that the grammar lets through, None if it does not come to an end."""
        source = random.Random(seed)
        matcher = self.matcher(lark)
        said: list[int] = []
        mask = np.zeros((self.size + 31) // 32, np.int32)
        while len(said) < limit:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.size]).tolist()
            token = self.eos if self.eos in allowed and source.random() < 0.5 else source.choice(allowed)
            if token == self.eos:
                return str(self.backend.decode(said, skip_special_tokens=False))
            assert matcher.consume_token(token), matcher.get_error()
            said.append(token)
        return None

    def takes(self, lark: str, text: str) -> bool:
        matcher = self.matcher(lark)
        tokens = self.backend.encode(text, add_special_tokens=False).ids
        if matcher.validate_tokens(tokens) < len(tokens):
            return False
        matcher.consume_tokens(tokens)
        return bool(matcher.is_accepting())


@cache
def words(name: str, special: bool) -> Words:
    return Words(TOOLS[name].words if special else ())


def check(name: str, text: str, single: bool) -> None:
    reasoning = "gpt-oss" if name == "gpt-oss" else ""
    pieces = parse(text, Parsing(tools=name, reasoning=reasoning, names=NAMES, texts=(("f", "kind"),)))
    kinds = [piece.kind for piece in pieces]
    assert "text" not in kinds and "call" in kinds, text
    assert kinds.count("call") == 1 or not single
    called = ""
    for piece in pieces:
        if piece.kind == "call":
            called = piece.text
        elif piece.kind == "arguments":
            arguments = json.loads(piece.text)
            if called != "f":
                assert arguments == {}
                continue
            assert 0 <= arguments["a"] <= 999 and set(arguments) <= set(PARAMETERS)
            assert arguments.get("kind", "x") in ("x", "y z") and all(type(flag) is bool for flag in arguments["flags"])


#: Formats whose reasoning may go before a call: nothing ends it in a vocabulary without its control words.
LED = [key for key, writing in WRITINGS.items() if writing.lead]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("name", "older"), WRITINGS)
def test_what_is_forced_is_a_call(name: str, older: bool, special: bool, parallel: bool) -> None:
    vocabulary = words(name, special)
    lark = required(WRITINGS[name, older], FUNCTIONS, parallel, vocabulary.special)
    said = [text for seed in range(12) if (text := vocabulary.say(lark, seed)) is not None]
    assert len(said) > (2 if (name, older) in LED else 8)
    for text in said:
        check(name, text, single=not parallel)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("name", "older"), [key for key in WRITINGS if key not in LED])
def test_a_marker_must_be_followed_by_a_call(name: str, older: bool, special: bool) -> None:
    writing, vocabulary = WRITINGS[name, older], words(name, special)
    call = next(
        text
        for seed in range(50)
        if (text := vocabulary.say(required(writing, FUNCTIONS[1:2], False, vocabulary.special), seed)) is not None
    )
    assert call.count("ping") == 1
    before = "I look. " if writing.open else ""
    for parallel in (False, True):
        lark = triggered(writing, FUNCTIONS, parallel, vocabulary.special)
        assert vocabulary.takes(lark, before + call)
        assert vocabulary.takes(lark, "no call at all, 1 < 2") and vocabulary.takes(lark, "")
        assert not vocabulary.takes(lark, before + call.replace("ping", "pong"))
        assert not vocabulary.takes(lark, before + (writing.open or writing.first) + " oh")
        if writing.open and not writing.begin:
            assert vocabulary.takes(lark, call + call) is parallel


def test_an_answer_of_a_given_form_or_a_call() -> None:
    vocabulary = words("hermes", False)
    lark = either(WRITINGS["hermes", False], FUNCTIONS, False, {}, {"type": "array", "items": {"type": "null"}})
    assert vocabulary.takes(lark, "[null, null]")
    assert vocabulary.takes(lark, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    assert not vocabulary.takes(lark, "text") and not vocabulary.takes(lark, "[1]")


def test_arguments_are_those_of_the_schema() -> None:
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    assert object_schema(Function("f")) == closed
    assert object_schema(Function("f", {})) == closed
    assert object_schema(Function("f", {"type": "object", "required": None})) == closed
    anything = {"type": "object", "additionalProperties": True}
    assert object_schema(Function("f", anything))["additionalProperties"] is True
    with pytest.raises(BadRequest, match="'f'"):
        object_schema(Function("f", {"type": "array"}))


@pytest.mark.parametrize(
    "loose", [{"not": {"const": 1}}, {"type": "string", "pattern": "^(?=a)b"}, {"type": "string", "format": "weird"}]
)
def test_what_cannot_be_enforced_is_left_open_unless_strict(loose: Any) -> None:
    schema = {"type": "object", "properties": {"k": loose, "n": {"type": "integer"}}, "required": ["n"]}
    made = object_schema(Function("f", schema))
    assert made["properties"] == {"k": {}, "n": {"type": "integer"}} and made["required"] == ["n"]
    with pytest.raises(BadRequest, match="'f'"):
        object_schema(Function("f", schema, strict=True))
    everywhere = {
        "type": "object",
        "uniqueItems": True,
        "$defs": {"d": loose},
        "properties": {"k": {"$ref": "#/$defs/d"}},
    }
    made = object_schema(Function("f", everywhere))
    assert "uniqueItems" not in made and made.get("properties", {"k": {}}) == {"k": {}}


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
def test_texts_without_quotes_have_the_length_of_their_schema(name: str) -> None:
    text = {"type": "string", "minLength": 2, "maxLength": 4}
    function = Function("f", {"type": "object", "properties": {"t": text}, "required": ["t"]})
    lark = required(WRITINGS[name, False], [function], False, {})
    for seed in range(5):
        said = words(name, False).say(lark, seed)
        assert said is not None
        (_, arguments) = parse(said, Parsing(tools=name, names=("f",), texts=(("f", "t"),)))
        assert 2 <= len(json.loads(arguments.text)["t"]) <= 4
    for bounds in ({"minLength": 3}, {"maxLength": 10**6}, {"minLength": 10**6}):
        longer = Function("f", {"type": "object", "properties": {"t": {"type": "string", **bounds}}})
        words(name, False).matcher(required(WRITINGS[name, False], [longer], False, {}))


def test_texts_by_schema() -> None:
    for schema in ({"type": "string"}, {"enum": ["a"]}, {"const": "a"}, {"type": ["string"]}):
        assert is_text(schema)
    for schema in ({}, True, {"type": "integer"}, {"enum": ["a", 1]}, {"type": ["string", "null"]}, {"enum": []}):
        assert not is_text(schema)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "older"),
    [
        ("<|im_start|>{{ m }}", "hermes", "", False),
        ("<tools> <tool_call>", "hermes", "", False),
        ("<tool_call> {% if '</think>' in content %}", "hermes", "think", False),
        ("<tool_call>{name} <arg_key> <think>", "glm", "think", False),
        ("<tool_call>\n<function=", "qwen3_coder", "", False),
        ("[TOOL_CALLS] [", "mistral", "", True),
        ("[TOOL_CALLS]{{ name }}[ARGS] [THINK]", "mistral", "mistral", False),
        ("<|python_tag|>", "llama3", "", False),
        ("<｜tool▁calls▁begin｜> ```json <think>", "deepseek_v3", "think", True),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3", "", False),
        ("<|tool_calls_section_begin|>", "kimi_k2", "", False),
        ("<|start|>assistant<|channel|>analysis<|message|> functions.", "gpt-oss", "gpt-oss", False),
    ],
)
def test_the_template_tells_the_formats(template: str, tools: str, reasoning: str, older: bool) -> None:
    formats = choose(template)
    assert (formats.tools, formats.reasoning, formats.older) == (tools, reasoning, older)
    assert (tools, older) in WRITINGS and set(formats.reasons) == {"tool_call_parser", "reasoning_parser"}
    named = choose(template, "qwen25", "deepseek-r1")
    assert (named.tools, named.reasoning) == ("hermes", "think")
    assert choose(template, "none", "none").tools == ""
