"""This module owns one socket to a server and the request that travels on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from radixlm.base.errors import BadRequest, TimedOut, Unavailable
from radixlm.client.framing import ResponseDecoder

READ_SIZE = 64 << 10  # bytes
IDLE_SECONDS = 4.0  # a kept connection older than this is not trusted: common servers close them after 5 s

T = TypeVar("T")


class Address:
    """Where a server is. `prefix` is the path in front of every route."""

    def __init__(self, url: str) -> None:
        complaint = BadRequest(f"{url!r} is not a server's URL; give one such as http://127.0.0.1:30000", param="url")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise complaint from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise complaint
        self.tls = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.tls else 80)
        # OpenAI clients are configured with .../v1; our routes carry it themselves
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.authority = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{self.authority}{self.prefix}"


class Connection:
    """A socket and when it was last used."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.fresh = True
        self.since = 0.0

    @property
    def usable(self) -> bool:
        return not self.reader.at_eof() and time.monotonic() - self.since < IDLE_SECONDS

    def close(self) -> None:
        self.writer.close()


class Exchange:
    """One request and its response, on a connection that belongs to it meanwhile. `where` names it in errors.

    Attributes:
        answered: a byte of an answer has come.
    """

    def __init__(self, connection: Connection, where: str, timeout: float) -> None:
        self.connection = connection
        self.response = ResponseDecoder()
        self.answered = False
        self._where = where
        self._timeout = timeout
        self._early = b""  # body bytes that came with the headers

    async def start(self, request: bytes) -> None:
        """Send, and read up to the end of the headers."""
        self.connection.writer.write(request)
        await self._in_time(self.connection.writer.drain())
        while not self.response.started:
            self._early += await self._more()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        if self._early:
            early, self._early = self._early, b""
            yield early
        while not self.response.complete:
            yield await self._more()

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _more(self) -> bytes:
        data = await self._in_time(self.connection.reader.read(READ_SIZE))
        if data:
            self.answered = True
            return self.response.feed(data)
        if not self.response.end():
            raise Unavailable(
                f"{self._where}: the server closed the connection before its answer was complete",
                code="connection_lost",
            )
        return b""

    async def _in_time(self, wait: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await wait
        except TimeoutError:
            raise TimedOut(f"{self._where}: the server was silent for {self._timeout:g} s") from None
        except OSError as error:
            raise Unavailable(f"{self._where}: the connection broke: {error}", code="connection_lost") from None
