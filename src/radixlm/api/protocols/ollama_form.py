"""This module owns the shape of Ollama's answers: one object, or a line of JSON for each part and one for the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from radixlm.api import errors
from radixlm.api.limits import Json
from radixlm.api.protocols.chat import Chat
from radixlm.api.protocols.logprobs import TokenTexts, chat_logprobs
from radixlm.api.service import Service
from radixlm.api.sse import Framing
from radixlm.base.pieces import Piece
from radixlm.wire.messages import Stats, TextDelta

#: A line for each payload. There is no line that means nothing, so silence stays silence.
FRAMING = Framing(b"application/x-ndjson", b"", b"\n", b"", errors.ollama_body)

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Frame:
    """What every line repeats.

    Attributes:
        model: as the client wrote it.
        field: `message` (a chat) or `response` (a prompt).
    """

    model: str
    field: str

    def line(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        """A part of the answer."""
        line: Json = {"model": self.model, "created_at": now()}
        if self.field == "response":
            line["response"] = text
            if thinking:
                line["thinking"] = thinking
            return line
        message: Json = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        line["message"] = message
        return line


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaForm:
    """The shape of one answer (see `api.sse.Form`). Calls are told whole, when their arguments are complete."""

    patient = False

    def __init__(self, frame: Frame, chat: Chat, stream: bool, service: Service) -> None:
        self._frame = frame
        self._answers = chat.answers
        self._asked = chat.requests[0]
        self._texts = TokenTexts(service.tokenizer, hide_special=True)
        self._call = ""  # name of the call whose arguments are coming
        self._arguments: list[str] = []
        self._end: Json = {}

    def whole(self, results: list[TextDelta]) -> bytes:
        delta = results[0]
        turn = self._answers.turn(0, delta)
        calls = [_call(call.name, call.arguments) for call in turn.calls]
        line = self._frame.line(turn.text, turn.reasoning, calls)
        return msgspec.json.encode({**line, **self._scores(delta), **self._done(turn.finish, delta.stats)})

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        news = self._answers.news(index, delta)
        scores = self._scores(delta)
        for piece in news.pieces:
            for line in self._lines(piece):
                yield msgspec.json.encode({**line, "done": False, **scores})
                scores = {}
        if news.finish is not None:
            if self._call:
                yield msgspec.json.encode({**self._finished_call(), "done": False, **scores})
                scores = {}
            self._end = {**scores, **self._done(news.finish, delta.stats)}

    def last(self) -> Iterator[bytes]:
        yield msgspec.json.encode({**self._frame.line(), **self._end})

    def _lines(self, piece: Piece) -> Iterator[Json]:
        if piece.kind == "arguments":
            self._arguments.append(piece.text)
            return
        if self._call:
            yield self._finished_call()
        if piece.kind == "call":
            self._call = piece.text
        elif piece.kind == "reasoning":
            yield self._frame.line(thinking=piece.text)
        else:
            yield self._frame.line(piece.text)

    def _finished_call(self) -> Json:
        line = self._frame.line(calls=[_call(self._call, "".join(self._arguments))])
        self._call, self._arguments = "", []
        return line

    def _scores(self, delta: TextDelta) -> Json:
        if self._asked.logprobs is None or delta.scores is None:
            return {}
        return {"logprobs": chat_logprobs(delta.scores, self._texts).content}

    def _done(self, finish: str, stats: Stats | None) -> Json:
        """What the end says. Durations in nanoseconds; loading takes none."""
        counts = self._answers.counts
        return {"done": True, "done_reason": "length" if finish == "length" else "stop"} | durations(
            self._asked.arrival, counts.prompt, counts.completion, stats
        )


class LoadedForm:
    """The answer to a request without a prompt."""

    patient = False

    def __init__(self, frame: Frame, reason: str) -> None:
        self._line = {**frame.line(), "done": True, "done_reason": reason}

    def whole(self, results: list[TextDelta]) -> bytes:
        return msgspec.json.encode(self._line)

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        return iter(())

    def last(self) -> Iterator[bytes]:
        yield msgspec.json.encode(self._line)


def durations(arrival: float, prompt: int, completion: int, stats: Stats | None) -> Json:
    """Counts and times of an answer that began at `arrival` (`time.time()` seconds)."""
    started, first, ended = (stats.started, stats.first_token, stats.ended) if stats else (0.0, 0.0, 0.0)
    first = first or ended
    return {
        "total_duration": _nanoseconds(arrival, ended),
        "load_duration": 0,
        "prompt_eval_count": prompt,
        "prompt_eval_duration": _nanoseconds(started, first),
        "eval_count": completion,
        "eval_duration": _nanoseconds(first, ended),
    }


def _nanoseconds(begin: float, end: float) -> int:
    return max(0, int((end - begin) * NANOSECONDS)) if begin and end else 0


def _call(name: str, arguments: str) -> Json:
    """A call with its arguments as an object; what a limit cut in the middle is none and counts as empty."""
    try:
        read: Any = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        read = {}
    return {"function": {"name": name, "arguments": read if isinstance(read, dict) else {}}}
