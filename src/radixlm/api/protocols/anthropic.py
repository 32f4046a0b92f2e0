"""This module owns `/v1/messages`: Anthropic's dialect of a chat, and the counting of its tokens."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from radixlm.api.limits import Json
from radixlm.api.protocols.anthropic_form import FRAMING, MessageForm
from radixlm.api.protocols.anthropic_messages import chat_messages, chat_tools, continues, reasoning, tool_choice
from radixlm.api.protocols.chat import ChatWish, prepare
from radixlm.api.protocols.chat_prompt import ChatPrompt, render
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.requests import standing
from radixlm.api.protocols.sampling import SamplingFields, TextFields, read_wish
from radixlm.api.protocols.structure import schema_grammar
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.base.request import Grammar

SAMPLING = Reader(SamplingFields, {"max_tokens": "max_new_tokens"})
TEXT = Reader(TextFields, {"stop_sequences": "stop", "no_stop_trim": "keep_stop"})

#: Refused when set: each would change the answer if it were ignored.
REFUSED = {
    "container": "containers",
    "context_management": "the editing of contexts",
    "mcp_servers": "tools that run at the server",
}


class MessageFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    messages: list[Any] | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


FIELDS = Reader(MessageFields)


async def parse(body: Json, service: Service) -> Job:
    fields = FIELDS.read(body)
    prompt = _prompt(body, fields, service)
    if body.get("max_tokens") is None:
        raise BadRequest("max_tokens is missing", param="max_tokens")
    stream = bool(fields.stream)
    wish = read_wish(body, SAMPLING, TEXT, stream=stream, max_new_tokens=None, service=service)
    if wish.choices != 1:
        raise BadRequest(f"n is {wish.choices}; a message is one answer", param="n")
    name = f"msg_{uuid.uuid4().hex[:24]}"
    asked = ChatWish(
        prompt=prompt,
        wish=wish,
        standing=standing(fields.priority, fields.cache_salt, None),
        rid=name,
        grammar=_grammar(fields),
    )
    chat = await prepare(asked, service)
    form = MessageForm(name, chat, wish.sampling.max_new_tokens, service)
    return Job(chat.requests, name, stream, form, FRAMING)


async def count_tokens(body: Json, service: Service) -> Json:
    """`/v1/messages/count_tokens`: how many tokens the messages have, tools included."""
    rendered = await render(_prompt(body, FIELDS.read(body), service), service, limited=False)
    return {"input_tokens": len(rendered.tokens)}


def _prompt(body: Json, fields: MessageFields, service: Service) -> ChatPrompt:
    refuse(body, REFUSED)
    if not fields.model:
        raise BadRequest("model is missing; GET /v1/models lists what is served", param="model")
    service.served.check(fields.model)
    if fields.messages is None:
        raise BadRequest("messages is missing", param="messages")
    messages = chat_messages(fields.messages, fields.system)
    return ChatPrompt(
        messages=messages,
        tools=chat_tools(fields.tools or []),
        choice=tool_choice(fields.tool_choice),
        variables=fields.chat_template_kwargs or {},
        reasoning=reasoning(fields.thinking, (fields.output_config or {}).get("effort")),
        continue_final_message=continues(messages),
    )


def _grammar(fields: MessageFields) -> Grammar | None:
    """`output_config.format`, or `output_format` as it was called first: `{"type": "json_schema", "schema"}`."""
    asked = (fields.output_config or {}).get("format") or fields.output_format
    if not asked:
        return None
    if not isinstance(asked, dict) or asked.get("type") != "json_schema" or not isinstance(asked.get("schema"), dict):
        raise BadRequest("output_config.format must be {type: json_schema, schema}", param="output_config.format")
    return schema_grammar(asked["schema"], "output_config.format")
