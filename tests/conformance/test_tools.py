"""Tool calls and reasoning through the official `openai` client, and the cases of both areas, on live servers."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.live import Server
from support.words import chat_saying

USER: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["a"],
    "additionalProperties": False,
}
F: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "f"}}
CALL = 'So.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def connect(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """The message that a stream's deltas make, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reasons = []
    for chunk in chunks:
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(message["calls"]):
                assert call.id and call.type == "function"
                message["calls"].append([call.function.name, ""])
            else:
                assert call.id is None and call.function.name is None
            message["calls"][call.index][1] += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert len(reasons) == 1
    return {**message, "reason": reasons[0]}


def check_stream(client: OpenAI, plain: Any, **asked: Any) -> None:
    """The stream says what the whole answer said."""
    made = put_together(list(client.chat.completions.create(**asked, stream=True)))
    (choice,) = plain.choices
    assert made["content"] == (choice.message.content or "")
    assert made["reasoning"] == getattr(choice.message, "reasoning_content", "")
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    assert (made["calls"], made["reason"]) == (calls, choice.finish_reason)


def test_a_round_trip(repeater: Server) -> None:
    """A model that calls, the result of the call, and the model's answer."""
    with connect(repeater) as client:
        said = chat_saying(CALL)
        asked: dict[str, Any] = {
            "model": "tiny", "messages": said["messages"], "tools": [F], "temperature": 0, "max_tokens": 64,
            "extra_body": {"chat_template_kwargs": said["chat_template_kwargs"]},
        }  # fmt: skip
        answer = client.chat.completions.create(**asked)
        check_stream(client, answer, **asked)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and message.content == "So."
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function" and json.loads(call.function.arguments) == {"a": 1}
        said = chat_saying("It is one.")
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "1"}
        answer = client.chat.completions.create(
            model="tiny", messages=[*said["messages"], message.model_dump(), result], tools=[F], temperature=0,
            max_tokens=64, extra_body={"chat_template_kwargs": said["chat_template_kwargs"]},
        )  # fmt: skip
        assert answer.choices[0].message.content == "It is one." and answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0, 1])
def test_calls_are_forced(plain: Server, choice: Any, temperature: float) -> None:
    with connect(plain) as client:
        for seed in range(1, 4 if temperature else 2):
            asked: dict[str, Any] = {
                "model": "tiny", "messages": [{"role": "user", "content": "Good morning to you!"}], "tools": [F],
                "tool_choice": choice, "max_tokens": 100, "temperature": temperature, "seed": seed,
            }  # fmt: skip
            answer = client.chat.completions.create(**asked)
            assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
            (call,) = answer.choices[0].message.tool_calls or ()
            assert call.type == "function" and call.function.name == "f"
            arguments = json.loads(call.function.arguments)
            assert list(arguments) == ["a"] and type(arguments["a"]) is int and 0 <= arguments["a"] <= 999
            check_stream(client, answer, **asked)


@pytest.mark.parametrize(
    "parameters", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}},
                   {"parameters": {"type": "object", "properties": {}, "required": None}}],
)  # fmt: skip
def test_tools_without_parameters(plain: Server, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "ping", **parameters}}
    answer = plain.chat("Hi", tools=[tool], tool_choice="required", max_tokens=64)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "ping" and json.loads(call["function"]["arguments"]) == {}
    assert choice["finish_reason"] == "tool_calls"


def test_reasons_to_end(plain: Server) -> None:
    for choice in ("none", "auto"):
        answer = plain.chat("Hi", tools=[F], tool_choice=choice, max_tokens=8)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        assert "tool_calls" not in answer["choices"][0]["message"]
    assert plain.chat("Hi", tool_choice="none", max_tokens=4)["choices"][0]["finish_reason"] == "length"


def test_one_awkward_tool_does_not_break_the_rest(plain: Server) -> None:
    inner = {"s": {"type": "string", "maxLength": 65536}, "k": {"type": "string", "pattern": "\\S"},
             "t": {"type": "string", "maxLength": 2000}}  # fmt: skip
    big = {"type": "object", "properties": {"o": {"type": "object", "properties": inner}}}
    tools = [F, {"type": "function", "function": {"name": "big", "parameters": big}}]
    for choice in ("auto", NAMED, "required"):
        begun = time.monotonic()
        plain.chat("Hi", tools=tools, tool_choice=choice, max_tokens=8)
        assert time.monotonic() - begun < 20.0


def test_many_tools(plain: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 500}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}] * 5000
    begun = time.monotonic()
    plain.chat("Hi", tools=tools, tool_choice="required", max_tokens=4)
    assert time.monotonic() - begun < 20.0


def test_strict_tools_and_single_calls(plain: Server, repeater: Server) -> None:
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    said = chat_saying(CALL.replace("1}", '"x"}'))
    answer = repeater.chat(**said, tools=[strict], max_tokens=64)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    arguments = call["function"]["arguments"]
    assert answer["choices"][0]["finish_reason"] == "length" or type(json.loads(arguments)["a"]) is int
    assert '"x"' not in arguments
    loose = repeater.chat(**said, tools=[F], max_tokens=64)["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(loose["function"]["arguments"]) == {"a": "x"}
    body = {"model": "tiny", "messages": USER, "max_tokens": 4, "tool_choice": "required"}
    bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}}
    assert "'f'" in plain.refused("/v1/chat/completions", {**body, "tools": [bad]})["message"]


def test_an_answer_of_a_given_form_beside_tools(plain: Server) -> None:
    schema = {"type": "array", "items": {"enum": ["q"]}, "minItems": 2, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    for seed in range(3):
        answer = plain.chat("Hi", tools=[F], response_format=form, max_tokens=64, temperature=1, seed=seed)
        message = answer["choices"][0]["message"]
        if "tool_calls" in message:
            assert 0 <= json.loads(message["tool_calls"][0]["function"]["arguments"])["a"] <= 999
        else:
            assert json.loads(message["content"]) == ["q", "q"]


# ---- reasoning


def test_a_budget_for_reasoning(thinker: Server) -> None:
    with connect(thinker) as client:
        for budget in (0, 1, 7):
            asked: dict[str, Any] = {
                "model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 64,
                "extra_body": {"thinking_token_budget": budget, "regex": "done", "ignore_eos": True},
            }  # fmt: skip
            answer = client.chat.completions.create(**asked)
            message = answer.choices[0].message
            assert message.content == "done"
            assert answer.usage is not None and answer.usage.completion_tokens_details is not None
            ending = len(thinker.tokenize(prompt="</think>", add_special_tokens=False))
            assert answer.usage.completion_tokens_details.reasoning_tokens == budget + ending
            check_stream(client, answer, **asked)


def test_forced_calls_come_after_the_reasoning(thinker: Server) -> None:
    answer = thinker.chat("Hi", tools=[F], tool_choice="required", thinking_token_budget=3, max_tokens=64)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert 0 <= json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["a"] <= 999
    short = thinker.chat("Hi", tools=[F], tool_choice="required", max_tokens=64,
                         chat_template_kwargs={"enable_thinking": False})  # fmt: skip
    assert short["choices"][0]["finish_reason"] == "tool_calls"
    assert "reasoning_content" not in short["choices"][0]["message"]


def test_reasoning_cut_by_the_limit(thinker: Server) -> None:
    answer = thinker.chat("Hi", max_tokens=14, ignore_eos=True)
    message = answer["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] == message["reasoning"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 14


def test_contradictions_are_refused(plain: Server) -> None:
    with connect(plain) as client:
        for tools, choice in (([F], {"type": "function", "function": {"name": "zzz"}}), ([], "required")):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model="tiny", messages=USER, tools=tools, tool_choice=choice)  # type: ignore[call-overload]
