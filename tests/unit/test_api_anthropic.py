"""`/v1/messages`: what becomes of messages, blocks and tools; the order of events; stops; errors; counting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from radixlm.api.protocols.anthropic_form import MessageForm
from radixlm.api.protocols.anthropic_messages import chat_messages, chat_tools, continues, reasoning, tool_choice
from radixlm.api.protocols.chat_prompt import Reasoning, ToolChoice
from radixlm.base.errors import RadixError
from radixlm.base.pieces import Piece
from radixlm.wire.messages import Fault, TextDelta
from support.pieces import PROMPT, chat, ending, service_of, streams
from support.server import CONTEXT, Api, parse_named, tokenizer

USER = [{"role": "user", "content": "Hi"}]
WORDS = tokenizer()


@pytest.fixture(scope="module")
def shared() -> Iterator[Api]:
    with Api() as api:
        yield api


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    yield shared
    shared.engine.script = None
    shared.engine.trouble = lambda request, said: None
    shared.engine.cached = lambda request: 0


def ask(api: Api, **fields: Any) -> Any:
    return api.post("/v1/messages", {"model": "tiny", "max_tokens": 40, "messages": USER, **fields})


def prompt(api: Api) -> str:
    """What the model saw last."""
    return WORDS.decode(api.engine.requests[-1].tokens, False)


# ---- whole answers


def test_a_message(api: Api) -> None:
    api.engine.script = "Hello world"
    api.engine.cached = lambda request: 3
    body = ask(api).json
    count = len(api.engine.requests[-1].tokens)
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": count - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(WORDS.encode("Hello world")) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


def test_why_it_stopped(api: Api) -> None:
    api.engine.script = "one, two, three"
    assert ask(api, max_tokens=2).json["stop_reason"] == "max_tokens"
    stopped = ask(api, stop_sequences=["zz", " two"]).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    assert stopped["content"] == [{"type": "text", "text": "one,"}]
    api.engine.script = "word " * CONTEXT
    assert ask(api, max_tokens=10 * CONTEXT).json["stop_reason"] == "model_context_window_exceeded"
    api.engine.script = ""
    assert ask(api).json["content"] == []


def test_sampling_reaches_the_engine(api: Api) -> None:
    ask(api, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a"], seed=5, max_tokens=9)
    request = api.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 5)
    assert sampling.max_new_tokens == 9 and request.text.stop == ("a",)


def test_the_prompt(api: Api) -> None:
    ask(
        api,
        system=[
            {"type": "text", "text": "Be kind", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "!"},
        ],
    )
    assert prompt(api).startswith("<|im_start|>system\nBe kind\n!<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    ask(api, system="Be kind", messages=[*USER, {"role": "assistant", "content": "Well"}])
    assert prompt(api).endswith("<|im_start|>assistant\nWell")
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    ask(api, tools=tools)
    assert "[tools: 1]" in prompt(api)
    ask(api, tools=tools, tool_choice={"type": "none"})
    assert "[tools" not in prompt(api)
    ask(api, thinking={"type": "disabled"})
    assert prompt(api).endswith("<quick>")


def test_the_count_is_that_of_the_prompt(api: Api) -> None:
    body = {"model": "tiny", "system": "Be kind", "messages": USER, "tools": [{"name": "f", "input_schema": {}}]}
    ask(api, **body)
    counted = api.post("/v1/messages/count_tokens", body)
    assert counted.json == {"input_tokens": len(api.engine.requests[-1].tokens)}
    long = api.post("/v1/messages/count_tokens", {**body, "messages": [{"role": "user", "content": "a b " * CONTEXT}]})
    assert long.json["input_tokens"] > CONTEXT


# ---- messages


def test_a_round_trip_of_tools() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Wien"}},
                {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    assert chat_messages(messages, "Be brief") == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "I should look",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"city":"Wien"}'}},
                {"id": "2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: no"},
        {"role": "user", "content": "And?"},
    ]
    only_result = chat_messages([{"role": "user", "content": [messages[2]["content"][0]]}], None)  # type: ignore[index]
    assert [message["role"] for message in only_result] == ["tool"]
    assert not continues(chat_messages(messages[:2], None))
    assert continues([{"role": "assistant", "content": "We"}]) and not continues([])


def test_tools_and_choices() -> None:
    (tool,) = chat_tools([{"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}])
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert tool == {"type": "function", "function": function}
    assert tool_choice(None) == ToolChoice()
    assert tool_choice({"type": "auto", "disable_parallel_tool_use": True}) == ToolChoice(parallel=False)
    assert tool_choice({"type": "any"}) == ToolChoice(mode="required")
    assert tool_choice({"type": "tool", "name": "f"}) == ToolChoice(mode="required", names=("f",), parallel=False)
    assert reasoning(None) == Reasoning()
    assert reasoning({"type": "enabled", "budget_tokens": 9}) == Reasoning(enabled=True, budget=9)
    assert reasoning({"type": "disabled", "budget_tokens": 9}) == Reasoning(enabled=False)
    assert reasoning({"type": "adaptive"}, "low") == Reasoning(enabled=True, effort="low")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": -1},
        {"max_tokens": "5"},
        {"messages": None},
        {"messages": []},
        {"messages": ["Hi"]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "refused", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 3}]}]},
        {"system": 3},
        {"system": [{"type": "image"}]},
        {"tools": [{"name": "f"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool"}},
        {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "perhaps"}},
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        {"temperature": -0.1},
        {"n": 2},
        {"mcp_servers": [{"url": "x"}]},
        {"output_config": {"format": {"type": "xml"}}},
        {"model": None},
    ],
)
def test_refusals(api: Api, fields: dict[str, Any]) -> None:
    answer = ask(api, **fields)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error", answer.body


def test_errors_have_anthropics_shape(api: Api) -> None:
    answer = ask(api, model="claude")
    assert answer.status == 404 and answer.json["error"]["type"] == "not_found_error"
    assert answer.json["request_id"] == answer.headers["x-request-id"]
    assert api.get("/v1/messages").json["type"] == "error"
    assert api.post("/v1/messages", raw=b"{", headers={"content-type": "application/json"}).json["type"] == "error"
    api.engine.trouble = lambda request, said: Fault(500, "model_error", "not finite")
    for stream in (False, True):
        failed = ask(api, stream=stream)
        assert failed.status == 500 and failed.json["error"] == {"type": "api_error", "message": "not finite"}


# ---- streams


def test_a_stream(api: Api) -> None:
    api.engine.script = "Hello world"
    plain = ask(api).json
    answer = ask(api, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_named(answer.body)
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    message, _ = replay(events)
    assert {**message, "id": ""} == {**plain, "id": ""}


def test_an_error_within_a_stream(api: Api) -> None:
    api.engine.script = "Hello world, one, two"
    api.engine.trouble = lambda request, said: Fault(500, "model_error", "not finite") if said == 4 else None
    events = parse_named(ask(api, stream=True).body)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "not finite"}, "request_id": None}
    assert "message_stop" not in [event["type"] for event in events]


def replay(events: list[Any]) -> tuple[Any, list[str]]:
    """The message that the events build, whose order is checked as a strict client would."""
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    raw: list[str] = []
    open_block = None
    for event in events[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block = event["content_block"]
            message["content"].append(open_block)
            raw.append("")
        elif kind == "content_block_delta":
            assert open_block is not None and event["index"] == len(message["content"]) - 1
            delta = event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[
                delta["type"]
            ]
            if field == "partial_json":
                assert open_block["type"] == "tool_use"
                raw[-1] += delta[field]
            else:
                open_block[field] += delta[field]
        elif kind == "content_block_stop":
            assert open_block is not None and event["index"] == len(message["content"]) - 1
            if open_block["type"] == "tool_use":
                open_block["input"] = msgspec.json.decode(raw[-1])
            open_block = None
        elif kind == "message_delta":
            assert open_block is None and event is events[-2]
            message.update(event["delta"])
            message["usage"] = event["usage"]
        else:
            assert kind == "ping"
    return message, raw


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(streams())
def test_any_stream_builds_the_whole_message(shared: Api, stream: Any) -> None:
    pieces, deltas = stream
    service = service_of(shared)
    form = MessageForm("msg_1", chat(shared), 50, service)
    payloads = [payload for delta in deltas for payload in form.piece(0, delta)] + list(form.last())
    message, _ = replay(parse_named(b"".join(payload + b"\n\n" for payload in payloads)))
    whole = msgspec.json.decode(MessageForm("msg_1", chat(shared), 50, service).whole([ending(pieces=pieces)]))

    def told(kind: str, field: str) -> list[Any]:
        return [block[field] for block in message["content"] if block["type"] == kind]

    assert "".join(told("text", "text")) == "".join(p.text for p in pieces if p.kind == "text")
    assert "".join(told("thinking", "thinking")) == "".join(p.text for p in pieces if p.kind == "reasoning")
    for kind, field in (("tool_use", "name"), ("tool_use", "input")):
        assert told(kind, field) == [block[field] for block in whole["content"] if block["type"] == kind]
    assert all(name.startswith("toolu_") for name in told("tool_use", "id"))
    wanted = "tool_use" if any(piece.kind == "call" for piece in pieces) else "end_turn"
    assert message["stop_reason"] == whole["stop_reason"] == wanted
    assert message["usage"] == whole["usage"] == {
        "input_tokens": len(PROMPT) - 2, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2, "output_tokens": 7, "output_tokens_details": {"thinking_tokens": 0},
    }  # fmt: skip


def test_arguments_cut_by_the_limit(shared: Api) -> None:
    cut = ending("length", pieces=[Piece("call", "f", 0), Piece("arguments", '{"a": ', 0)])
    body = msgspec.json.decode(MessageForm("m", chat(shared), 50, service_of(shared)).whole([cut]))
    assert body["stop_reason"] == "max_tokens" and body["content"][0]["input"] == {}


def test_a_failure_is_raised(shared: Api) -> None:
    form = MessageForm("m", chat(shared), 50, service_of(shared))
    with pytest.raises(RadixError, match="broken"):
        list(form.piece(0, TextDelta(1, fault=Fault(500, "model_error", "broken"))))
