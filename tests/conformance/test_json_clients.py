"""JSON that fits a schema, in the words of every dialect. The model is random: only the grammar makes its text JSON."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import ollama
import openai
import pytest
from anthropic import Anthropic
from ollama import Client
from openai import OpenAI

from support.live import Server

USER: Any = [{"role": "user", "content": "Hi"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Wien", "Graz"]}, "wet": {"type": "boolean"}},
    "required": ["name", "wet"],
    "additionalProperties": False,
}
BROKEN: Any = {"type": "object", "properties": {"a": {"type": "no such type"}}}


def check(text: str | None) -> None:
    jsonschema.validate(json.loads(text or ""), SCHEMA)


def test_responses(plain: Server) -> None:
    with OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:

        def fields(schema: Any) -> dict[str, Any]:
            wanted = {"type": "json_schema", "name": "weather", "schema": schema}
            return {"model": "tiny", "input": "Hi", "text": {"format": wanted}, "max_output_tokens": 200}

        check(client.responses.create(**fields(SCHEMA)).output_text)
        with client.responses.stream(**fields(SCHEMA)) as stream:
            list(stream)
            check(stream.get_final_response().output_text)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**fields(BROKEN))
        assert refused.value.param == "text.format"


def test_anthropic(plain: Server) -> None:
    with Anthropic(base_url=plain.url, api_key="none", max_retries=0) as client:

        def ask(schema: Any) -> Any:
            wanted: Any = {"format": {"type": "json_schema", "schema": schema}}
            return client.messages.create(model="tiny", messages=USER, max_tokens=200, output_config=wanted)

        check(ask(SCHEMA).content[0].text)
        with pytest.raises(anthropic.BadRequestError):
            ask(BROKEN)


def test_ollama(plain: Server) -> None:
    with Client(host=plain.url) as client:
        options: Any = {"num_predict": 200}
        check(client.chat(model="tiny", messages=USER, format=SCHEMA, options=options).message.content)
        parts = client.chat(model="tiny", messages=USER, format=SCHEMA, options=options, stream=True)
        check("".join(part.message.content or "" for part in parts))
        for raw in (False, True):
            check(client.generate(model="tiny", prompt="Hi", raw=raw, format=SCHEMA, options=options).response)
        any_object = client.generate(model="tiny", prompt="Hi", format="json", options={"num_predict": 40})
        assert (any_object.response or "").lstrip().startswith("{")
        with pytest.raises(ollama.ResponseError) as refused:
            client.chat(model="tiny", messages=USER, format=BROKEN)
        assert refused.value.status_code == 400
