"""The official `openai` client, unmodified, against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from support.live import Server
from support.servers import ADMIN_KEY, KEY
from support.words import CTX, WIDE, chat_saying, encode, ids, saying

USER: Any = [{"role": "user", "content": "Hi"}]


def connect(server: Server, key: str = "none", **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **options)


@pytest.fixture
def client(plain: Server) -> Iterator[OpenAI]:
    with connect(plain) as made:
        yield made


@pytest.fixture
def sayer(repeater: Server) -> Iterator[OpenAI]:
    """A client of the repeater."""
    with connect(repeater) as made:
        yield made


def test_models(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.object == "model" and card.owned_by == "radixlm"
    assert client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_completion(sayer: OpenAI) -> None:
    answer = sayer.completions.create(model="tiny", prompt=saying(WIDE), max_tokens=64, temperature=0)
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (WIDE, "stop", 0)
    assert answer.usage is not None
    made = len(encode(WIDE)) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (64, made)
    assert answer.usage.total_tokens == 64 + made


def test_completion_stream(sayer: OpenAI) -> None:
    stream = sayer.completions.create(model="tiny", prompt=saying(WIDE), max_tokens=64, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == WIDE
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(sayer: OpenAI) -> None:
    said = chat_saying(WIDE)
    answer = sayer.chat.completions.create(
        model="tiny", messages=said["messages"], max_completion_tokens=64, temperature=0,
        extra_body={"chat_template_kwargs": said["chat_template_kwargs"]},
    )  # fmt: skip
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == WIDE
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_chat_stream_with_usage(sayer: OpenAI) -> None:
    said = chat_saying(WIDE)
    stream = sayer.chat.completions.create(
        model="tiny", messages=said["messages"], max_tokens=64, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"chat_template_kwargs": said["chat_template_kwargs"]},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == WIDE
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == len(encode(WIDE)) + 1
    assert last.usage.prompt_tokens_details is not None
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_helper_of_the_client(sayer: OpenAI) -> None:
    said = chat_saying(WIDE)
    extra = {"chat_template_kwargs": said["chat_template_kwargs"]}
    with sayer.chat.completions.stream(model="tiny", messages=said["messages"], extra_body=extra) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == WIDE == stream.get_final_completion().choices[0].message.content


def test_n(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=8, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    stream = client.chat.completions.create(model="tiny", messages=USER, max_tokens=8, n=3, seed=7, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_stop(sayer: OpenAI) -> None:
    text = "one, two, three, four, five"
    for stop in ("two, th", ["zzz", "two, th"]):
        answer = sayer.completions.create(
            model="tiny", prompt=saying(text), max_tokens=64, temperature=0, stop=stop, stream=False
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one, ", "stop")


def test_chat_logprobs(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "max_tokens": 5, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert 1 <= len(found.content) <= 5
    for entry in found.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    joined = b"".join(bytes(entry.bytes or []) for entry in found.content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content


def test_completion_logprobs_and_echo(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="The quick brown fox", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == "The quick brown fox"
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert "".join(found.tokens) == "The quick brown fox"
    assert found.token_logprobs[0] is None and all(value is not None for value in found.token_logprobs[1:])


def test_token_ids_as_prompts(client: OpenAI) -> None:
    text = "Once upon a time"
    by_ids = client.completions.create(model="tiny", prompt=encode(text), max_tokens=8, temperature=0)
    by_text = client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text
    several = client.completions.create(
        model="tiny", prompt=[encode(text), encode("Hello")], max_tokens=8, temperature=0
    )
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == by_text.choices[0].text


def test_errors_of_the_caller(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=ids(CTX + 1))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[])
    with pytest.raises(openai.BadRequestError) as grammar:
        client.completions.create(model="tiny", prompt="Hi", extra_body={"regex": "[a-z"})
    assert grammar.value.code == "invalid_grammar" and grammar.value.param == "regex"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=USER)
    assert unknown.value.code == "model_not_found"


def test_an_error_comes_before_a_stream(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=ids(CTX + 1), stream=True)


def test_keys(keyed: Server) -> None:
    with connect(keyed, "sk-wrong") as wrong, pytest.raises(openai.AuthenticationError) as refused:
        wrong.models.list()
    assert refused.value.code == "invalid_api_key"
    for key in (KEY, ADMIN_KEY):
        with connect(keyed, key) as right:
            assert right.chat.completions.create(model="tiny", messages=USER, max_tokens=2).choices


def test_a_time_out_of_the_client_ends_the_request(plain: Server) -> None:
    before = plain.figures()["aborted"]
    with connect(plain, timeout=0.3) as hasty, pytest.raises(openai.APITimeoutError):
        hasty.completions.create(model="tiny", prompt="Long", max_tokens=2000, extra_body={"ignore_eos": True})
    plain.check_settles()
    assert plain.figures()["aborted"] == before + 1


def test_leaving_a_stream_ends_the_request(plain: Server, client: OpenAI) -> None:
    before = plain.figures()["aborted"]
    with client.completions.create(
        model="tiny", prompt="Long", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).choices
    plain.check_settles()
    assert plain.figures()["aborted"] == before + 1


def test_an_abort_is_an_error_that_is_not_tried_again(plain: Server, client: OpenAI) -> None:
    with client.completions.create(
        model="tiny", prompt="Long", max_tokens=2000, stream=True, extra_body={"ignore_eos": True, "rid": "gone"}
    ) as stream:
        reading = iter(stream)
        next(reading)
        assert plain.ask("/abort_request", {"rid": "gone"}) == {"aborted": 1}
        with pytest.raises(openai.APIError, match="abort"):
            list(reading)


def test_many_at_once(plain: Server) -> None:
    """Thirty-two streams at once say what each says alone."""
    asked: Any = {"model": "tiny", "max_tokens": 24, "temperature": 0}

    async def stream(client: AsyncOpenAI, i: int) -> str:
        chunks = await client.completions.create(prompt=f"Stream {i}:", stream=True, **asked)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*[stream(client, i) for i in range(32)])

    crowd = asyncio.run(all_of_them())
    for i in (0, 7, 31):
        assert crowd[i] == plain.text(prompt=f"Stream {i}:", max_tokens=24)
