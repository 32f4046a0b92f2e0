"""The fields of structured output become one grammar, or a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixlm.api.protocols.constraints import read_grammar
from radixlm.base.errors import BadRequest
from radixlm.base.request import Grammar

SCHEMA = {"type": "object", "properties": {"z": {}, "a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("body", "kind", "text", "param"),
    [
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"ebnf": "root ::= x"}, "ebnf", "root ::= x", "ebnf"),
        ({"guided_grammar": "start: x"}, "ebnf", "start: x", "guided_grammar"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA, "json_schema"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"choice": ["a", "b"]}, "choice", ["a", "b"], "choice"),
        ({"guided_choice": ["ü"]}, "choice", ["ü"], "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs"),
        ({"structured_outputs": {"regex": "x"}}, "regex", "x", "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema", SCHEMA, "response_format",
        ),
        ({"response_format": TAG}, "structural_tag", TAG, "response_format"),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag", TAG, "structural_tag"),
    ],
)  # fmt: skip
def test_every_field_is_a_grammar(body: dict[str, Any], kind: str, text: Any, param: str) -> None:
    grammar = read_grammar(body)
    assert grammar is not None
    assert (grammar.kind, grammar.param) == (kind, param)
    if isinstance(text, str):
        assert grammar.text == text
    else:
        read = json.loads(grammar.text)
        assert read == text
        if isinstance(text, dict):
            assert list(read) == list(text)  # the order of keys is the order of the answer


@pytest.mark.parametrize(
    "body",
    [
        {}, {"regex": None}, {"regex": ""}, {"json_schema": "", "ebnf": ""}, {"response_format": {"type": "text"}},
        {"response_format": None}, {"structured_outputs": {}}, {"structured_outputs": {"json_object": False}},
    ],
)  # fmt: skip
def test_what_is_not_set_constrains_nothing(body: dict[str, Any]) -> None:
    assert read_grammar(body) is None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"ebnf": "x", "regex": "a"}, "ebnf"),
        ({"regex": "a", "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"regex": 5}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"json_schema": [1]}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
        ({"structured_outputs": "x"}, "structured_outputs"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_grammar(body)
    assert named in caught.value.message
    assert caught.value.param in body


def test_fields_are_called_what_the_dialect_calls_them() -> None:
    assert read_grammar({"regex": "a"}, lambda field: f"sampling_params.{field}") == Grammar(
        kind="regex", text="a", param="sampling_params.regex"
    )
