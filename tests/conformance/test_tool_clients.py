"""Calls of tools and reasoning through the official clients of every dialect, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic
from ollama import Client
from openai import OpenAI

from support.live import Server
from support.tiny import PERIOD
from support.words import encode

THOUGHT, SAID = "I should look", "Looking."
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Wien"}}\n</tool_call>'
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = {"city": "Wien"}


def words(text: str) -> str:
    """What the user says so that the repeater says `text`, and then x until the period is full."""
    return text + " x" * (PERIOD - 1 - len(encode(text)))


@pytest.fixture
def asked() -> list[Any]:
    return [{"role": "user", "content": words(f"<think>{THOUGHT}</think>{SAID}{CALL}")}]


def test_openai(caller: Server, asked: list[Any]) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    with OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"model": "tiny", "messages": asked, "tools": tools, "max_tokens": 64, "temperature": 0}
        choice = client.chat.completions.create(**fields).choices[0]
        (call,) = choice.message.tool_calls or []
        assert call.function.name == "look" and '"Wien"' in call.function.arguments  # type: ignore[union-attr]
        assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content == THOUGHT  # type: ignore[attr-defined]
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
        parts = [call for delta in deltas for call in delta.tool_calls or []]
        assert parts[0].function.name == "look" and parts[0].id
        assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments  # type: ignore[union-attr]


def test_responses(caller: Server, asked: list[Any]) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]
    with OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"model": "tiny", "input": asked, "tools": tools, "max_output_tokens": 64, "temperature": 0}
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            list(stream)
            streamed = stream.get_final_response()
        for response in (whole, streamed):
            kinds = [item.type for item in response.output]
            assert kinds[:3] == ["reasoning", "message", "function_call"]
            reasoning, message, call = response.output[:3]
            assert reasoning.content[0].text == THOUGHT and message.content[0].text.strip() == SAID  # type: ignore[union-attr, index]
            assert call.name == "look" and '"Wien"' in call.arguments  # type: ignore[union-attr]
        result = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "rain"}  # type: ignore[union-attr]
        after = client.responses.create(
            model="tiny", input=[result], previous_response_id=whole.id, max_output_tokens=4, tools=tools
        )
        assert after.usage is not None and after.usage.output_tokens > 0


def test_anthropic(caller: Server, asked: list[Any]) -> None:
    tools: Any = [{"name": "look", "input_schema": PARAMETERS}]
    with Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        fields: Any = {"model": "tiny", "messages": asked, "tools": tools, "max_tokens": 64}
        fields["extra_body"] = {"temperature": 0}
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use"
            said = {block.type: block for block in message.content}
            assert said["thinking"].thinking == THOUGHT  # type: ignore[union-attr]
            call: Any = said["tool_use"]
            assert call.name == "look" and call.input == ARGUMENTS and call.id.startswith("toolu_")
        assert whole.usage.output_tokens_details is not None
        assert whole.usage.output_tokens_details.thinking_tokens > 0
        result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]
        turns: Any = [*asked, {"role": "assistant", "content": whole.content}, {"role": "user", "content": result}]
        assert client.messages.create(model="tiny", messages=turns, tools=tools, max_tokens=4).usage.output_tokens


def test_ollama(caller: Server, asked: list[Any]) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    with Client(host=caller.url) as client:
        fields: Any = {"model": "tiny", "messages": asked, "tools": tools}
        fields["options"] = {"num_predict": 64, "temperature": 0}
        message = client.chat(**fields).message
        parts = [part.message for part in client.chat(**fields, stream=True)]
        assert "".join(part.thinking or "" for part in parts) == message.thinking == THOUGHT
        assert "".join(part.content or "" for part in parts) == message.content
        for calls in (message.tool_calls, [call for part in parts for call in part.tool_calls or []]):
            assert calls is not None
            assert [(call.function.name, dict(call.function.arguments)) for call in calls] == [("look", ARGUMENTS)]
        turns: Any = [*asked, message, {"role": "tool", "content": "rain", "tool_name": "look"}]
        assert client.chat(model="tiny", messages=turns, tools=tools, options={"num_predict": 4}).eval_count


def test_without_tools_a_call_is_text(caller: Server, asked: list[Any]) -> None:
    with Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(model="tiny", messages=asked, max_tokens=64, extra_body={"temperature": 0})
        assert answer.stop_reason == "end_turn" and CALL in answer.content[-1].text  # type: ignore[union-attr]
