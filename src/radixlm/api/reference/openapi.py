"""This module owns the OpenAPI 3.1 document: types come from the structs that the readers fill."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from radixlm import __version__
from radixlm.api import errors
from radixlm.api.limits import Json
from radixlm.api.protocols.fields import Reader
from radixlm.api.reference.table import TABLE, Entry, Typed
from radixlm.api.reference.words import WORDS

SCHEMAS = "#/components/schemas/{name}"

#: Statuses that any route may have, and what they mean.
STATUSES = {
    "401": "the key is missing or wrong",
    "413": "the body is too large",
    "415": "the body is not called JSON",
    "429": "the queue is full",
    "499": "the request was aborted",
    "500": "a bug of the server, or numbers of the model that are not finite",
    "503": "the server starts, shuts down, or has lost its engine",
    "504": "a limit in time ran out",
}

ERRORS: dict[str, Json] = {
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                "required": ["type", "message"],
            },
            "request_id": {"type": ["string", "null"]},
        },
        "required": ["type", "error"],
    },
    "OllamaError": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
}


@cache
def document() -> Json:
    """The whole document. The same object each time."""
    structs = [entry.answer for entry in TABLE if entry.answer is not None]
    kinds = [reader.kind for entry in TABLE for reader in _readers(entry)]
    made, components = msgspec.json.schema_components([*structs, errors.ErrorBody, *kinds], ref_template=SCHEMAS)
    bodies = {kind.__name__ for kind in kinds}
    answers = dict(zip(structs, made, strict=False))
    paths: dict[str, Json] = {}
    for entry in TABLE:
        for path in entry.paths.split():
            paths.setdefault(path, {})[entry.method.lower()] = _operation(entry, path, components, answers)
    schemas = {name: schema for name, schema in components.items() if name not in bodies}
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixlm", "version": __version__, "description": "The HTTP API of a radixlm server."},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **ERRORS},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _readers(entry: Entry) -> Iterable[Reader[Any]]:
    yield from entry.readers
    for value in entry.more.values():
        if isinstance(value, tuple):
            yield from (part for part in value if isinstance(part, Reader))


def _operation(entry: Entry, path: str, components: Json, answers: dict[Any, Json]) -> Json:
    content: Json = {"application/json": {"schema": answers.get(entry.answer, {"type": "object"})}}
    if entry.streams:
        content[entry.streams] = {"schema": {"type": "string"}}
    if path in ("/metrics", "/docs"):
        content = {"text/html" if path == "/docs" else "text/plain": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": SCHEMAS.format(name=_error(path))}}}
    found: Json = {"200": {"description": "the answer", "content": content}}
    if entry.readers or "{" in path:
        found["400"] = {"description": "the request is wrong; the message says where", "content": error}
        found["404"] = {"description": "there is no such model or response", "content": error}
    if entry.public:
        found["503"] = {"description": STATUSES["503"], "content": error}
    else:
        found |= {status: {"description": meaning, "content": error} for status, meaning in STATUSES.items()}
    operation: Json = {
        "tags": [entry.tag],
        "summary": entry.summary,
        "operationId": f"{entry.method.lower()}{re.sub(r'[^a-z0-9]+', '_', path.lower())}",
        "responses": found,
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if entry.readers:
        body: Json = {"schema": body_schema(entry, components)}
        if entry.example is not None:
            body["example"] = entry.example
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    return operation


def body_schema(entry: Entry, components: Json) -> Json:
    """The body's schema: the fields of all readers under the names that the dialect has for them."""
    properties = _properties(entry.readers, components)
    for name in entry.hidden:
        properties.pop(name, None)
    for name, value in entry.more.items():
        typed = {"type": "object", "properties": _properties(value, components)} if isinstance(value, tuple) else value
        if name == "sampling_params":
            typed = {"anyOf": [typed, {"type": "array", "items": typed}]}
        properties[name] = {"description": WORDS.get(name, ""), **typed}
    for name in entry.hidden:
        for value in properties.values():
            value.get("properties", {}).pop(name, None)
    schema: Json = {"type": "object", "properties": dict(sorted(properties.items()))}
    if entry.required:
        schema["required"] = list(entry.required)
    return schema


def _properties(readers: Iterable[Reader[Any] | Typed], components: Json) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for reader in readers:
        if not isinstance(reader, Reader):
            found |= {name: {"description": WORDS[name], **typed} for name, typed in reader.items()}
            continue
        fields = components[reader.kind.__name__]["properties"]
        for name, field in reader.aliases.items():
            typed = {key: value for key, value in fields[field].items() if key != "default"}
            found.setdefault(name, {"description": WORDS[name], **typed} if name in WORDS else typed)
    return found


def _error(path: str) -> str:
    for beginning, shape in errors.SHAPES:
        if path.startswith(beginning):
            return "AnthropicError" if shape is errors.anthropic_body else "OllamaError"
    return "ErrorBody"
