"""This module owns what is refused of a JSON schema before a backend sees it: what it would ignore without a word.

A schema is walked by position, so that a keyword's name within `enum`, `const` or `properties` is no keyword. Refusals
name the keyword and where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from radixlm.grammar.base import SchemaError
from radixlm.grammar.expression import searched

#: Nesting of a schema, objects and lists alike.
MAX_DEPTH = 128

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = (
    "items", "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")

#: Keywords of every draft that restrict what is valid and that llguidance either passes over or reads otherwise than
#: the standard does.
LLGUIDANCE = frozenset(
    (
        "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies", "if", "not",
        "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "additionalItems", "$dynamicRef",
        "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$id", "x-guidance", "divisibleBy", "disallow",
        "extends",
    )
)  # fmt: skip

#: Values of keywords that restrict nothing.
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}


def parse_schema(text: str) -> Any:
    """The schema of a grammar's text. Raises `SchemaError` if it is no JSON object or boolean."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise SchemaError("the schema must be an object")
    return schema


def check_schema(schema: Any, refused: frozenset[str], backend: str) -> None:
    """Raises `SchemaError` for the first keyword that the backend cannot enforce. Those that say nothing are taken out
    of the schema.
    """
    for place, found in _schemas(schema):
        for keyword in [keyword for keyword in found if keyword in refused and keyword != "$id"]:
            if found[keyword] not in _NOTHING.get(keyword, ()):
                raise SchemaError(f"schema keyword {keyword!r} at {place} cannot be enforced ({backend}); leave it out")
            del found[keyword]
        if place != "$" and "$id" in found and "$id" in refused:
            raise SchemaError(f"$id at {place}: a schema within a schema cannot have an address of its own ({backend})")
        if "$ref" in found and not isinstance(found["$ref"], str):
            raise SchemaError(f"$ref at {place} must be a text")


def common_patterns(schema: Any) -> None:
    """Rewrite the schema's patterns, in place, to what they mean by the standard and by Python alike."""
    for _, found in _schemas(schema):
        if isinstance(found.get("pattern"), str):
            found["pattern"] = searched(found["pattern"])
        named = found.get("patternProperties")
        if isinstance(named, dict):
            found["patternProperties"] = {searched(pattern): item for pattern, item in named.items()}


def _schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, with its place. Without recursion: schemas may be nested on purpose."""
    waiting: list[tuple[str, Any, int]] = [("$", schema, 0)]
    while waiting:
        place, found, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise SchemaError(f"the schema is nested more than {MAX_DEPTH} deep")
        if not isinstance(found, dict):
            continue
        yield place, found
        for keyword in _ONE:
            if isinstance(found.get(keyword), dict):
                waiting.append((f"{place}.{keyword}", found[keyword], depth + 1))
        for keyword in _LISTS:
            if isinstance(found.get(keyword), list):
                waiting += [(f"{place}.{keyword}[{i}]", item, depth + 1) for i, item in enumerate(found[keyword])]
        for keyword in _MAPS:
            if isinstance(found.get(keyword), dict):
                waiting += [
                    (f"{place}.{keyword}.{name[:40]}", item, depth + 1) for name, item in found[keyword].items()
                ]
