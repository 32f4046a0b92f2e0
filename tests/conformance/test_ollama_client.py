"""The official `ollama` client, unmodified, against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from ollama import AsyncClient, Client

from support.live import Server
from support.servers import KEY
from support.tiny import PERIOD
from support.words import CTX, WIDE, encode

USER: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(plain: Server) -> Iterator[Client]:
    with Client(host=plain.url) as made:
        yield made


@pytest.fixture
def sayer(repeater: Server) -> Iterator[Client]:
    """A client of the repeater."""
    with Client(host=repeater.url) as made:
        yield made


def saying(text: str, **options: Any) -> dict[str, Any]:
    """Arguments of a raw prompt that makes the repeater say `text`."""
    prompt = f"{text}<|im_end|>" + " x" * (PERIOD - len(encode(text)) - 1)
    return {"model": "tiny", "prompt": prompt, "raw": True, "options": {"temperature": 0, "num_predict": 64, **options}}


def test_generate(sayer: Client) -> None:
    answer = sayer.generate(**saying(WIDE))
    assert (answer.response, answer.done, answer.done_reason, answer.model) == (WIDE, True, "stop", "tiny")
    assert answer.prompt_eval_count == PERIOD and answer.eval_count == len(encode(WIDE)) + 1
    assert answer.total_duration and answer.total_duration >= (answer.eval_duration or 0) > 0
    parts = list(sayer.generate(**saying(WIDE), stream=True))
    assert "".join(part.response or "" for part in parts) == WIDE
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_stops_and_limits(sayer: Client) -> None:
    for stop in (["three"], ["zz", "three"]):
        assert sayer.generate(**saying("one two three four", stop=stop)).response == "one two "
    cut = sayer.generate(**saying("one two three four", num_predict=2))
    assert cut.done_reason == "length" and cut.eval_count == 2


def test_it_is_the_same_chat_as_openais(plain: Server, client: Client) -> None:
    turns: Any = [
        {"role": "system", "content": "Be kind"}, *USER, {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]  # fmt: skip
    body = {"model": "tiny", "messages": turns, "max_tokens": 12, "temperature": 0}
    wanted = plain.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    options: Any = {"temperature": 0, "num_predict": 12}
    assert client.chat(model="tiny", messages=turns, options=options).message.content == wanted
    parts = list(client.chat(model="tiny:latest", messages=turns, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == wanted
    one = client.generate(model="tiny", system="Be kind", prompt="Hi", options=options)
    body["messages"] = [turns[0], turns[1]]
    assert one.response == plain.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]


def test_results_of_tools_reach_the_model(client: Client) -> None:
    def look(city: str) -> str:
        """Look at the weather.

        Args:
            city: where
        """
        return city

    turns: Any = [
        *USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Wien"}}}]},
        {"role": "tool", "content": "rain", "tool_name": "look"},
    ]  # fmt: skip
    answer = client.chat(model="tiny", messages=turns, tools=[look], options={"num_predict": 3})
    assert answer.eval_count == 3


def test_logprobs(client: Client) -> None:
    answer = client.chat(model="tiny", messages=USER, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert answer.logprobs is not None and len(answer.logprobs) == 3
    assert all(item.logprob <= 0 and len(item.top_logprobs or []) == 2 for item in answer.logprobs)


def test_what_is_there(client: Client) -> None:
    (model,) = client.list().models
    assert model.model == "tiny" and model.size and model.details is not None
    shown = client.show("tiny")
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == CTX
    assert "completion" in (shown.capabilities or [])
    (running,) = client.ps().models
    assert running.model == "tiny" and running.digest == model.digest


def test_errors(client: Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat(model="nope", messages=USER)
    assert missing.value.status_code == 404 and "tiny" in missing.value.error
    for fields in ({"options": {"temperature": -1}}, {"messages": [{"role": "user", "content": "word " * CTX}]}):
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError) as bad:
                list(client.chat(**{"model": "tiny", "messages": USER, "stream": stream, **fields}))  # type: ignore[call-overload]
            assert bad.value.status_code == 400
    with pytest.raises(ollama.ResponseError):
        client.show("nope")


def test_keys(keyed: Server) -> None:
    with Client(host=keyed.url) as stranger, pytest.raises(ollama.ResponseError) as refused:
        stranger.list()
    assert refused.value.status_code == 401 and isinstance(refused.value.error, str)
    with Client(host=keyed.url, headers={"Authorization": f"Bearer {KEY}"}) as known:
        assert known.list().models


def test_an_abandoned_stream_ends_the_request(plain: Server) -> None:
    before = plain.figures()["aborted"]

    async def leave() -> None:
        async with AsyncClient(host=plain.url) as client:
            async for part in await client.generate(
                model="tiny", prompt="Long", stream=True, options={"num_predict": 1500, "temperature": 1.0}
            ):
                assert part.response is not None
                break

    asyncio.run(leave())
    plain.check_settles()
    assert plain.figures()["aborted"] <= before + 1


def test_vectors(embedder: Server) -> None:
    with Client(host=embedder.url) as client:
        texts = ["A man is eating food.", "A man is eating a piece of bread.", "The stock market fell today."]
        vectors = client.embed(model="all-minilm-l6-v2", input=texts).embeddings
        likeness = [sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors]
        assert likeness[0] == pytest.approx(1.0, abs=1e-5) and likeness[1] > 0.7 and abs(likeness[2]) < 0.1
        old = client.embeddings(model="all-minilm-l6-v2", prompt=texts[0]).embedding
        assert len(old) == 384
        assert client.embed(model="all-minilm-l6-v2", input="word " * 2000).prompt_eval_count == 512
        with pytest.raises(ollama.ResponseError, match="embeddings"):
            client.generate(model="all-minilm-l6-v2", prompt="Hello")
