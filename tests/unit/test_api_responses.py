"""`/v1/responses`: items, events in order, conversations over kept responses, and the bounds of what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixlm.api.protocols.chat_prompt import ToolChoice
from radixlm.api.protocols.responses_form import ResponseForm
from radixlm.api.protocols.responses_items import chat_messages, chat_tools, read_input, tool_choice
from radixlm.api.protocols.responses_store import ResponseStore, Stored
from radixlm.base.errors import NotFound
from radixlm.wire.messages import Fault
from support.pieces import PROMPT, chat, ending, service_of, streams
from support.server import CONTEXT, Api, parse_named, tokenizer

WORDS = tokenizer()


@pytest.fixture(scope="module")
def shared() -> Iterator[Api]:
    with Api() as api:
        yield api


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    yield shared
    shared.engine.script = None
    shared.engine.pace = 0.0
    shared.engine.trouble = lambda request, said: None
    shared.engine.cached = lambda request: 0


def ask(api: Api, **fields: Any) -> Any:
    return api.post("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 40, **fields})


def prompt(api: Api) -> str:
    return WORDS.decode(api.engine.requests[-1].tokens, False)


def text(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


# ---- whole answers


def test_a_response(api: Api) -> None:
    api.engine.script = "Hello world"
    api.engine.cached = lambda request: 3
    body = ask(api, metadata={"a": "b"}, instructions="Be kind", temperature=0.5).json
    (item,) = body["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}]
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["status"] == "completed"
    assert (body["error"], body["incomplete_details"], body["metadata"]) == (None, None, {"a": "b"})
    assert (body["instructions"], body["temperature"], body["tool_choice"]) == ("Be kind", 0.5, "auto")
    count, made = len(api.engine.requests[-1].tokens), len(WORDS.encode("Hello world")) + 1
    assert body["usage"] == {
        "input_tokens": count,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": count + made,
    }
    assert prompt(api).startswith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


def test_an_answer_cut_by_the_limit(api: Api) -> None:
    api.engine.script = "one, two, three"
    body = ask(api, max_output_tokens=2).json
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


def test_logprobs(api: Api) -> None:
    api.engine.script = "Hello world"
    whole = ask(api, top_logprobs=2).json["output"][0]["content"][0]["logprobs"]
    assert len(whole) == len(WORDS.encode("Hello world")) + 1 and len(whole[0]["top_logprobs"]) == 2
    events = parse_named(ask(api, include=["message.output_text.logprobs"], stream=True).body)
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert sum(map(len, told)) >= len(WORDS.encode("Hello world"))


# ---- conversations


def test_a_conversation(api: Api) -> None:
    api.engine.script = "first"
    one = ask(api, instructions="Be kind").json
    api.engine.script = "second"
    two = ask(api, previous_response_id=one["id"], input="And?").json
    assert two["previous_response_id"] == one["id"]
    assert prompt(api) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    events = parse_named(ask(api, previous_response_id=two["id"], input="More", stream=True).body)
    assert "assistant\nsecond" in prompt(api)
    kept = api.get(f"/v1/responses/{events[-1]['response']['id']}").json
    assert kept == events[-1]["response"]
    items = api.get(f"/v1/responses/{two['id']}/input_items?order=asc").json
    assert [item["content"] for item in items["data"] if item["role"] == "user"] == ["Hi", "And?"]
    assert items["data"][1]["content"][0]["text"] == "first" and items["has_more"] is False
    assert api.get(f"/v1/responses/{two['id']}/input_items").json["data"] == items["data"][::-1]


def test_kept_and_deleted(api: Api) -> None:
    body = ask(api).json
    place = f"/v1/responses/{body['id']}"
    assert api.get(place).json == body
    assert api.run(api.ask("DELETE", place)).json == {"id": body["id"], "object": "response", "deleted": True}
    for method, path in (
        ("GET", place),
        ("DELETE", place),
        ("GET", place + "/input_items"),
        ("POST", place + "/cancel"),
    ):
        gone = api.run(api.ask(method, path))
        assert gone.status == 404 and gone.error["code"] == "response_not_found"
    lost = ask(api, previous_response_id=body["id"])
    assert lost.status == 404 and lost.error["param"] == "previous_response_id"
    secret = ask(api, store=False).json
    assert api.get(f"/v1/responses/{secret['id']}").status == 404


def test_in_the_background(api: Api) -> None:
    api.engine.script = "Hello world"
    api.engine.held = True
    waiting = ask(api, background=True).json
    assert waiting["status"] == "in_progress" and waiting["output"] == [] and waiting["usage"] is None
    place = f"/v1/responses/{waiting['id']}"
    assert api.get(place).json["status"] == "in_progress"
    assert ask(api, previous_response_id=waiting["id"]).status == 400

    async def ended() -> None:
        api.engine.release()
        await api.settled()
        await api.settle()

    api.run(ended())
    done = api.get(place).json
    assert done["status"] == "completed" and text(done) == "Hello world"
    assert api.run(api.ask("POST", place + "/cancel")).json == done


def test_cancelled(api: Api) -> None:
    api.engine.script = "Hello world, one, two"
    api.engine.held = True
    waiting = ask(api, background=True).json
    place = f"/v1/responses/{waiting['id']}"
    cancelled = api.run(api.ask("POST", place + "/cancel")).json
    api.engine.held = False
    assert cancelled["status"] == "cancelled" and api.get(place).json == cancelled
    assert not api.hub.in_flight
    api.engine.held = True
    waiting = ask(api, background=True).json
    assert api.run(api.ask("DELETE", f"/v1/responses/{waiting['id']}")).status == 200
    api.engine.held = False
    assert api.get(f"/v1/responses/{waiting['id']}").status == 404


def test_counting(api: Api) -> None:
    one = ask(api, instructions="Be kind").json
    body = {"model": "tiny", "input": "Again", "previous_response_id": one["id"]}
    counted = api.post("/v1/responses/input_tokens", body).json
    ask(api, **body)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(api.engine.requests[-1].tokens)}


# ---- items


def test_a_round_trip_of_tools() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I should look"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"city": "Wien"}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
    ]
    made = chat_messages(read_input(items), "Be brief")
    assert [message["role"] for message in made] == ["system", "user", "assistant", "tool", "tool"]
    assert made[2]["reasoning_content"] == "I should look"
    assert [call["id"] for call in made[2]["tool_calls"]] == ["c1", "c2"]
    assert made[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"city": "Wien"}'}
    assert made[3] == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    (call,) = chat_messages([items[3]], None)
    assert call["role"] == "assistant" and call["content"] == ""


def test_tools_and_choices() -> None:
    (tool,) = chat_tools([{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}])
    assert tool == {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    assert tool_choice({"type": "function", "name": "f"}, True) == ToolChoice(
        mode="required", names=("f",), parallel=False
    )
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert tool_choice(allowed, False) == ToolChoice(names=("f",), parallel=False)
    assert tool_choice(None, None) == ToolChoice()


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": []},
        {"input": 3},
        {"input": ["Hi"]},
        {"input": [{"type": "message", "role": "user"}]},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [{"role": "refused", "content": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"type": "function_call_output", "call_id": 3, "output": "x"}]},
        {"input": "word " * CONTEXT},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function"}]},
        {"tool_choice": {"type": "function", "name": "f"}},
        {"tool_choice": "perhaps"},
        {"text": {"format": {"type": "xml"}}},
        {"truncation": "some"},
        {"background": True, "stream": True},
        {"background": True, "store": False},
        {"conversation": "conv_1"},
        {"top_logprobs": 10**6},
        {"max_output_tokens": -1},
        {"reasoning": {"effort": 3}},
        {"n": 2},
        {"model": None},
    ],
)
def test_refusals(api: Api, fields: dict[str, Any]) -> None:
    answer = ask(api, **fields)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error", answer.body


# ---- streams


def replay(events: list[Any]) -> Any:
    """The response that the events build, whose order and numbers are checked as a strict client would."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    output: list[Any] = []
    current = None
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert current is None and event["output_index"] == len(output)
            current = event["item"]
            assert current["status"] == "in_progress" and not current.get("content") and not current.get("arguments")
            output.append(current)
            continue
        assert current is not None and event["output_index"] == len(output) - 1
        if kind == "response.output_item.done":
            assert {**event["item"], "status": ""} == {**current, "status": ""} and event["item"][
                "status"
            ] != "in_progress"
            output[-1], current = event["item"], None
            continue
        assert event["item_id"] == current["id"]
        if kind == "response.content_part.added":
            current["content"].append(event["part"])
        elif kind == "response.content_part.done":
            assert event["part"] == current["content"][0]
        elif kind == "response.function_call_arguments.delta":
            current["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == current["arguments"]
        elif kind.endswith("text.delta"):
            current["content"][0]["text"] += event["delta"]
            current["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        else:
            assert kind in ("response.output_text.done", "response.reasoning_text.done")
            assert event["text"] == current["content"][0]["text"]
    assert current is None
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}" and response["output"] == output
    return response


def test_a_stream(api: Api) -> None:
    api.engine.script = "Hello world"
    answer = ask(api, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert text(replay(parse_named(answer.body))) == "Hello world"
    api.engine.script = "one, two, three"
    assert replay(parse_named(ask(api, stream=True, max_output_tokens=2).body))["status"] == "incomplete"


def test_an_error_within_a_stream(api: Api) -> None:
    api.engine.script = "Hello world, one, two"
    api.engine.trouble = lambda request, said: Fault(500, "model_error", "not finite") if said == 4 else None
    *_, error, failed = parse_named(ask(api, stream=True).body)
    assert (error["type"], error["code"], error["message"]) == ("error", "model_error", "not finite")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["sequence_number"] == error["sequence_number"] + 1
    assert api.get(f"/v1/responses/{failed['response']['id']}").json == failed["response"]
    assert ask(api, stream=False).status == 500


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(streams())
def test_any_stream_builds_the_whole_response(shared: Api, stream: Any) -> None:
    pieces, deltas = stream
    service = service_of(shared)
    kept: list[Any] = []
    form = ResponseForm({"id": "resp_1"}, chat(shared), kept.append, service)
    payloads = [payload for delta in deltas for payload in form.piece(0, delta)] + list(form.last())
    response = replay(parse_named(b"".join(payload + b"\n\n" for payload in payloads)))
    assert len(kept) == 1 and msgspec.json.decode(msgspec.json.encode(kept[0])) == response
    whole = msgspec.json.decode(
        ResponseForm({"id": "resp_1"}, chat(shared), kept.append, service).whole([ending(pieces=pieces)])
    )

    def bare(items: list[Any]) -> list[Any]:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]

    assert bare(response["output"]) == bare(whole["output"])
    assert response["usage"] == whole["usage"] and response["usage"]["total_tokens"] == len(PROMPT) + 7
    names = [piece.text for piece in pieces if piece.kind == "call"]
    assert [item["name"] for item in response["output"] if item["type"] == "function_call"] == names
    # what was said can be said back
    chat_messages(read_input([{"role": "user", "content": "x"}]) + response["output"], None)


# ---- what is kept


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 6), st.integers(0, 300)), max_size=40)
)
def test_the_store_is_bounded(actions: list[tuple[str, int, int]]) -> None:
    store = ResponseStore(most=3, size=600)
    model: list[tuple[str, int]] = []  # least recently used first
    for action, number, length in actions:
        name = f"r{number}"
        if action == "put":
            stored = Stored({"id": name, "output": ["x" * length]}, (), ())
            size = len(msgspec.json.encode((stored.response, (), ())))
            store.put(stored)
            model = [entry for entry in model if entry[0] != name]
            if size <= 600:
                model.append((name, size))
            while len(model) > 3 or sum(size for _, size in model) > 600:
                model.pop(0)
        elif action == "drop":
            store.drop(name)
            model = [entry for entry in model if entry[0] != name]
        elif name in [entry[0] for entry in model]:
            assert store.get(name).response["id"] == name
            model.append(model.pop([entry[0] for entry in model].index(name)))
        else:
            with pytest.raises(NotFound):
                store.get(name)
        assert len(store) == len(model) and store.bytes == sum(size for _, size in model)
