"""This module owns the shape of Anthropic's answers: a message of blocks, or the events that build one.

message_start ping (content_block_start content_block_delta* content_block_stop)* message_delta message_stop
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from radixlm.api import errors
from radixlm.api.limits import Json
from radixlm.api.protocols.anthropic_messages import PREFIX
from radixlm.api.protocols.chat import Call, Chat
from radixlm.api.protocols.tally import Counts
from radixlm.api.service import Service
from radixlm.api.sse import EVENT_STREAM, Framing, named
from radixlm.base.errors import RadixError
from radixlm.base.pieces import Piece
from radixlm.wire.messages import TextDelta

PING = named(b'{"type":"ping"}', "ping")

#: Why an answer ended -> what Anthropic calls it.
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def failed(error: RadixError) -> bytes:
    return named(errors.anthropic_body(error), "error")


FRAMING = Framing(EVENT_STREAM, b"", b"\n\n", PING + b"\n\n", failed)


class MessageForm:
    """The shape of one answer (see `api.sse.Form`).

    Args:
        asked: the `max_tokens` of the client, which the context may have cut.
    """

    patient = False

    def __init__(self, name: str, chat: Chat, asked: int, service: Service) -> None:
        self._id = name
        self._answers = chat.answers
        self._cut = chat.requests[0].sampling.max_new_tokens < asked
        self._model = service.served.name
        self._begun = False
        self._open: Json | None = None  # the block that is being told
        self._index = -1
        self._end: Json = {}

    def whole(self, results: list[TextDelta]) -> bytes:
        turn = self._answers.turn(0, results[0])
        content: list[Json] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
        if turn.text:
            content.append({"type": "text", "text": turn.text})
        content.extend({**_tool_use(call.id, call.name), "input": _input(call)} for call in turn.calls)
        message = self._message(content, usage(self._answers.counts))
        return msgspec.json.encode({**message, **self._stop(turn.finish, turn.matched)})

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        news = self._answers.news(index, delta)
        if not self._begun:
            self._begun = True
            yield _event("message_start", message=self._message([], usage(self._answers.counts)))
            yield PING
        for piece in news.pieces:
            yield from self._tell(piece)
        if news.finish is not None:
            yield from self._close()
            self._end = self._stop(news.finish, news.matched)

    def last(self) -> Iterator[bytes]:
        yield _event("message_delta", delta=self._end, usage=usage(self._answers.counts))
        yield _event("message_stop")

    def _tell(self, piece: Piece) -> Iterator[bytes]:
        if piece.kind == "call":
            call = _tool_use(self._answers.call_id(0, piece.call), piece.text)
            yield from self._begin({**call, "input": {}})
        elif piece.kind == "arguments":
            yield self._delta("input_json_delta", partial_json=piece.text)
        elif piece.kind == "reasoning":
            if not self._is_open("thinking"):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=piece.text)
        else:
            if not self._is_open("text"):
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta("text_delta", text=piece.text)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, block: Json) -> Iterator[bytes]:
        yield from self._close()
        self._index += 1
        self._open = block
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def _stop(self, finish: str, matched: int | str | None) -> Json:
        reason = REASONS[finish]
        if finish == "stop" and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        if finish == "length" and self._cut:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: list[Json], counts: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
        }


def usage(counts: Counts) -> Json:
    """Tokens of the prompt that came from the cache are told apart from the others, as Anthropic does."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }


def _tool_use(id: str, name: str) -> Json:
    return {"type": "tool_use", "id": PREFIX + id, "name": name}


def _input(call: Call) -> Any:
    """The arguments as an object; what a limit cut in the middle is none and counts as empty."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return named(msgspec.json.encode({"type": kind, **fields}), kind)
