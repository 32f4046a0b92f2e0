"""The official `anthropic` client, unmodified, against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from support.live import Server
from support.servers import ADMIN_KEY, KEY
from support.words import CTX, WIDE, chat_saying

#: The client has no argument for it.
GREEDY = {"temperature": 0}

USER: Any = [{"role": "user", "content": "Hi"}]


def connect(server: Server, key: str = "none", **options: Any) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=key, max_retries=0, **options)


@pytest.fixture
def client(plain: Server) -> Iterator[Anthropic]:
    with connect(plain) as made:
        yield made


@pytest.fixture
def sayer(repeater: Server) -> Iterator[Anthropic]:
    """A client of the repeater."""
    with connect(repeater) as made:
        yield made


def saying(text: str, **more: Any) -> dict[str, Any]:
    """Arguments of a message that makes the repeater say `text`."""
    said = chat_saying(text)
    body = {"chat_template_kwargs": said["chat_template_kwargs"], "temperature": 0, **more}
    return {"model": "tiny", "max_tokens": 64, "messages": said["messages"], "extra_body": body}


def test_a_message(sayer: Anthropic) -> None:
    answer = sayer.messages.create(**saying(WIDE))
    (block,) = answer.content
    assert block.type == "text" and block.text == WIDE
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    usage = answer.usage
    assert usage.output_tokens > 10
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == 64
    again = sayer.messages.create(**saying(WIDE))
    assert again.usage.cache_read_input_tokens == 63


def test_a_stream(sayer: Anthropic) -> None:
    with sayer.messages.stream(**saying(WIDE)) as stream:
        assert "".join(stream.text_stream) == WIDE
        final = stream.get_final_message()
    assert final.content[0].text == WIDE and final.stop_reason == "end_turn"  # type: ignore[union-attr]
    assert final.usage.output_tokens > 10
    events = [event.type for event in sayer.messages.create(**saying("one"), stream=True)]
    assert events[0] == "message_start" and events[1] == "content_block_start"
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}


def test_stops(sayer: Anthropic) -> None:
    for stream in (False, True):
        asked = saying("one two three four", stop_sequences=["three"])
        if stream:
            with sayer.messages.stream(**asked) as running:
                answer: Any = running.get_final_message()
        else:
            answer = sayer.messages.create(**asked)
        assert answer.content[0].text == "one two "
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "three")
    short = sayer.messages.create(**{**saying("one two three four"), "max_tokens": 2})
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 2


def test_it_is_the_same_chat_as_openais(plain: Server, client: Anthropic) -> None:
    """System as a text and as blocks, several turns, and the beginning of an answer."""
    turns: Any = [*USER, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on"}]
    openais = [{"role": "system", "content": "Be kind"}, *turns]
    wanted = plain.ask(
        "/v1/chat/completions", {"model": "tiny", "messages": openais, "max_tokens": 12, "temperature": 0}
    )
    text = wanted["choices"][0]["message"]["content"]
    for system in ("Be kind", [{"type": "text", "text": "Be kind", "cache_control": {"type": "ephemeral"}}]):
        asked: Any = {"model": "tiny", "system": system, "messages": turns}
        answer = client.messages.create(**asked, max_tokens=12, extra_body=GREEDY)
        assert answer.content[0].text == text  # type: ignore[union-attr]
        counted = client.messages.count_tokens(**asked)
        assert counted.input_tokens == wanted["usage"]["prompt_tokens"]
    begun = client.messages.create(
        model="tiny", messages=[*USER, {"role": "assistant", "content": "Well"}], max_tokens=8, extra_body=GREEDY
    )
    fields = {"messages": [*USER, {"role": "assistant", "content": "Well"}], "continue_final_message": True}
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, **fields}
    assert begun.content[0].text == plain.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]  # type: ignore[union-attr]


def test_results_of_tools_reach_the_model(client: Anthropic) -> None:
    tool: Any = {"name": "look", "description": "Look", "input_schema": {"type": "object", "properties": {}}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Wien"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    turns: Any = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="tiny", messages=turns, tools=[tool], max_tokens=4)
    assert answer.usage.output_tokens == 4
    other = client.messages.count_tokens(model="tiny", messages=turns[:1])
    assert client.messages.count_tokens(model="tiny", messages=turns).input_tokens > other.input_tokens


def test_errors(client: Anthropic) -> None:
    def ask(**fields: Any) -> Any:
        return client.messages.create(**{"model": "tiny", "max_tokens": 4, "messages": USER, **fields})

    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(extra_body={"temperature": -1.0})
    assert isinstance(bad.value.body, dict) and bad.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in bad.value.message
    with pytest.raises(anthropic.NotFoundError):
        ask(model="claude")
    with pytest.raises(anthropic.BadRequestError):
        ask(messages=[])
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        ask(messages=[{"role": "user", "content": "word " * CTX}])
    with (
        pytest.raises(anthropic.BadRequestError, match="context length"),
        client.messages.stream(model="tiny", max_tokens=4, messages=[{"role": "user", "content": "word " * CTX}]),
    ):
        pass
    with pytest.raises(anthropic.BadRequestError, match="images"):
        ask(messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "x"}}]}])
    with pytest.raises(anthropic.BadRequestError, match="runs at Anthropic"):
        ask(tools=[{"type": "web_search_20250305", "name": "web_search"}])


def test_keys(keyed: Server) -> None:
    with connect(keyed, "wrong") as wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="tiny", max_tokens=2, messages=USER)
    for key in (KEY, ADMIN_KEY):
        with connect(keyed, key) as right:
            assert right.messages.create(model="tiny", max_tokens=2, messages=USER).content
    with Anthropic(base_url=keyed.url, auth_token=KEY, max_retries=0) as bearer:
        assert bearer.messages.create(model="tiny", max_tokens=2, messages=USER).content


def test_leaving_a_stream_ends_the_request(plain: Server, client: Anthropic) -> None:
    before = plain.figures()["aborted"]
    with client.messages.stream(
        model="tiny", max_tokens=1500, messages=USER, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    plain.check_settles()
    assert plain.figures()["aborted"] == before + 1


def test_an_abort_is_an_error_event(plain: Server, client: Anthropic) -> None:
    with client.messages.stream(
        model="tiny", max_tokens=1500, messages=USER, extra_body={"ignore_eos": True}
    ) as stream:
        reading = iter(stream)
        first = next(reading)
        assert first.type == "message_start"
        assert plain.ask("/abort_request", {"rid": first.message.id}) == {"aborted": 1}
        with pytest.raises(anthropic.APIStatusError, match="abort"):
            list(reading)


def test_a_long_prompt_is_counted(client: Anthropic) -> None:
    """Counting has no limit: clients ask before they cut."""
    assert (
        client.messages.count_tokens(
            model="tiny", messages=[{"role": "user", "content": "word " * (2 * CTX)}]
        ).input_tokens
        > CTX
    )
