"""This module owns `/v1/chat/completions`: messages in, an assistant's message out, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from radixlm.api.errors import NotSupported
from radixlm.api.limits import Json, check_count
from radixlm.api.protocols.chat import Chat, ChatWish, Turn, prepare
from radixlm.api.protocols.chat_prompt import read_prompt
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.logprobs import ChatLogprobs, TokenTexts, chat_logprobs
from radixlm.api.protocols.openai import (
    UNSERVED,
    Common,
    Usage,
    frame,
    read_common,
    usage_of,
)
from radixlm.api.service import Service
from radixlm.api.sse import DONE
from radixlm.base.errors import BadRequest
from radixlm.base.pieces import Piece
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


FIELDS = Reader(ChatFields)


async def parse(body: Json, service: Service) -> Job:
    common = read_common(body, service, id_prefix="chatcmpl", max_new_tokens=None)
    fields = FIELDS.read(body)
    refuse(body, REFUSED)
    _check_served(fields)
    asked = ChatWish(
        prompt=read_prompt(body),
        wish=common.wish,
        standing=common.standing,
        rid=common.rid,
        logprobs=_logprobs(fields, service),
    )
    chat = await prepare(asked, service)
    return Job(chat.requests, common.rid, common.stream, ChatForm(common, chat, service))


def _check_served(fields: ChatFields) -> None:
    """Refuse forms of answer that are not served."""
    for modality in fields.modalities or ():
        if modality != "text":
            raise NotSupported(f"modality {modality[:40]!r} is not supported; answers are text", param="modalities")


def _logprobs(fields: ChatFields, service: Service) -> LogprobParams | None:
    top = fields.top_logprobs or 0
    check_count(top, 0, service.config.limits.max_logprobs, "top_logprobs", "max-logprobs")
    if fields.logprobs:
        return LogprobParams(top=top)
    if top:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class Function(msgspec.Struct, frozen=True):
    """`name` comes first and once; in a stream `arguments` come in parts."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True):
    function: Function
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True):
    """Reasoning has the two names that clients look for."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


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


class ChatForm:
    """The shape of one answer, whole or in chunks (see `api.sse.Form`)."""

    patient = False

    def __init__(self, common: Common, chat: Chat, service: Service) -> None:
        self._common = common
        self._prompt = chat.prompt
        self._answers = chat.answers
        self._logprobs = chat.requests[0].logprobs is not None
        self._frame = frame(common, service)
        self._texts = TokenTexts(service.tokenizer, hide_special=common.wish.text.skip_special_tokens)
        self._begun: set[int] = set()

    def whole(self, results: list[TextDelta]) -> bytes:
        choices = []
        for index, delta in enumerate(results):
            turn = self._answers.turn(index, delta)
            ids = delta.ids if self._common.return_token_ids else UNSET
            choices.append(Choice(index, _message(turn), self._scored(delta), turn.finish, turn.matched, ids))
        f = self._frame
        usage = usage_of(self._answers.counts)
        prompt_ids = self._prompt.tokens if self._common.return_token_ids else UNSET
        return msgspec.json.encode(
            Answer(f.id, "chat.completion", f.created, f.model, f.fingerprint, choices, usage, prompt_ids)
        )

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        news = self._answers.news(index, delta)
        with_ids = self._common.return_token_ids
        if index not in self._begun:
            prompt_ids = self._prompt.tokens if with_ids and not self._begun else UNSET
            self._begun.add(index)
            yield self._chunk(ChunkChoice(index, Delta("assistant", "")), prompt_ids)
        parts = [self._delta(index, piece) for piece in news.pieces]
        if not parts and delta.ids and (self._logprobs or with_ids):
            parts = [Delta(content="")]
        for place, part in enumerate(parts):  # ids and scores of the delta go with its first part
            scores = self._scored(delta) if place == 0 else None
            ids = delta.ids if with_ids and place == 0 else UNSET
            yield self._chunk(ChunkChoice(index, part, scores, token_ids=ids))
        if news.finish is not None:
            yield self._chunk(ChunkChoice(index, Delta(), None, news.finish, news.matched))

    def last(self) -> Iterator[bytes]:
        if self._common.include_usage:
            yield self._encoded([], usage_of(self._answers.counts))
        yield DONE

    def _delta(self, index: int, piece: Piece) -> Delta:
        if piece.kind == "text":
            return Delta(content=piece.text)
        if piece.kind == "reasoning":
            return Delta(reasoning_content=piece.text, reasoning=piece.text)
        if piece.kind == "call":
            id = self._answers.call_id(index, piece.call)
            return Delta(tool_calls=[ToolCall(Function("", piece.text), id, "function", piece.call)])
        return Delta(tool_calls=[ToolCall(Function(piece.text), index=piece.call)])

    def _scored(self, delta: TextDelta) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return chat_logprobs(delta.scores, self._texts) if delta.scores is not None else ChatLogprobs([])

    def _chunk(self, choice: ChunkChoice, prompt_ids: Sequence[int] | UnsetType = UNSET) -> bytes:
        usage: Usage | UnsetType | None = None if self._common.include_usage else UNSET
        if self._common.continuous_usage:
            usage = usage_of(self._answers.counts)
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


def _message(turn: Turn) -> Message:
    """`content` is null where there is a call or reasoning and no text; a plain answer without text is ""."""
    calls = [ToolCall(Function(call.arguments, call.name), call.id, "function") for call in turn.calls]
    return Message(
        turn.text or (None if calls or turn.reasoning else ""),
        reasoning_content=turn.reasoning or UNSET,
        reasoning=turn.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
