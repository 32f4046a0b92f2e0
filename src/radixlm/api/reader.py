"""This module owns how messages of the ring reach the event loop: from a socket, or from a thread of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from radixlm.wire.link import ZmqInbox
from radixlm.wire.messages import ToApi

Receive = Callable[[Iterable[ToApi]], None]


class SocketReader:
    """Reads the api process's inbox when its file descriptor has news; no thread, no polling.

    ZeroMQ signals an edge, not a level: the inbox is read until it is empty each time, and once at the start.
    """

    def __init__(self, inbox: ZmqInbox[ToApi], receive: Receive) -> None:
        self._inbox = inbox
        self._receive = receive
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.socket.fileno(), self._read)
        self._read()

    def stop(self) -> None:
        """Stop reading; the inbox stays open."""
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.socket.fileno())
            self._loop = None

    def _read(self) -> None:
        messages = self._inbox.receive(0)
        if messages:
            self._receive(messages)


class ThreadOutbox:
    """The api's inbox where the ring is folded into one process: any thread sends, the event loop receives."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Receive) -> None:
        self._loop = loop
        self._receive = receive

    def send(self, message: ToApi) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, (message,))

    def close(self) -> None:
        pass
