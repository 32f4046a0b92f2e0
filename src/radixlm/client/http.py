"""This module owns `Client`: asynchronous HTTP/1.1 to one server, with kept connections and streams of low overhead."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any

import msgspec

from radixlm.base.errors import BadRequest, RadixError, TimedOut, Unavailable, by_status
from radixlm.client.connection import Address, Connection, Exchange
from radixlm.client.framing import EventDecoder, bad_response

DRAIN_SECONDS = 1.0  # wait for the last bytes after the last event before the connection is given up

Json = dict[str, Any]


class Client:
    """A client of one server.

    Every error is a `RadixError`: `Unavailable` if nobody answers, the connection breaks or the answer is not HTTP;
    `TimedOut` if the server is silent for too long; for an error status the class of that status with the server's own
    message.

    A request whose kept connection turns out to be closed before any byte of an answer is sent once more on a new one.

    Args:
        url: `http(s)://host[:port][/prefix]`; a trailing `/v1` is understood; without a scheme, http.
        api_key: sent as a bearer token.
        timeout: seconds of silence after which a request is given up. A stream may last longer.
        connect_timeout: seconds to establish a connection.
        headers: further ones for every request.
        tls: context for https; the system's certificates if none is given.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        connect_timeout: float = 10.0,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._address = Address(url)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._tls = (tls or ssl.create_default_context()) if self._address.tls else None
        self._idle: list[Connection] = []
        self._model: str | None = None
        fields = [
            f"Host: {self._address.authority}",
            "Accept-Encoding: identity",
            "User-Agent: radixlm",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self._fields = "\r\n".join(fields)
        if not self._fields.isascii() or any(set("\r\n") & set(field) for field in fields):
            raise BadRequest("the API key, the URL and headers must be plain ASCII of one line", param="api_key")

    @property
    def url(self) -> str:
        return self._address.url

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        await asyncio.gather(*(c.writer.wait_closed() for c in idle), return_exceptions=True)

    # ---- plain requests

    async def get(self, path: str) -> Any:
        """GET a route; the decoded JSON of its answer."""
        return await self._whole("GET", path, None)

    async def post(self, path: str, body: Any = None) -> Any:
        """POST JSON to a route; the decoded JSON of its answer (text if it is not JSON, None if it is empty)."""
        return await self._whole("POST", path, {} if body is None else body)

    async def health(self) -> bool:
        """Whether the server is up and takes requests. Never raises for a server that is not."""
        try:
            await self.get("/health")
        except RadixError:
            return False
        return True

    async def model(self) -> str:
        """The name of the first model served, asked once."""
        if self._model is None:
            listed = await self.get("/v1/models")
            try:
                self._model = str(listed["data"][0]["id"])
            except (TypeError, KeyError, IndexError):
                raise bad_response("/v1/models lists no model") from None
        return self._model

    # ---- OpenAI's two generating routes

    async def completions(
        self, prompt: str | list[int] | list[str], *, model: str | None = None, **fields: Any
    ) -> Json:
        """One whole answer of `/v1/completions`. `fields` are the body's other fields."""
        body = {"model": model or await self.model(), "prompt": prompt, **fields}
        return _object(await self.post("/v1/completions", body))

    async def chat(self, messages: list[Json], *, model: str | None = None, **fields: Any) -> Json:
        """One whole answer of `/v1/chat/completions`."""
        body = {"model": model or await self.model(), "messages": messages, **fields}
        return _object(await self.post("/v1/chat/completions", body))

    async def stream_completions(
        self, prompt: str | list[int] | list[str], *, model: str | None = None, **fields: Any
    ) -> AsyncGenerator[Json, None]:
        """The chunks of a streamed `/v1/completions`, as they come; the last one carries `usage`."""
        body = {"model": model or await self.model(), "prompt": prompt, **_streamed(fields)}
        async for event in self.events("/v1/completions", body):
            yield _object(msgspec.json.decode(event))

    async def stream_chat(
        self, messages: list[Json], *, model: str | None = None, **fields: Any
    ) -> AsyncGenerator[Json, None]:
        """The chunks of a streamed `/v1/chat/completions`, as they come; the last one carries `usage`."""
        body = {"model": model or await self.model(), "messages": messages, **_streamed(fields)}
        async for event in self.events("/v1/chat/completions", body):
            yield _object(msgspec.json.decode(event))

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """POST JSON and yield the data of each server-sent event, undecoded, until `[DONE]` or the end of the answer.

        Leaving the loop early closes the connection, which tells the server to stop; use `contextlib.aclosing` where
        that must not wait for the garbage collector.

        Raises:
            RadixError: as for every request; also when an event carries an error, or the stream breaks off.
        """
        exchange = await self._open("POST", path, body, "text/event-stream")
        try:
            await self._check(exchange, path)
            kind = exchange.response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise bad_response(f"{path} sent {kind or 'no content type'} where an event stream was asked for")
            decoder = EventDecoder()
            async for piece in exchange.pieces():
                for event in decoder.feed(piece):
                    if event == b"[DONE]":
                        await self._drain(exchange)
                        return
                    if b'"error"' in event[:24]:
                        _raise_error_event(event)
                    yield event
        finally:
            self._release(exchange)

    # ---- machinery

    async def _whole(self, method: str, path: str, body: Any) -> Any:
        exchange = await self._open(method, path, body, "application/json")
        try:
            await self._check(exchange, path)
            content = await exchange.body()
        finally:
            self._release(exchange)
        if not content:
            return None
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            return content.decode(errors="replace")

    async def _open(self, method: str, path: str, body: Any, accept: str) -> Exchange:
        request = self._request(method, path, body, accept)
        while True:
            connection = await self._connection()
            exchange = Exchange(connection, f"{method} {self.url}{path}", self._timeout)
            try:
                await exchange.start(request)
            except BaseException as error:
                connection.close()
                lost = isinstance(error, Unavailable) and error.code == "connection_lost"
                if lost and not connection.fresh and not exchange.answered:
                    continue  # it was closed while it lay idle; the next one is newer, at last a fresh one
                raise
            return exchange

    def _request(self, method: str, path: str, body: Any, accept: str) -> bytes:
        head = f"{method} {self._address.prefix}{path} HTTP/1.1\r\n{self._fields}\r\nAccept: {accept}\r\n"
        if body is None:
            return f"{head}\r\n".encode("ascii")
        content = msgspec.json.encode(body)
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        return head.encode("ascii") + content

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.fresh = False
                return connection
            connection.close()
        address = self._address
        try:
            async with asyncio.timeout(self._connect_timeout):
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=self._tls)
        except TimeoutError:
            raise TimedOut(f"no connection to {self.url} within {self._connect_timeout:g} s") from None
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise Unavailable(f"cannot reach {self.url} ({reason}); is the server running?", code="no_server") from None
        return Connection(reader, writer)

    async def _check(self, exchange: Exchange, path: str) -> None:
        """Raise the error that an answer with an error status stands for."""
        status = exchange.response.status
        if 200 <= status < 300:
            return
        message, code = _error_of(await exchange.body())
        raise by_status(status, f"{self.url}{path} answered {status}: {message}", code)

    async def _drain(self, exchange: Exchange) -> None:
        """Read the end of the framing behind the last event, so that the connection can be used again."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await exchange.body()
        except (TimeoutError, RadixError):
            pass  # every event is here; the connection is closed instead

    def _release(self, exchange: Exchange) -> None:
        connection = exchange.connection
        if exchange.response.reusable:
            connection.since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()


def _streamed(fields: Json) -> Json:
    return {"stream_options": {"include_usage": True}, **fields, "stream": True}


def _object(value: Any) -> Json:
    if not isinstance(value, dict):
        raise bad_response(f"a JSON object was expected, not {str(value)[:80]!r}")
    return value


def _error_of(body: bytes) -> tuple[str, str | None]:
    """(message, code) of an error body, in whichever of the usual shapes it comes."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:500] or "no reason given", None
    error = content.get("error", content) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        return str(error)[:500], None
    message = error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
    code = error.get("code")
    return str(message)[:500], code if isinstance(code, str) else None


def _raise_error_event(event: bytes) -> None:
    """Raise the error that an event of a started stream carries, if it carries one."""
    try:
        content = msgspec.json.decode(event)
    except msgspec.DecodeError:
        raise bad_response(f"an event is not JSON: {event[:80]!r}") from None
    if not isinstance(content, dict) or not (content.get("error") or content.get("object") == "error"):
        return
    message, code = _error_of(event)
    error = content.get("error")
    status = error.get("status", error.get("code", 500)) if isinstance(error, dict) else 500
    raise by_status(status if isinstance(status, int) else 500, f"the stream ended with an error: {message}", code)
