"""This module owns `HttpTarget`: one request of a load, sent to an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from radixlm.base.errors import BadRequest, Internal
from radixlm.bench.datasets import Turn
from radixlm.bench.loadgen import Clock, Record, Said
from radixlm.client.framing import bad_response
from radixlm.client.http import Client

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def piece(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    """The fields of a streamed chunk that are measured."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class HttpTarget:
    """Streams one request of a load from an OpenAI-compatible server.

    Args:
        route: `COMPLETIONS` or `CHAT`.
        fields: further fields of every body, such as `ignore_eos`.
    """

    def __init__(self, client: Client, model: str, route: str, fields: dict[str, Any]) -> None:
        if route not in (COMPLETIONS, CHAT):
            raise BadRequest(f"the load generator speaks {COMPLETIONS} and {CHAT}, not {route!r}", param="endpoint")
        self._client = client
        self._route = route
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self._decoder = msgspec.json.Decoder(_Chunk)

    async def send(self, said: Sequence[Said], turn: Turn, record: Record, clock: Clock) -> str:
        body = self._body(said, turn)
        usage: _Usage | None = None
        pieces: list[str] = []
        async with aclosing(self._client.events(self._route, body)) as events:
            async for event in events:
                now = clock()
                try:
                    chunk = self._decoder.decode(event)
                except msgspec.DecodeError as error:
                    raise bad_response(f"a chunk is not of {self._route}: {error}") from None
                usage = chunk.usage or usage
                piece = chunk.choices[0].piece() if chunk.choices else ""
                if piece:
                    record.stamps.append(now)
                    pieces.append(piece)
        record.end = clock()
        if usage is not None:
            record.input_tokens = usage.prompt_tokens
            record.output_tokens = usage.completion_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0
        else:  # a server that does not report usage; one token a piece is the usual
            record.input_tokens = len(turn.ids or ())
            record.output_tokens = len(record.stamps)
        if record.output_tokens == 0:
            raise Internal("the answer holds no token", code="empty_answer")
        return "".join(pieces)

    def _body(self, said: Sequence[Said], turn: Turn) -> dict[str, Any]:
        if self._route == CHAT:
            messages = []
            for part in said:
                messages.append({"role": "user", "content": part.turn.text})
                messages.append({"role": "assistant", "content": part.answer})
            messages.append({"role": "user", "content": turn.text})
            return {**self._fields, "messages": messages, "max_tokens": turn.max_tokens}
        if turn.ids is not None:
            if said:
                raise BadRequest(
                    "later turns hold the server's answers, which are text: ids cannot be joined with them"
                )
            prompt: str | tuple[int, ...] = turn.ids
        else:
            prompt = "".join(f"{part.turn.text}\n{part.answer}\n" for part in said) + (turn.text or "")
        return {**self._fields, "prompt": prompt, "max_tokens": turn.max_tokens}
