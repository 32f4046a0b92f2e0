"""This module owns the way from a program to any server that speaks OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from radixlm.base.errors import Internal, NotServed
from radixlm.client.http import Client
from radixlm.lang.backends import hosted
from radixlm.lang.backends.base import Answer, Backend, Scheduling
from radixlm.lang.ir import Expr, Gen
from radixlm.lang.params import Params
from radixlm.lang.prompt import Message, Prompt

Json = dict[str, Any]

KNOWN: Mapping[str, str] = {
    "max_new_tokens": "max_tokens", "n": "n", "stop": "stop", "temperature": "temperature", "top_p": "top_p",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "seed": "seed",
    "return_logprob": "logprobs", "top_logprobs_num": "top_logprobs", "json_schema": "response_format",
}  # fmt: skip

#: Fields that radixlm and other open servers take beyond OpenAI's.
EXTENSIONS: Mapping[str, str] = {
    "min_new_tokens": "min_tokens", "stop_token_ids": "stop_token_ids", "stop_regex": "stop_regex", "top_k": "top_k",
    "min_p": "min_p", "repetition_penalty": "repetition_penalty", "ignore_eos": "ignore_eos", "regex": "regex",
    "ebnf": "ebnf",
}  # fmt: skip


class OpenAI(Backend):
    """OpenAI's service, or any server with its routes. Chats go to `/v1/chat/completions`, plain text to
    `/v1/completions`.

    Args:
        model: the first one that the server lists if not given.
        url: where `/v1/...` is.
        extensions: the server takes more than OpenAI does, as radixlm does: `top_k`, `regex` and the like, and
            continues a message that the program has begun.
    """

    metered = True

    def __init__(
        self,
        model: str | None = None,
        *,
        url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        extensions: bool = False,
        timeout: float = 600.0,
        scheduling: Scheduling | None = None,
    ) -> None:
        super().__init__(scheduling or Scheduling(limit=64))
        self._client = Client(url, api_key, timeout=timeout)
        self._model = model
        self._extended = extensions
        self._known = {**KNOWN, **(EXTENSIONS if extensions else {})}
        self.name = f"the OpenAI API at {self._client.url}"
        more = ("continue", "regex", "ebnf") if extensions else ()
        self.can = frozenset(("text", "chat", "images", "n", "logprobs", "json_schema", *more))

    def check(self, node: Expr, *, chat: bool | None = None) -> None:
        super().check(node, chat=chat)
        if isinstance(node, Gen) and node.params.json_schema and chat is False:
            raise NotServed(f"{self.name} cannot do json_schema outside of a chat; put it into a role")

    def check_params(self, params: Params) -> None:
        hosted.check(self.name, params, self._known)

    async def generate(self, prompt: Prompt, params: Params) -> list[Answer]:
        route, body = await self._body(prompt, params)
        answer = await self._client.post(route, body)
        try:
            usage = answer.get("usage") or {}
            return [
                Answer(_text(choice, "message"), _meta(choice, usage, answer.get("id"))) for choice in answer["choices"]
            ]
        except (AttributeError, KeyError, TypeError):
            raise Internal(f"{self.name} sent no completion: {str(answer)[:80]!r}", code="bad_response") from None

    async def stream(self, prompt: Prompt, params: Params) -> AsyncIterator[Answer]:
        route, body = await self._body(prompt, params)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, last = "", {}
        usage: Json = {}
        async with aclosing(self._client.events(route, body)) as events:
            async for event in events:
                chunk = msgspec.json.decode(event)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    last = choice
                    text += _text(choice, "delta")
                    yield Answer(text, {})
        yield Answer(text, _meta(last, usage, None))

    async def _body(self, prompt: Prompt, params: Params) -> tuple[str, Json]:
        self.check_params(params)
        body: Json = {"model": self._model or await self._client.model()}
        for name, value in hosted.telling(params).items():
            body[self._known[name]] = value
        if params.json_schema:
            schema = {"name": "answer", "schema": msgspec.json.decode(params.json_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if not prompt.chat:
            if body.pop("logprobs", False):
                body["logprobs"] = body.pop("top_logprobs", 0)
            return "/v1/completions", body | {"prompt": prompt.text}
        messages = [_message(message) for message in prompt.messages]
        opened = prompt.open
        if opened is not None and (opened.parts or opened.role != "assistant"):
            if not self._extended:
                begun = opened.text[:40] or opened.role
                raise NotServed(
                    f"{self.name} cannot continue a message that is begun ({begun!r}): let the model write the whole "
                    "message, or make the program with num_api_spec_tokens"
                )
            messages.append(_message(opened))
            body["continue_final_message"] = True
            body["add_generation_prompt"] = False
        return "/v1/chat/completions", body | {"messages": messages}

    async def server_info(self) -> Json:
        return {"name": self.name, "models": await self._client.get("/v1/models")}

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
            url = f"data:{kind};base64,{data}" if kind else data
            content.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": message.role, "content": content}


def _text(choice: Json, kind: str) -> str:
    """Of a chat's choice or chunk (`kind`), or of a completion's."""
    return str((choice[kind].get("content") if kind in choice else choice.get("text")) or "")


def _meta(choice: Json, usage: Json, name: str | None) -> Json:
    details = usage.get("prompt_tokens_details") or {}
    meta = {
        "id": name,
        "finish_reason": {"type": choice.get("finish_reason")},
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "completion_tokens": usage.get("completion_tokens", 0),
        "cached_tokens": details.get("cached_tokens") or 0,
    }
    return meta | ({"logprobs": choice["logprobs"]} if choice.get("logprobs") else {})
