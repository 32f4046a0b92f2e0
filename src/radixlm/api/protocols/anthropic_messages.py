"""This module owns the step from Anthropic's messages, blocks and tools to the neutral chat (OpenAI's form)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from radixlm.api.errors import NotSupported
from radixlm.api.limits import Json
from radixlm.api.protocols.chat_prompt import Reasoning, ToolChoice
from radixlm.base.errors import BadRequest

#: Block type -> what it brings, for blocks that a text model has no use for.
MEDIA = {"image": "images", "document": "documents", "container_upload": "files"}

#: In front of the ids of calls, as Anthropic has it. Templates see the rest: some insist on its form.
PREFIX = "toolu_"

THINKING = ("enabled", "adaptive", "between_tools", "disabled")

#: Blocks that say nothing to the model.
SILENT = ("redacted_thinking",)


def chat_messages(messages: Sequence[Any], system: Any) -> list[Json]:
    """Messages in OpenAI's form. A result of a tool becomes a message of the role `tool`, before the text around it.

    Raises:
        BadRequest: naming the message or block and what is wrong with it.
    """
    chat: list[Json] = []
    if system:
        chat.append({"role": "system", "content": _texts(system, "system")})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRequest(f"{where} must be an object with role and content", param=where)
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            chat.append(_assistant(content, f"{where}.content"))
        elif role == "user":
            chat.extend(_user(content, f"{where}.content"))
        elif role == "system":
            chat.append({"role": "system", "content": _texts(content, f"{where}.content")})
        else:
            raise BadRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
    return chat


def continues(chat: Sequence[Json]) -> bool:
    """The last message is the beginning of the answer: the model goes on with it."""
    return bool(chat) and chat[-1]["role"] == "assistant" and not chat[-1].get("tool_calls")


def chat_tools(tools: Sequence[Any]) -> list[Json]:
    """Tools in OpenAI's form."""
    made = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or not tool["name"]:
            raise BadRequest(f"{where} must be an object with name and input_schema", param=where)
        if tool.get("type") not in (None, "custom"):
            raise NotSupported(
                f"{where} is of the type {str(tool['type'])[:40]!r}, which runs at Anthropic", param=where
            )
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise BadRequest(f"{where}.input_schema must be a JSON schema", param=f"{where}.input_schema")
        function: Json = {"name": tool["name"], "parameters": dict(schema)}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        if isinstance(tool.get("strict"), bool):
            function["strict"] = tool["strict"]
        made.append({"type": "function", "function": function})
    return made


def tool_choice(value: Mapping[str, Any] | None) -> ToolChoice:
    """`{"type": auto | any | tool | none, "name", "disable_parallel_tool_use"}`."""
    if value is None:
        return ToolChoice()
    kind, name = value.get("type"), value.get("name")
    disabled = value.get("disable_parallel_tool_use")
    parallel = not disabled if isinstance(disabled, bool) else None
    if kind == "auto":
        return ToolChoice(parallel=parallel)
    if kind == "none":
        return ToolChoice(mode="none")
    if kind == "any":
        return ToolChoice(mode="required", parallel=parallel)
    if kind == "tool" and isinstance(name, str) and name:
        return ToolChoice(mode="required", names=(name,), parallel=False)
    raise BadRequest(
        "tool_choice must be an object with the type auto, any, none, or tool and a name", param="tool_choice"
    )


def reasoning(thinking: Mapping[str, Any] | None, effort: Any = None) -> Reasoning:
    """`{"type": one of THINKING, "budget_tokens"}`; without it the model does as its template says."""
    if effort is not None and not isinstance(effort, str):
        raise BadRequest("output_config.effort must be a text", param="output_config.effort")
    if thinking is None:
        return Reasoning(effort=effort)
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in THINKING:
        raise BadRequest(f"thinking.type must be one of {', '.join(THINKING)}", param="thinking.type")
    if budget is not None and (type(budget) is not int or budget < 0):
        raise BadRequest("thinking.budget_tokens must be a whole number of 0 or more", param="thinking.budget_tokens")
    return Reasoning(enabled=kind != "disabled", budget=budget if kind == "enabled" else None, effort=effort)


def _user(content: Any, where: str) -> Iterator[Json]:
    said: list[str] = []
    for block, at in _blocks(content, where):
        if block["type"] == "tool_result":
            yield _tool_result(block, at)
        else:
            said.append(_text(block, at))
    if said or not isinstance(content, list):
        yield {"role": "user", "content": "\n".join(said)}


def _tool_result(block: Mapping[str, Any], where: str) -> Json:
    name = block.get("tool_use_id")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} has no tool_use_id", param=f"{where}.tool_use_id")
    content = block.get("content")
    text = "" if content is None else _texts(content, f"{where}.content")
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": name.removeprefix(PREFIX), "content": text}


def _assistant(content: Any, where: str) -> Json:
    said: list[str] = []
    thought: list[str] = []
    calls: list[Json] = []
    for block, at in _blocks(content, where):
        kind = block["type"]
        if kind == "thinking":
            thought.append(_field(block, "thinking", at))
        elif kind == "tool_use":
            calls.append(_tool_use(block, at))
        elif kind not in SILENT:
            said.append(_text(block, at))
    message: Json = {"role": "assistant", "content": "\n".join(said)}
    if thought:
        message["reasoning_content"] = "\n".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Mapping[str, Any], where: str) -> Json:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise BadRequest(f"{where}.input must be an object", param=f"{where}.input")
    function = {"name": _field(block, "name", where), "arguments": msgspec.json.encode(arguments or {}).decode()}
    return {"id": _field(block, "id", where).removeprefix(PREFIX), "type": "function", "function": function}


def _texts(content: Any, where: str) -> str:
    """A text, or blocks of text."""
    return "\n".join(_text(block, at) for block, at in _blocks(content, where))


def _blocks(content: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each block and where it is. A text is one block of text."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of blocks", param=where)
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise BadRequest(f"{at} must be an object with a type", param=at)
        yield block, at


def _text(block: Mapping[str, Any], where: str) -> str:
    kind = block["type"]
    if kind in MEDIA:
        raise BadRequest(f"{where} is of the type {kind!r}, and this model takes no {MEDIA[kind]}", param=where)
    if kind != "text":
        raise BadRequest(f"{where} is of the type {kind[:40]!r}, which has no place here", param=where)
    return _field(block, "text", where)


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name} must be a text", param=f"{where}.{name}")
    return value
