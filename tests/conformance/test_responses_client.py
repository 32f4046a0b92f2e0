"""`/v1/responses` through the official `openai` client, unmodified, against a live server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.live import Server
from support.words import CTX, WIDE, chat_saying


@pytest.fixture
def client(plain: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def sayer(repeater: Server) -> Iterator[OpenAI]:
    """A client of the repeater."""
    with OpenAI(base_url=f"{repeater.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def saying(text: str, **more: Any) -> dict[str, Any]:
    said = chat_saying(text)
    body = {"chat_template_kwargs": said["chat_template_kwargs"], **more}
    return {"model": "tiny", "input": text, "max_output_tokens": 64, "temperature": 0, "extra_body": body}


def test_a_response(sayer: OpenAI) -> None:
    answer = sayer.responses.create(**saying(WIDE))
    assert answer.output_text == WIDE and answer.status == "completed"
    assert answer.usage is not None and answer.usage.input_tokens == 64
    cut = sayer.responses.create(**{**saying("one two three four"), "max_output_tokens": 2})
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert sayer.responses.create(**saying("one two three four", stop=["three"])).output_text == "one two "


def test_a_stream(sayer: OpenAI) -> None:
    with sayer.responses.stream(**saying(WIDE)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == WIDE
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip


def test_a_conversation(plain: Server, client: OpenAI) -> None:
    first = client.responses.create(
        model="tiny", input="Hi", instructions="Be kind", max_output_tokens=8, temperature=0
    )
    second = client.responses.create(
        model="tiny", input="Go on", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    messages = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on"},
    ]  # fmt: skip
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    assert second.output_text == plain.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    by_hand: Any = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "Go on"}]
    again = client.responses.create(model="tiny", input=by_hand, max_output_tokens=8, temperature=0, store=False)
    assert again.output_text == second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)


def test_in_the_background(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Hi", "background": True, "temperature": 0}
    waiting = client.responses.create(**asked, max_output_tokens=8, extra_body={"ignore_eos": True})
    assert waiting.status == "in_progress"
    limit = time.monotonic() + 20
    while (done := client.responses.retrieve(waiting.id)).status == "in_progress":
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert done.status == "incomplete" and done.usage is not None and done.usage.output_tokens == 8
    long = client.responses.create(**asked, max_output_tokens=1900, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"


def test_errors(client: OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.responses.create(**{"model": "tiny", "input": "Hi", "max_output_tokens": 4, **fields})

    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ask(input="word " * CTX)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="nope")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        ask(previous_response_id="resp_none")
    with pytest.raises(openai.BadRequestError):
        ask(tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError):
        ask(input="word " * CTX, stream=True)


def test_an_abort_is_told_in_the_stream(plain: Server, client: OpenAI) -> None:
    with client.responses.create(
        model="tiny", input="Hi", max_output_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        reading = iter(stream)
        first: Any = next(reading)
        assert plain.ask("/abort_request", {"rid": first.response.id}) == {"aborted": 1}
        rest = list(reading)
    assert [event.type for event in rest[-2:]] == ["error", "response.failed"]
