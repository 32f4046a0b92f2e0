"""This module owns the shape of `/v1/responses`' answers: a list of items, or the numbered events that build it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from radixlm.api import errors
from radixlm.api.limits import Json
from radixlm.api.protocols.chat import Answers, Chat
from radixlm.api.protocols.logprobs import TokenTexts, chat_logprobs
from radixlm.api.protocols.tally import Counts
from radixlm.api.service import Service
from radixlm.api.sse import EVENT_STREAM, Framing, named
from radixlm.base.errors import RadixError
from radixlm.base.pieces import Piece
from radixlm.wire.messages import TextDelta

#: An event as a name and fields; its number is given when it is sent.
Event = tuple[str, Json]

KEEP_ALIVE = b": keep-alive\n\n"


class Items:
    """Makes output items of pieces, and the events that tell of them.

    Attributes:
        output: the items so far. The last one may still grow.
    """

    def __init__(self, answers: Answers) -> None:
        self.output: list[Json] = []
        self._answers = answers
        self._open = ""  # kind of piece that the last item takes

    def tell(self, piece: Piece, logprobs: list[Any]) -> Iterator[Event]:
        if piece.kind == "arguments":
            item = self.output[-1]
            item["arguments"] += piece.text
            yield "response.function_call_arguments.delta", {**self._where(), "delta": piece.text}
            return
        if piece.kind == "call" or self._open != piece.kind:
            yield from self.close()
            yield from self._begin(piece)
        if piece.kind == "text":
            part = self.output[-1]["content"][0]
            part["text"] += piece.text
            part["logprobs"].extend(logprobs)
            fields = {"content_index": 0, "delta": piece.text, "logprobs": logprobs}
            yield "response.output_text.delta", {**self._where(), **fields}
        elif piece.kind == "reasoning":
            self.output[-1]["content"][0]["text"] += piece.text
            yield "response.reasoning_text.delta", {**self._where(), "content_index": 0, "delta": piece.text}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The last item is complete, or was cut."""
        if not self._open:
            return
        item, where = self.output[-1], self._where()
        if self._open == "call":
            yield (
                "response.function_call_arguments.done",
                {**where, "arguments": item["arguments"], "name": item["name"]},
            )
        else:
            part = item["content"][0]
            done: Json = {**where, "content_index": 0, "text": part["text"]}
            if self._open == "text":
                yield "response.output_text.done", {**done, "logprobs": part["logprobs"]}
            else:
                yield "response.reasoning_text.done", done
            yield "response.content_part.done", {**where, "content_index": 0, "part": part}
        item["status"] = status
        yield "response.output_item.done", {"output_index": where["output_index"], "item": item}
        self._open = ""

    def _begin(self, piece: Piece) -> Iterator[Event]:
        self._open = piece.kind
        part: Json | None = None
        if piece.kind == "call":
            item: Json = {
                "id": _name("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": self._answers.call_id(0, piece.call),
                "name": piece.text,
                "arguments": "",
            }
        elif piece.kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _name("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _name("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self.output.append(item)
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": item}
        if part is not None:
            yield "response.content_part.added", {**self._where(), "content_index": 0, "part": part}
            item["content"].append(part)

    def _where(self) -> Json:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}


class ResponseForm:
    """The shape of one response (see `api.sse.Form`).

    Args:
        frame: the response's own fields, which echo what was asked; `id` among them.
        keep: called with the response when it has ended, however it did, unless it is to be forgotten.
    """

    patient = False

    def __init__(self, frame: Json, chat: Chat, keep: Callable[[Json], None], service: Service) -> None:
        self._frame = frame
        self._answers = chat.answers
        self._items = Items(chat.answers)
        self._keep = keep
        self._with_scores = chat.requests[0].logprobs is not None
        self._texts = TokenTexts(service.tokenizer, hide_special=True)
        self._number = 0
        self._begun = False
        self._finish = "stop"

    @property
    def framing(self) -> Framing:
        """Of its own stream: an error has a number too."""
        return Framing(EVENT_STREAM, b"", b"\n\n", KEEP_ALIVE, self._failed)

    def whole(self, results: list[TextDelta]) -> bytes:
        for _ in self._hear(results[0]):
            pass
        response = self._ended()
        self._keep(response)
        return msgspec.json.encode(response)

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        events = list(self._hear_encoded(delta))
        if not self._begun:
            self._begun = True
            waiting = self.state("in_progress", [])
            yield self._event("response.created", {"response": waiting})
            yield self._event("response.in_progress", {"response": waiting})
        for kind, body in events:
            yield self._numbered(kind, body)

    def last(self) -> Iterator[bytes]:
        response = self._ended()
        self._keep(response)
        yield self._event(f"response.{response['status']}", {"response": response})

    def state(self, status: str, output: Iterable[Json], error: RadixError | None = None) -> Json:
        """The response as it stands."""
        return {
            **self._frame,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": {"code": "server_error", "message": error.message} if error is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(output),
            "usage": usage(self._answers.counts) if status in ("completed", "incomplete") else None,
        }

    def failed(self, error: RadixError) -> Json:
        """The response that an error ended, or the client who cancelled it. It is kept."""
        cancelled = isinstance(error, errors.Aborted)
        for _ in self._items.close("incomplete"):
            pass
        response = self.state("cancelled" if cancelled else "failed", self._items.output, None if cancelled else error)
        self._keep(response)
        return response

    def _hear(self, delta: TextDelta) -> Iterator[Event]:
        news = self._answers.news(0, delta)
        scores: list[Any] = []
        if self._with_scores and delta.scores is not None:
            scores = chat_logprobs(delta.scores, self._texts).content
        for piece in news.pieces:
            yield from self._items.tell(piece, scores if piece.kind == "text" else [])
            if piece.kind == "text":
                scores = []
        if news.finish is not None:
            self._finish = news.finish
            yield from self._items.close("incomplete" if news.finish == "length" else "completed")

    def _hear_encoded(self, delta: TextDelta) -> Iterator[tuple[str, bytes]]:
        """Items go on growing, so what an event says of one is written down at once."""
        for kind, fields in self._hear(delta):
            yield kind, msgspec.json.encode(fields)

    def _ended(self) -> Json:
        return self.state("incomplete" if self._finish == "length" else "completed", self._items.output)

    def _failed(self, error: RadixError) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        told = self._event("error", fields)
        return told + b"\n\n" + self._event("response.failed", {"response": self.failed(error)})

    def _event(self, kind: str, fields: Json) -> bytes:
        return self._numbered(kind, msgspec.json.encode(fields))

    def _numbered(self, kind: str, fields: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        head = msgspec.json.encode({"type": kind, "sequence_number": number})
        return named(head[:-1] + b"," + fields[1:], kind)


def usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }


def _name(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
