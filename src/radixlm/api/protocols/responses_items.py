"""This module owns the step from the items of `/v1/responses` to the neutral chat (OpenAI's messages)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixlm.api.errors import NotSupported
from radixlm.api.limits import Json
from radixlm.api.protocols.chat_prompt import ToolChoice, read_tool_choice
from radixlm.base.errors import BadRequest

ROLES = ("user", "assistant", "system", "developer")


def read_input(value: Any) -> list[Json]:
    """The items of `input`: a text is a message of the user. What they say is looked at by `chat_messages`.

    Raises:
        BadRequest: it is neither a text nor a list of objects.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest("input must be a text or a list of items", param="input")
    items = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadRequest(f"input[{index}] must be an object", param=f"input[{index}]")
        items.append({"type": "message", **item} if "role" in item else item)
    return items


def chat_messages(items: Sequence[Json], instructions: str | None, first: int = 0) -> list[Json]:
    """Messages in OpenAI's form. Calls join the assistant's message before them, reasoning the one behind it.

    Args:
        first: items before this one are of earlier responses, so errors count from here.

    Raises:
        BadRequest: naming the item and what is wrong with it.
    """
    chat: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    thoughts: list[str] = []
    for index, item in enumerate(items, -first):
        where = f"input[{index}]"
        kind = item.get("type")
        if kind == "reasoning":
            thoughts.extend(_thoughts(item))
            continue
        if kind == "message":
            chat.append(_message(item, where))
        elif kind == "function_call":
            _add_call(chat, item, where)
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _parts(output, f"{where}.output")
            chat.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
        else:
            raise NotSupported(f"{where} is of the type {str(kind)[:40]!r}, which is not supported", param=where)
        if thoughts and chat[-1]["role"] == "assistant":
            chat[-1]["reasoning_content"] = "\n".join(thoughts)
        thoughts = []
    return chat


def chat_tools(tools: Sequence[Any]) -> list[Json]:
    """Functions in the form of the chat route, where they lie one level deeper."""
    made = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise BadRequest(f"{where} must be an object", param=where)
        if tool.get("type") != "function":
            raise NotSupported(f"{where} is of the type {str(tool.get('type'))[:40]!r}; use functions", param=where)
        _text(tool, "name", where)
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if _said(tool, name)}
        made.append({"type": "function", "function": function})
    return made


def tool_choice(value: Any, parallel: bool | None) -> ToolChoice:
    """The choice in the form of the chat route, where a function's name lies one level deeper."""
    if isinstance(value, Mapping) and value.get("type") == "function":
        return read_tool_choice({"type": "function", "function": {"name": value.get("name")}}, parallel)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        tools = value.get("tools")
        named = [
            {"type": "function", "function": {"name": tool.get("name")}} if isinstance(tool, Mapping) else tool
            for tool in (tools if isinstance(tools, list) else [])
        ]
        allowed = {"mode": value.get("mode", "auto"), "tools": named}
        return read_tool_choice({"type": "allowed_tools", "allowed_tools": allowed}, parallel)
    return read_tool_choice(value, parallel)


def _message(item: Mapping[str, Any], where: str) -> Json:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    return {"role": role, "content": content if isinstance(content, str) else _parts(content, f"{where}.content")}


def _parts(content: Any, where: str) -> list[Json]:
    """Parts as messages have them: their own checks name what is wrong within one."""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts", param=where)
    return content


def _add_call(chat: list[Json], item: Mapping[str, Any], where: str) -> None:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": ""})
    chat[-1].setdefault("tool_calls", []).append(call)


def _thoughts(item: Mapping[str, Any]) -> list[str]:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return [text for text in texts if isinstance(text, str)]


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name} must be a text", param=f"{where}.{name}")
    return value


def _said(tool: Mapping[str, Any], name: str) -> bool:
    return tool.get(name) is not None
