"""This module owns the way from a program to a server that speaks Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from radixlm.base.errors import BadRequest, Internal, NotServed
from radixlm.client.http import Client
from radixlm.lang.backends import hosted
from radixlm.lang.backends.base import Answer, Backend, Scheduling
from radixlm.lang.params import Params
from radixlm.lang.prompt import Message, Prompt

Json = dict[str, Any]

#: Of the protocol that is spoken here.
VERSION = "2023-06-01"
ROUTE = "/v1/messages"

KNOWN: Mapping[str, str] = {
    "max_new_tokens": "max_tokens", "stop": "stop_sequences", "temperature": "temperature", "top_p": "top_p",
    "top_k": "top_k",
}  # fmt: skip

#: The API's reasons to end -> ours.
ENDS: Mapping[str, str] = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


class Anthropic(Backend):
    """Anthropic's service, or any server with its route.

    Args:
        url: where `/v1/messages` is.
        prefill: the model continues an assistant's message that the program has begun. Some models refuse it.
    """

    metered = True

    def __init__(
        self,
        model: str,
        *,
        url: str = "https://api.anthropic.com",
        api_key: str | None = None,
        prefill: bool = True,
        timeout: float = 600.0,
        scheduling: Scheduling | None = None,
    ) -> None:
        super().__init__(scheduling or Scheduling(limit=64))
        headers = {"anthropic-version": VERSION, **({"x-api-key": api_key} if api_key else {})}
        self._client = Client(url, timeout=timeout, headers=headers)
        self._model = model
        self.name = f"the Anthropic API at {self._client.url}"
        self.can = frozenset(("chat", "images", *(("continue",) if prefill else ())))

    def check_params(self, params: Params) -> None:
        hosted.check(self.name, params, KNOWN)

    async def generate(self, prompt: Prompt, params: Params) -> list[Answer]:
        answer = await self._client.post(ROUTE, self._body(prompt, params))
        try:
            text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
            return [Answer(text, _meta(answer, answer.get("usage") or {}))]
        except (KeyError, TypeError):
            raise Internal(f"{self.name} sent no message: {str(answer)[:80]!r}", code="bad_response") from None

    async def stream(self, prompt: Prompt, params: Params) -> AsyncIterator[Answer]:
        body = {**self._body(prompt, params), "stream": True}
        text = ""
        usage: Json = {}
        end: Json = {}
        async with aclosing(self._client.events(ROUTE, body)) as events:
            async for event in events:
                news = msgspec.json.decode(event)
                kind = news.get("type")
                if kind == "message_start":
                    end |= {"id": news["message"].get("id")}
                    usage |= news["message"].get("usage") or {}
                elif kind == "content_block_delta" and news["delta"].get("type") == "text_delta":
                    text += news["delta"]["text"]
                    yield Answer(text, {})
                elif kind == "message_delta":
                    end |= news.get("delta") or {}
                    usage |= news.get("usage") or {}
                elif kind == "message_stop":
                    break
        yield Answer(text, _meta(end, usage))

    def _body(self, prompt: Prompt, params: Params) -> Json:
        self.check_params(params)
        body: Json = {"model": self._model}
        for name, value in hosted.telling(params).items():
            body[KNOWN[name]] = [value] if name == "stop" and isinstance(value, str) else value
        messages = list(prompt.messages)
        if messages and messages[0].role == "system":
            body["system"] = messages.pop(0).text
        if prompt.open is not None and (prompt.open.parts or prompt.open.role != "assistant"):
            if prompt.open.role != "assistant" or "continue" not in self.can:
                raise NotServed(f"{self.name} cannot continue a message of {prompt.open.role} that is begun")
            messages.append(prompt.open)
        if any(message.role == "system" for message in messages):
            raise BadRequest(f"{self.name} takes one system message, at the beginning", param="messages")
        return body | {"messages": [_message(message) for message in messages]}

    async def close(self) -> None:
        await self._client.close()


def _message(message: Message) -> Json:
    if all(isinstance(part, str) for part in message.parts):
        return message.plain()
    content: list[Json] = []
    for part in message.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            kind, data = hosted.picture(part.source)
            source = {"type": "base64", "media_type": kind, "data": data} if kind else {"type": "url", "url": data}
            content.append({"type": "image", "source": source})
    return {"role": message.role, "content": content}


def _meta(end: Json, usage: Json) -> Json:
    reason = end.get("stop_reason")
    return {
        "id": end.get("id"),
        "finish_reason": {"type": ENDS.get(reason or "", reason), "matched": end.get("stop_sequence")},
        "prompt_tokens": usage.get("input_tokens", 0),
        "completion_tokens": usage.get("output_tokens", 0),
        "cached_tokens": usage.get("cache_read_input_tokens") or 0,
    }
