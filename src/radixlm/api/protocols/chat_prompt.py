"""This module owns the prompt of a chat: what a body says about messages, tools and the template, rendered to ids."""

from __future__ import annotations

from typing import Any

import msgspec

from radixlm.api.limits import Json
from radixlm.api.protocols.fields import Reader
from radixlm.api.service import INLINE_CHARACTERS, Service
from radixlm.base.errors import BadRequest, ContextLengthExceeded


class ChatPromptFields(msgspec.Struct, kw_only=True, frozen=True):
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


FIELDS = Reader(ChatPromptFields)


async def render(body: Json, service: Service, *, limited: bool = True) -> tuple[int, ...]:
    """The ids of a chat, exactly as the model sees it.

    Args:
        limited: refuse a chat that is longer than the context.

    Raises:
        BadRequest: the messages are wrong, the template refuses them, or the model has none.
        ContextLengthExceeded: too long.
    """
    fields = FIELDS.read(body)
    if fields.messages is None:
        raise BadRequest("messages is missing", param="messages")
    template = service.served.template
    if template is None:
        raise BadRequest(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template",
            param="messages",
        )
    extra = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", fields.reasoning_effort)
    tools = None if fields.tool_choice == "none" else _checked_tools(fields.tools or [])
    context_length = service.facts.model.context_length

    def work() -> tuple[int, ...]:
        rendered = template.render(
            fields.messages or [],
            tools=tools,
            documents=fields.documents,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=bool(fields.continue_final_message),
            extra=extra,
        )
        return tuple(service.tokenizer.encode_pieces(rendered.pieces, context_length if limited else None))

    size = weight([fields.messages, fields.tools, fields.documents, extra], INLINE_CHARACTERS)
    try:
        ids = await service.workers.run(size, work)
    except ContextLengthExceeded as error:
        error.param = "messages"
        raise
    if not ids:
        raise BadRequest("the chat is empty: it has no tokens", param="messages")
    return ids


def _checked_tools(tools: list[Any]) -> list[Any] | None:
    """OpenAI's form, which templates rely on."""
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"tools[{index}] must have the form {{type: function, function: {{name, parameters}}}}", param="tools"
            )
    return tools or None


def weight(value: Any, enough: int) -> int:
    """How much there is in a JSON value: its characters, and a few for each item. Stops counting at `enough`."""
    total = 0
    waiting = [value]
    while waiting and total <= enough:
        item = waiting.pop()
        total += 8
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    return total
