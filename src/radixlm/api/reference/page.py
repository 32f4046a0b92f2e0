"""This module owns the description for people: `docs/api.md`, and `/docs`, which needs nothing from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from functools import cache

from radixlm.api.limits import Json
from radixlm.api.reference.openapi import document
from radixlm.api.reference.table import TABLE, Entry

COMMAND = "python -m radixlm.api.reference > docs/api.md"

_INTRO = f"""\
# Routes and fields

This page is generated: `{COMMAND}`. A server has the same at `/docs`, and as OpenAPI 3.1 at
`/openapi.json`. What the dialects have in common (keys, errors, streams, limits) is in [http.md](http.md). Fields that
are not listed are ignored, or refused by name where ignoring them would change the answer.
"""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2rem; border-bottom: 1px solid #ccc; } summary { cursor: pointer; padding: .2rem 0; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: #f4f4f4; padding: .7rem; overflow: auto; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .15rem .6rem .15rem 0;
  border-bottom: 1px solid #eee; vertical-align: top; } .method { display: inline-block; width: 4.2rem; color: #666; }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd; } pre { background: #242424; }
  td, th { border-color: #333; } h2 { border-color: #444; } }
"""


def markdown() -> str:
    """`docs/api.md`."""
    parts = [_INTRO]
    for tag, entries in _by_tag():
        parts.append(f"\n## {_title(tag)}\n")
        for entry in entries:
            first, *others = entry.paths.split()
            also = f" (also {', '.join(f'`{path}`' for path in others)})" if others else ""
            parts.append(f"\n### `{entry.method} {first}`{also}\n\n{_sentence(entry)}\n")
            rows = [f"| `{name}` | {kind} | {words} |" for name, kind, words in _rows(entry)]
            if rows:
                parts.append("\n| field | type | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


@cache
def page() -> bytes:
    """The HTML of `/docs`: no script, no font, no picture from anywhere."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>radixlm: HTTP API</title>"]
    parts.append(f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><h1>radixlm: HTTP API</h1>")
    parts.append("<p>For programs: <a href='openapi.json'>openapi.json</a>.</p>")
    for tag, entries in _by_tag():
        parts.append(f"<h2>{html.escape(_title(tag))}</h2>")
        for entry in entries:
            names = " ".join(f"<code>{html.escape(path)}</code>" for path in entry.paths.split())
            parts.append(f"<details><summary><span class=method>{entry.method}</span>{names}</summary>")
            parts.append(f"<p>{html.escape(_sentence(entry))}</p>")
            if entry.example is not None:
                body = json.dumps(entry.example)
                path = entry.paths.split()[0]
                command = f"curl $SERVER{path} -H 'Content-Type: application/json' -d '{body}'"
                parts.append(f"<pre>{html.escape(command)}</pre>")
            rows = "".join(
                f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(kind)}<td>{html.escape(words)}"
                for name, kind, words in _rows(entry)
            )
            parts.append(f"<table>{rows}</table></details>" if rows else "</details>")
    return "".join(parts).encode()


def _by_tag() -> Iterator[tuple[str, list[Entry]]]:
    for tag in dict.fromkeys(entry.tag for entry in TABLE):
        yield tag, [entry for entry in TABLE if entry.tag == tag]


def _title(tag: str) -> str:
    return tag[0].upper() + tag[1:]


def _sentence(entry: Entry) -> str:
    summary = entry.summary[0].upper() + entry.summary[1:] + "."
    return summary + (f" Streams as `{entry.streams}`." if entry.streams else "")


def _rows(entry: Entry) -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of each field; those within an object follow it."""
    operation = document()["paths"][entry.paths.split()[0]][entry.method.lower()]
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        yield from _fields(schema, "")


def _fields(schema: Json, prefix: str) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        inner = field if "properties" in field else next(iter(field.get("anyOf", [{}])), {})
        must = " Required." if name in required else ""
        yield prefix + name, _kind(field), _cell(field.get("description", "")) + must
        if "properties" in inner:
            yield from _fields(inner, f"{prefix}{name}.")


def _kind(schema: Json) -> str:
    """A type in words."""
    if "$ref" in schema:
        return "object"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(item) for item in schema["anyOf"] if item.get("type") != "null"))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return {"string": "text", "number": "number", "integer": "integer", "boolean": "boolean"}.get(kind, str(kind))


def _cell(text: str) -> str:
    return text.replace("|", "\\|") + "." if text else ""
