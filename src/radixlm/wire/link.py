"""This module owns the links: an `Inbox` that one process reads, `Outbox`es that feed it. ZeroMQ between processes, a
queue within one.

A link is one-way and keeps the order of each sender. Sending never blocks; a full or dead peer shows as a dead process,
which the supervisor handles.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import zmq

from radixlm.wire.codec import Decoder, Malformed, encode

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)

log = logging.getLogger("radixlm.wire")


class Inbox(Protocol[M]):
    def receive(self, timeout: float | None) -> list[M]:
        """All messages that are there. Waits for the first one up to `timeout` seconds (None: for ever; 0: not at
        all).
        """
        ...

    def close(self) -> None: ...


class Outbox(Protocol[M_contra]):
    def send(self, message: M_contra) -> None: ...

    def close(self) -> None: ...


class LocalLink(Generic[M]):
    """Both ends within one process; messages are the same objects, not bytes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[M] = queue.SimpleQueue()

    def send(self, message: M) -> None:
        self._queue.put(message)

    def receive(self, timeout: float | None) -> list[M]:
        messages: list[M] = []
        try:
            if timeout == 0:
                messages.append(self._queue.get_nowait())
            else:
                messages.append(self._queue.get(timeout=timeout))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages

    def close(self) -> None:
        pass


class Callback(Generic[M]):
    """An outbox that calls a function in the sender's thread: how a folded ring hands text to its caller."""

    def __init__(self, receive: Callable[[M], None]) -> None:
        self._receive = receive

    def send(self, message: M) -> None:
        self._receive(message)

    def close(self) -> None:
        pass


class ZmqInbox(Generic[M]):
    """Binds a PULL socket. Malformed messages are dropped with a log line."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, union: Any) -> None:
        self.address = address
        self._decoder: Decoder[M] = Decoder(union)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._socket

    def receive(self, timeout: float | None) -> list[M]:
        messages: list[M] = []
        if timeout != 0 and not self._socket.poll(None if timeout is None else max(1, int(timeout * 1000))):
            return messages
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(data))
            except Malformed as error:
                log.error("dropped a malformed message on %s: %s", self.address, error)

    def close(self) -> None:
        self._socket.close(0)


class ZmqOutbox(Generic[M_contra]):
    """Connects a PUSH socket to an inbox, which may bind later."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        # On close, wait this long (ms) for bytes that are still on their way: the last message tells why a process
        # ended.
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, message: M_contra) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close()


class FrameInbox:
    """Binds a PULL socket for frames of bytes that mean something only to their reader. Nothing is dropped."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    def receive(self) -> bytes:
        """The next frame. Waits for it."""
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close(0)


class FrameOutbox:
    """Connects a PUSH socket to a `FrameInbox`, which may bind later. Sending never blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def close(self) -> None:
        self._socket.close()
