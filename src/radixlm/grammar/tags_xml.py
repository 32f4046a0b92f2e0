"""This module owns values that structural tags write as marked parameters instead of JSON, as some models write calls.

Parameters come in the order of the schema; those that are not required may be left out. A text stands as it is, up to
what closes it; other values are JSON. One line break is allowed between parameters and around what is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from radixlm.grammar.base import SchemaError


@dataclass(frozen=True, slots=True)
class Style:
    """What stands before and after a value. `{key}` stands for the parameter, `{text}` for whether it is a text."""

    before: str
    after: str


STYLES: Mapping[str, Style] = {
    "qwen_xml": Style("<parameter={key}>", "</parameter>"),
    "minimax_xml": Style('<parameter name="{key}">', "</parameter>"),
    "glm_xml": Style("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
    "deepseek_xml": Style('<｜DSML｜parameter name="{key}" string="{text}">', "</｜DSML｜parameter>"),
}

#: Keywords that an object of parameters may have, and a text.
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_TEXT = frozenset({"type", "enum", "const", "minLength", "maxLength"})
#: Those that say nothing of what is valid.
_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "deprecated", "strict"})

_BREAK = "/\\n?/"


class Writer(Protocol):
    """What is needed of `tags_lark.Writer`."""

    def json(self, schema: Any) -> str: ...

    def free(
        self, border: tuple[str, ...], excludes: tuple[str, ...] = (), least: int = 0, most: int | None = None
    ) -> str: ...


def parameters(schema: Any, style: Style, writer: Writer) -> str:
    """An expression for an object's parameters.

    Raises:
        SchemaError: the schema is no object's, or has a keyword that cannot be enforced in this form.
    """
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise SchemaError("structural tag: parameters need a schema of type object")
    _known(schema, _OBJECT, "$")
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(needed, list):
        raise SchemaError("structural tag: properties must be an object and required a list")
    missing = [key for key in needed if key not in properties]
    if missing:
        raise SchemaError(f"structural tag: {str(missing[0])[:40]!r} is required but not among the properties")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = []
    for key, value in properties.items():
        text = isinstance(value, dict) and value.get("type") in ("string", ["string"])
        before = style.before.format(key=key, text=json.dumps(text))
        written = _text(value, style.after, writer, key) if text else _json(value, style.after, writer, shared)
        whole = f"({_BREAK} {json.dumps(before, ensure_ascii=False)} {written})"
        parts.append(whole if key in needed else f"{whole}?")
    return " ".join([*parts, _BREAK])


def _json(schema: Any, after: str, writer: Writer, shared: dict[str, Any]) -> str:
    value = {**schema, **shared} if isinstance(schema, dict) else schema
    return f"{_BREAK} {writer.json(value)} {_BREAK} {json.dumps(after, ensure_ascii=False)}"


def _text(schema: dict[str, Any], after: str, writer: Writer, key: str) -> str:
    """A text without quotes, and what closes it."""
    _known(schema, _TEXT, f"$.properties.{key[:40]}")
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        if (
            not isinstance(choices, list)
            or not choices
            or not all(isinstance(c, str) and after not in c for c in choices)
        ):
            raise SchemaError(f"structural tag: the choices of {key[:40]!r} must be texts without {after!r}")
        if "const" in schema:
            choices = [choice for choice in choices if choice == schema["const"]]
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        choices = [c for c in choices if len(c) >= least and (most is None or len(c) <= most)]
        if not choices:
            raise SchemaError(f"structural tag: the schema of {key[:40]!r} allows nothing")
        return "(" + " | ".join(json.dumps(choice + after, ensure_ascii=False) for choice in choices) + ")"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or least < 0 or not (most is None or (isinstance(most, int) and most >= least)):
        raise SchemaError(f"structural tag: the lengths of {key[:40]!r} are impossible")
    return writer.free((after,), (), least, most)


def _known(schema: dict[str, Any], known: frozenset[str], place: str) -> None:
    for keyword in schema:
        if keyword not in known and keyword not in _NOTES:
            raise SchemaError(
                f"schema keyword {keyword[:40]!r} at {place} cannot be enforced in parameters; leave it out"
            )
