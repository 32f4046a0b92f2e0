"""This module owns `/v1/chat/completions`: messages in, an assistant's message out, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from radixlm.api.errors import NotSupported
from radixlm.api.limits import Json, check_count
from radixlm.api.protocols.chat_prompt import render
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.logprobs import ChatLogprobs, TokenTexts, chat_logprobs
from radixlm.api.protocols.openai import (
    UNSERVED,
    Common,
    Tally,
    Usage,
    frame,
    make_requests,
    raise_failure,
    read_common,
)
from radixlm.api.protocols.prompts import Prompt
from radixlm.api.service import Service
from radixlm.api.sse import DONE
from radixlm.base.errors import BadRequest
from radixlm.base.request import LogprobParams
from radixlm.wire.messages import TextDelta

REFUSED = {
    **UNSERVED,
    "audio": "audio output",
    "web_search_options": "web search",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "input_ids": "use /generate or /v1/completions for token ids",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    "chat_template": "templates in requests; the operator sets one with --chat-template",
}


class ChatFields(msgspec.Struct, kw_only=True, frozen=True):
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    tool_choice: str | dict[str, Any] | None = None


FIELDS = Reader(ChatFields)


async def parse(body: Json, service: Service) -> Job:
    common = read_common(body, service, id_prefix="chatcmpl", max_new_tokens=None)
    fields = FIELDS.read(body)
    refuse(body, REFUSED)
    _check_served(fields)
    logprobs = _logprobs(fields, service)
    prompt = Prompt(await render(body, service))
    requests = make_requests(common, [prompt], logprobs, service, "messages")
    return Job(tuple(requests), common.rid, common.stream, Chat(common, prompt, logprobs, service))


def _check_served(fields: ChatFields) -> None:
    """Refuse forms of answer that are not served."""
    for modality in fields.modalities or ():
        if modality != "text":
            raise NotSupported(f"modality {modality[:40]!r} is not supported; answers are text", param="modalities")
    if fields.tool_choice not in (None, "none", "auto"):
        raise NotSupported("a tool_choice that forces a call is not supported; use auto or none", param="tool_choice")


def _logprobs(fields: ChatFields, service: Service) -> LogprobParams | None:
    top = fields.top_logprobs or 0
    check_count(top, 0, service.config.limits.max_logprobs, "top_logprobs", "max-logprobs")
    if fields.logprobs:
        return LogprobParams(top=top)
    if top:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class Message(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: int | str | None
    token_ids: Sequence[int] | UnsetType = UNSET


class Answer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class Chunk(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Chat:
    """The shape of one answer, whole or in chunks (see `api.sse.Form`)."""

    patient = False

    def __init__(self, common: Common, prompt: Prompt, logprobs: LogprobParams | None, service: Service) -> None:
        self._common = common
        self._prompt = prompt
        self._logprobs = logprobs is not None
        self._service = service
        self._frame = frame(common, service)
        self._tally = Tally([len(prompt.tokens)], common.wish.choices)
        self._texts = TokenTexts(service.tokenizer, hide_special=common.wish.text.skip_special_tokens)
        self._begun: set[int] = set()

    def whole(self, results: list[TextDelta]) -> bytes:
        choices = []
        for index, delta in enumerate(results):
            raise_failure(delta, self._service)
            self._tally.note(index, delta)
            finish = delta.finish
            choices.append(
                Choice(
                    index,
                    Message(delta.text),
                    self._scored(delta),
                    finish.kind if finish else "stop",
                    finish.matched if finish else None,
                    delta.ids if self._common.return_token_ids else UNSET,
                )
            )
        f = self._frame
        prompt_ids = self._prompt.tokens if self._common.return_token_ids else UNSET
        return msgspec.json.encode(
            Answer(f.id, "chat.completion", f.created, f.model, f.fingerprint, choices, self._tally.usage(), prompt_ids)
        )

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        raise_failure(delta, self._service)
        self._tally.note(index, delta)
        with_ids = self._common.return_token_ids
        if index not in self._begun:
            prompt_ids = self._prompt.tokens if with_ids and not self._begun else UNSET
            self._begun.add(index)
            yield self._chunk(ChunkChoice(index, Delta("assistant", "")), prompt_ids)
        if delta.text or (delta.ids and (self._logprobs or with_ids)):
            ids = delta.ids if with_ids else UNSET
            yield self._chunk(ChunkChoice(index, Delta(content=delta.text), self._scored(delta), token_ids=ids))
        if delta.finish is not None:
            finish = delta.finish
            yield self._chunk(ChunkChoice(index, Delta(), None, finish.kind, finish.matched))

    def last(self) -> Iterator[bytes]:
        if self._common.include_usage:
            yield self._encoded([], self._tally.usage())
        yield DONE

    def _scored(self, delta: TextDelta) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return chat_logprobs(delta.scores, self._texts) if delta.scores is not None else ChatLogprobs([])

    def _chunk(self, choice: ChunkChoice, prompt_ids: Sequence[int] | UnsetType = UNSET) -> bytes:
        usage: Usage | UnsetType | None = None if self._common.include_usage else UNSET
        if self._common.continuous_usage:
            usage = self._tally.usage()
        return self._encoded([choice], usage, prompt_ids)

    def _encoded(
        self,
        choices: list[ChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: Sequence[int] | UnsetType = UNSET,
    ) -> bytes:
        f = self._frame
        return msgspec.json.encode(
            Chunk(f.id, "chat.completion.chunk", f.created, f.model, f.fingerprint, choices, usage, prompt_ids)
        )
