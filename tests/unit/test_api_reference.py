"""The description of the API: it is whole, it is true, and whatever it allows gets an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from radixlm.api.app import routes
from radixlm.api.auth import Keys
from radixlm.api.reference.openapi import document
from radixlm.api.reference.page import COMMAND, markdown, page
from radixlm.api.reference.table import TABLE
from radixlm.api.reference.words import WORDS
from support.described import OPERATIONS, check_operation
from support.pieces import service_of
from support.server import Api


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Api({"limits": {"max_choices": 4, "max_batch_items": 8}}) as api:
        yield api


def test_every_route_is_described_and_nothing_else(api: Api) -> None:
    table = routes(service_of(api), Keys(None, None), api.metrics)
    there = {(method.lower(), route.path.replace(":path", "")) for route in table for method in route.methods or ()}
    described = {(method, path) for path, methods in document()["paths"].items() for method in methods}
    assert {(method, path) for method, path in there if method != "head"} == described


def test_the_page_in_the_docs_is_current() -> None:
    kept = Path(__file__).parents[2] / "docs" / "api.md"
    assert kept.read_text(encoding="utf-8") == markdown(), COMMAND


def test_every_field_has_a_meaning() -> None:
    for path, methods in document()["paths"].items():
        for operation in methods.values():
            if "requestBody" in operation:
                properties = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
                bare = [name for name, schema in properties.items() if not schema.get("description")]
                assert not bare, f"{path}: {bare} need words in api/reference/words.py"
    assert all(text == text.strip() and not text.endswith(".") for text in WORDS.values())


def test_the_schemas_are_schemas() -> None:
    whole = document()
    for _, schema in _schemas(whole):
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(whole)
    for name in re.findall(r"#/components/schemas/([\w.]+)", text):
        assert name in whole["components"]["schemas"], name


def _schemas(whole: Any) -> Iterator[tuple[str, Any]]:
    yield from whole["components"]["schemas"].items()
    for path, methods in whole["paths"].items():
        for operation in methods.values():
            if "requestBody" in operation:
                yield path, operation["requestBody"]["content"]["application/json"]["schema"]


@pytest.mark.parametrize("entry", [entry for entry in TABLE if entry.example is not None], ids=lambda e: e.paths)
def test_the_examples_are_answered(api: Api, entry: Any) -> None:
    path = entry.paths.split()[0]
    body = {**entry.example, **({"model": "tiny"} if "model" in entry.example else {})}
    jsonschema.validate(body, document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    answer = api.run(api.ask(entry.method, path, body))
    assert answer.status == 200, answer.body


def test_the_answers_are_as_described(api: Api) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "logprobs": 2, "echo": True, "max_tokens": 3}),
        ("/v1/embeddings", {"model": "tiny", "input": ["a", "b"], "encoding_format": "base64"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/chat/completions", {"model": "nope", "messages": []}),
        ("/v1/messages", {"model": "nope", "max_tokens": 3, "messages": []}),
        ("/api/chat", {"model": "nope"}),
    ):
        answer = api.post(path, body)
        described = document()["paths"][path]["post"]["responses"][str(answer.status)]
        schema = described["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json, {**schema, "components": document()["components"]})


def test_what_is_served(api: Api) -> None:
    assert api.get("/openapi.json").json == json.loads(json.dumps(document()))
    shown = api.get("/docs")
    assert shown.status == 200 and shown.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert all(f"<code>{path}</code>" in shown.body.decode() for path in document()["paths"])


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page().decode()
    assert not re.search(r"https?://|//cdn|<script|<link|<img|@import|url\(", text)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_is_allowed_gets_an_answer(api: Api, method: str, path: str) -> None:
    """Bodies that are made of the description, right and wrong ones: never a 5xx, nothing left behind."""

    def send(method: str, place: str, body: bytes | None) -> int:
        headers = {"content-type": "application/json"} if body is not None else {}
        return api.run(api.ask(method, place, None, headers, body)).status

    check_operation(method, path, 10, send)
    assert api.hub.in_flight == 0 and not api.engine.running
