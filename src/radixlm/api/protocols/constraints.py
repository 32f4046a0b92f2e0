"""This module owns the fields by which clients ask for structured output, in any dialect: they become one `Grammar`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from radixlm.api.limits import Json
from radixlm.base.errors import BadRequest
from radixlm.base.request import Grammar

#: Field -> kind of grammar. Beside our own names those of vLLM, old and new.
FIELDS: Mapping[str, str] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
    "choice": "choice",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_choice": "choice",
}
STRUCTURED_OUTPUTS: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "choice": "choice",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")

Asked = tuple[str, str, Any]  # (field, kind, value)


def read_grammar(body: Json, public: Callable[[str], str] = str) -> Grammar | None:
    """What the answer must match; None for anything.

    Args:
        public: a field's name as errors show it.

    Raises:
        BadRequest: a field of the wrong type, or two that exclude each other.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(dict.fromkeys(public(field) for field, _, _ in asked))
        raise BadRequest(f"{names} exclude each other: give one", param=public(asked[1][0]))
    field, kind, value = asked[0]
    return Grammar(kind=kind, text=_text(kind, value, public(field)), param=public(field))


def _asked(body: Json) -> Iterator[Asked]:
    """Every constraint that is set. Null, and the empty text, are not."""
    for field, kind in FIELDS.items():
        if body.get(field) not in (None, ""):
            yield field, kind, body[field]
    outputs = body.get("structured_outputs")
    if outputs is not None:
        if not isinstance(outputs, dict):
            raise BadRequest("structured_outputs must be an object", param="structured_outputs")
        for name, kind in STRUCTURED_OUTPUTS.items():
            if outputs.get(name) not in (None, "", False):
                yield "structured_outputs", kind, outputs[name]
    wanted = body.get("response_format")
    if wanted is not None:
        yield from _response_format(wanted)


def _response_format(wanted: Any) -> Iterator[Asked]:
    """OpenAI's field. `strict` changes nothing: the answer always fits."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind not in RESPONSE_FORMATS:
        known = ", ".join(RESPONSE_FORMATS)
        raise BadRequest(f"response_format: its type must be one of {known}", param="response_format")
    if kind == "json_object":
        schema = wanted.get("schema")
        yield "response_format", "json_object" if schema is None else "json_schema", True if schema is None else schema
    elif kind == "json_schema":
        inner = wanted.get("json_schema")
        if not isinstance(inner, dict) or inner.get("schema") is None:
            raise BadRequest("response_format: json_schema.schema is missing", param="response_format")
        yield "response_format", kind, inner["schema"]
    elif kind == "structural_tag":
        yield "response_format", kind, wanted


def _text(kind: str, value: Any, field: str) -> str:
    """The grammar as text."""
    if kind == "json_object":
        return ""
    if kind in ("regex", "ebnf"):
        if not isinstance(value, str):
            raise BadRequest(f"{field} must be a text", param=field)
        return value
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
            raise BadRequest(f"{field} must be a list of texts, at least one", param=field)
        return msgspec.json.encode(value).decode()
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | bool):
        raise BadRequest(f"{field}: a {kind.replace('_', ' ')} must be an object, or one as JSON text", param=field)
    return msgspec.json.encode(value).decode()
