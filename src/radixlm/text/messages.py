"""This module owns the one shape in which messages reach a chat template, whatever of OpenAI's forms they came in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from radixlm.base.errors import BadRequest

Message = dict[str, Any]

#: Part type -> what it brings, for parts that a text model has no use for.
_MEDIA: Mapping[str, str] = {
    "image": "images", "image_url": "images", "input_image": "images",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
    "video": "video", "video_url": "video",
    "file": "files", "input_file": "files",
}  # fmt: skip

#: Part type -> its field that holds text.
_TEXT_FIELDS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalise(messages: Sequence[Any], *, parse_arguments: bool = True, knows_developer: bool = False) -> list[Message]:
    """Messages as templates expect them. The given ones stay as they are.

    - `content` is a string: text parts are joined with a newline, null and missing content is empty.
    - Fields that are null, and empty `tool_calls`, are left out: templates ask whether they are there.
    - `reasoning` is there as `reasoning_content` too.
    - Arguments of tool calls are an object where the text is one (`parse_arguments`), else the text.
    - The role `developer` becomes `system`, unless the template knows it.

    Raises:
        BadRequest: naming the message and what is wrong with it.
    """
    if not messages:
        raise BadRequest("messages is empty; a chat needs at least one message", param="messages")
    return [_message(message, index, parse_arguments, knows_developer) for index, message in enumerate(messages)]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def _message(message: Any, index: int, parse_arguments: bool, knows_developer: bool) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where} has no role", param=f"{where}.role")
    shaped = {key: value for key, value in message.items() if value is not None}
    shaped["role"] = "system" if role == "developer" and not knows_developer else role
    shaped["content"] = _content(message.get("content"), f"{where}.content")
    if "reasoning" in shaped:
        shaped.setdefault("reasoning_content", shaped["reasoning"])
    calls = shaped.pop("tool_calls", None)
    if calls:
        shaped["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls", parse_arguments)
    return shaped


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text, a list of parts, or null", param=where)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{where} must be an object with a type", param=where)
    if kind in _MEDIA:
        raise BadRequest(f"{where} is of type {kind!r}, and this model takes no {_MEDIA[kind]}", param=where)
    if kind not in _TEXT_FIELDS:
        raise BadRequest(f"{where} is of the unknown type {kind!r}; this model takes parts of type 'text'", param=where)
    text = part.get(_TEXT_FIELDS[kind])
    if not isinstance(text, str):
        raise BadRequest(f"{where}.{_TEXT_FIELDS[kind]} must be a text", param=where)
    return text


def _tool_calls(calls: Any, where: str, parse_arguments: bool) -> list[Message]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where} must be a list", param=where)
    shaped = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}[{index}] has no function with a name", param=f"{where}[{index}]")
        arguments = _arguments(function.get("arguments"), parse_arguments)
        shaped.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return shaped


def _arguments(arguments: Any, parse: bool) -> Any:
    """An object or a text, as the template wants it. A text that is no JSON object stays what the model once wrote."""
    if arguments is None or arguments == "":
        arguments = {}
    if not parse:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
