"""This module owns how an answer leaves, whole or as server-sent events; a client who leaves ends the work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixlm.api import errors
from radixlm.api.stream import UNREAD_BYTES, WHOLE_BYTES, Abandoned, Stream, TooSlow
from radixlm.base.errors import RadixError, TooLarge
from radixlm.wire.messages import TextDelta

DONE = b"[DONE]"

#: Seconds that a client may take nothing of what was sent to it; then its request ends and the connection is closed.
UNREAD_SECONDS = 60.0

log = logging.getLogger("radixlm.api")


@dataclass(frozen=True, slots=True)
class Framing:
    """How a stream is cut into events.

    Attributes:
        prefix, suffix: around each payload.
        keep_alive: sent after a while of silence; empty for nothing.
        error: the payloads that tell of an error after the stream has begun.
    """

    content_type: bytes
    prefix: bytes
    suffix: bytes
    keep_alive: bytes
    error: Callable[[RadixError], bytes]

    def framed(self, payload: bytes) -> bytes:
        return self.prefix + payload + self.suffix

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", self.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]


EVENT_STREAM = b"text/event-stream; charset=utf-8"

#: Server-sent events without names, as OpenAI has them.
SSE = Framing(EVENT_STREAM, b"data: ", b"\n\n", b": keep-alive\n\n", errors.body)


def named(payload: bytes, name: str) -> bytes:
    """The payload of an event with a name, for a framing without a prefix."""
    return b"event: " + name.encode() + b"\ndata: " + payload


class Form(Protocol):
    """The shape of one answer in its client's dialect. Payloads are what its framing goes around: JSON without line
    breaks, ready to send.

    Attributes:
        patient: a sequence that fails does not fail the others; else the first failure is the answer.
    """

    patient: bool

    def whole(self, results: list[TextDelta]) -> bytes:
        """The answer, from one delta for each sequence. Raises the error of one that failed."""
        ...

    def piece(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        """The events that tell of `delta`. Raises the error of a sequence that failed."""
        ...

    def last(self) -> Iterable[bytes]:
        """The events after every sequence ended."""
        ...


@contextlib.asynccontextmanager
async def watching(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """Within it, `gone` is called as soon as the client disconnects. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class Whole:
    """ASGI response: waits for every sequence, then one JSON body. Owns the stream and closes it."""

    def __init__(self, stream: Stream, form: Form) -> None:
        self._stream = stream
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream as stream:
            stream.bound(
                WHOLE_BYTES, TooLarge("the answer is too large for one piece; ask for fewer log-probabilities")
            )
            try:
                async with watching(receive, stream.abandon):
                    results = await stream.whole(patient=self._form.patient)
            except Abandoned:
                return  # nobody reads an answer
            body = self._form.whole(results)
        await Response(body, media_type="application/json")(scope, receive, send)


class Events:
    """ASGI response: an event for each payload, as they come. Owns the stream and closes it.

    Headers are held back until there is news or `keep_alive` seconds have passed, so that a request refused by the
    engine still gets its own status. Later errors become an event, after which the stream ends without `[DONE]`.

    A client that reads slowly gets fewer, longer events: what it has not taken is merged. One that takes nothing for
    `UNREAD_SECONDS`, or lets more than `UNREAD_BYTES` of a sequence wait, is cut.
    """

    def __init__(self, stream: Stream, form: Form, keep_alive: float, framing: Framing = SSE) -> None:
        self._stream = stream
        self._form = form
        self._framing = framing
        self._keep_alive = keep_alive or None
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream as stream:
            stream.bound(UNREAD_BYTES, TooSlow(f"the client reads too slowly: over {UNREAD_BYTES} bytes wait for it"))
            try:
                async with watching(receive, stream.abandon):
                    await self._send_all(send)
            except TimeoutError:
                # It cannot be told: it does not read. Leaving without an end closes the connection.
                log.warning("request %s: cut, its client has taken nothing for %g s", _id(scope), UNREAD_SECONDS)
            except (Abandoned, OSError):
                return  # the client is gone; leaving ends the work
            except RadixError as error:
                if not self._started:
                    raise
                await self._end_with(error, send)
            except Exception:
                if not self._started:
                    raise
                log.exception("request %s: a stream failed", _id(scope))
                await self._end_with(errors.internal(), send)

    async def _send_all(self, send: Send) -> None:
        stream, form, framed = self._stream, self._form, self._framing.framed
        while not stream.done:
            if not await stream.wait(self._keep_alive):
                if self._framing.keep_alive:
                    await self._send(self._framing.keep_alive, send)
                continue
            events: list[bytes] = []
            try:
                for index, delta in stream.take():
                    events.extend(map(framed, form.piece(index, delta)))
            finally:
                # What other sequences had to say goes out even if one of them failed, unless this can still be a plain
                # error.
                if events and (self._started or not stream.failed):
                    await self._send(b"".join(events), send)
        await self._send(b"".join(map(framed, form.last())), send, more=False)

    async def _send(self, body: bytes, send: Send, *, more: bool = True) -> None:
        async with asyncio.timeout(UNREAD_SECONDS):
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._framing.headers})
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _end_with(self, error: RadixError, send: Send) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await self._send(self._framing.framed(self._framing.error(error)), send, more=False)


def _id(scope: Scope) -> str:
    return str(scope.get("state", {}).get("request_id"))
