"""JSON schemas: what is accepted is enforced, the rest is refused by name. The oracle is `jsonschema`; the schemas are
those of the JSON Schema Test Suite (`tests/data`).
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonschema.validators import validator_for

from radixlm.grammar.base import Compiled, GrammarError
from support.grammars import accepts, compiled, draw

SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite.jsonl"
PARTS = 8
DRAFTS = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}
#: Schemas of the suite that are accepted; more is better.
ACCEPTED = 302


@cache
def suite() -> list[tuple[str, str, str, Any, list[tuple[Any, bool]]]]:
    return [tuple(json.loads(line)) for line in SUITE.read_text(encoding="utf-8").splitlines()]


def schema_grammar(schema: Any) -> Compiled:
    return compiled("json_schema", json.dumps(schema))


@cache
def accepted(part: int) -> list[tuple[Any, Any, list[tuple[Any, bool]], Compiled]]:
    found = []
    for draft, _, _, schema, documents in suite()[part::PARTS]:
        try:
            grammar = schema_grammar(schema)
        except GrammarError:
            continue
        default = DRAFTS[draft]
        own = isinstance(schema, dict) and "$schema" in schema
        validator = validator_for(schema, default=default) if own else default
        found.append((schema, validator(schema), documents, grammar))
    return found


@pytest.mark.filterwarnings("ignore:The metaschema specified:DeprecationWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_text_is_valid(part: int) -> None:
    rng = np.random.default_rng(part)
    counts: Counter[str] = Counter()
    for schema, validator, _, grammar in accepted(part):
        for _ in range(5):
            text = draw(grammar, rng)
            counts["drawn"] += text is not None
            if text is not None:
                document = json.loads(text)
                assert validator.is_valid(document), (schema, text)
    assert counts["drawn"] > len(accepted(part)) * 4


@pytest.mark.filterwarnings("ignore:The metaschema specified:DeprecationWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_invalid_document_is_taken(part: int) -> None:
    counts: Counter[tuple[bool, bool]] = Counter()
    for schema, _, documents, grammar in accepted(part):
        for document, valid in documents:
            taken = accepts(grammar, json.dumps(document, ensure_ascii=False))
            assert valid or not taken, (schema, document)
            counts[valid, taken] += 1
    # Too strict is allowed (keys in another order than the schema's), but rare.
    assert counts[True, False] < 0.15 * (counts[True, True] + counts[True, False])


def test_coverage_of_the_suite() -> None:
    count = sum(len(accepted(part)) for part in range(PARTS))
    assert count >= ACCEPTED, f"{count} of {len(suite())} schemas are accepted"


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
PATTERNS = {
    "type": "object",
    "properties": {"s": {"type": "string", "pattern": "^[a-z]{2,3}$"}, "t": {"type": "string", "pattern": 'b"'}},
    "required": ["s", "t"],
    "additionalProperties": False,
}
UNION = {
    "type": "object",
    "properties": {
        "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "b": {"type": "string"},
        "c": {"oneOf": [{"const": 1}, {"const": [2]}]},
    },
    "required": ["c"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (OBJECT, ['{"a": 1}', '{"b": "x"}', "{}"], ['{"a": "wrong"}', '{"a": 1.5}']),
        (
            {"type": "integer", "minimum": -3, "maximum": 120},
            ["-3", "-1", "0", "9", "10", "99", "100", "120"],
            ["-4", "-10", "121", "200", "1000", "01", '"5"', "null"],
        ),
        (
            {"type": "string", "minLength": 1, "maxLength": 1},
            ['"a"', '"é"', '"😀"', '"\\n"', '"\\""', '"\\\\"'],
            ['""', '"ab"', '"\\n\\n"', '"😀😀"', '"\n"', '"\\ud83d"'],
        ),
        (
            PATTERNS,
            ['{"s": "ab", "t": "ab\\"c"}', '{"s": "abc", "t": "b\\""}'],
            ['{"s": "a", "t": "b\\""}', '{"s": "abcd", "t": "b\\""}', '{"s": "ab", "t": "b"}'],
        ),
        (
            UNION,
            ['{"c": 1}', '{"a": null, "c": [2]}', '{"a": 3, "b": "", "c": 1}', '{"b": "x", "c": 1}'],
            ["{}", '{"a": "s", "c": 1}', '{"c": 2}', '{"c": 1, "z": 0}', '{"a": 1 "c": 1}'],
        ),
        ({"type": "array", "items": {"enum": ["q"]}, "minItems": 2, "maxItems": 2}, ['["q", "q"]'], ["[]", '["q"]']),
        (True, ["1", '{"a": [null]}'], ["{", "tru"]),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["{}"]),
    ],
)
def test_documents_are_taken_or_not(schema: Any, yes: list[str], no: list[str]) -> None:
    grammar = schema_grammar(schema)
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, r"'uniqueItems' at \$\.items"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, r"'not' at \$\.properties\.a"),
        ({"if": {}, "then": False}, "'if'"),
        ({"contains": {"type": "integer"}}, "contains"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "string", "format": "no-such-format"}, "no-such-format"),
        ({"type": "string", "pattern": "(?!a)b"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
        ({"$ref": "http://example.com/schema"}, "http://example.com"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance|not"),
        ({"type": "object", "properties": {"foo": "bar"}}, "object or boolean"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": 5}, "properties"),
        ({"type": "array", "items": [5]}, "object or boolean"),
        ([], "object"),
        ("x", "object"),
        (False, "schema"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        schema_grammar(schema)


def test_names_and_values_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"enum": [{"if": 1}]}, "contains": {"const": {"uniqueItems": True}}},
        "required": ["not"],
        "additionalProperties": False,
    }
    assert accepts(schema_grammar(schema), '{"not": {"if": 1}}')


def test_white_space_cannot_run_for_ever() -> None:
    grammar = schema_grammar({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    assert accepts(grammar, '{"a": true}')
    assert not accepts(grammar, '{"a":  true}') and not accepts(grammar, ' {"a": true}')
