"""This module owns the bytes of an answer: HTTP/1.1 response framing and server-sent events, decoded without any I/O.

Both decoders take bytes in pieces of any size and answer with what has become known; where the pieces are cut never
matters. The rules are those of RFC 9112 (framing) and of the WHATWG HTML standard, section "Server-sent events".
"""

from __future__ import annotations

from collections.abc import Callable

from radixlm.base.errors import Unavailable

MAX_HEAD = 64 << 10  # bytes of status line and headers
MAX_LINE = 4 << 10  # bytes of a chunk-size line or trailer line
MAX_EVENT = 64 << 20  # bytes of one event


def bad_response(what: str) -> Unavailable:
    """The peer does not speak HTTP, or not all the way through."""
    return Unavailable(f"the server's answer is not valid: {what}", code="bad_response")


class ResponseDecoder:
    """One response. `status` and `headers` (names in lower case) are set once `started`.

    Attributes:
        complete: the whole response is here.
        reusable: after completion: the connection can carry another request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.started = False
        self.complete = False
        self._keep_alive = True
        self._buffer = bytearray()
        self._left = 0
        self._body: list[bytes] = []
        self._step: Callable[[], bool] = self._head

    @property
    def reusable(self) -> bool:
        return self.complete and self._keep_alive and not self._buffer

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the socket; return the body bytes they complete (often none).

        Raises:
            Unavailable: the bytes are not an HTTP/1.1 response.
        """
        self._buffer += data
        while not self.complete and self._step():
            pass
        if not self._body:
            return b""
        body = b"".join(self._body)
        self._body.clear()
        return body

    def end(self) -> bool:
        """The peer closed the connection; say whether the response is complete with that."""
        if self._step == self._until_close:
            self.complete = True
        return self.complete

    # Each step consumes from the buffer and returns whether the next one may run.

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise bad_response(f"more than {MAX_HEAD} bytes of headers")
            return False
        status_line, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise bad_response(f"it starts with {status_line[:40]!r}")
        self.status = int(rest[:3])
        if 100 <= self.status < 200:  # interim: the real one follows
            return True
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise bad_response(f"header line {line[:40]!r}")
            self.headers[name.strip().lower()] = value.strip()
        self.started = True
        wants = self.headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close")
        self._keep_alive = "close" not in wants.lower()
        self._choose_body()
        return True

    def _choose_body(self) -> None:
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            self.complete = True
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._step = self._chunk_size
        elif length is None:
            self._keep_alive = False
            self._step = self._until_close
        elif not length.isdecimal():
            raise bad_response(f"content-length {length[:40]!r}")
        else:
            self._left = int(length)
            self.complete = self._left == 0
            self._step = self._fixed

    def _take(self) -> bool:
        """Move what is here of the `_left` wanted bytes to the body; say whether that was all of them."""
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        if piece:
            self._body.append(piece)
        return self._left == 0

    def _fixed(self) -> bool:
        self.complete = self._take()
        return False

    def _until_close(self) -> bool:
        self._left = len(self._buffer)
        self._take()
        return False

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_LINE:
                raise bad_response(f"a chunk header of more than {MAX_LINE} bytes")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _chunk_size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        size = line.split(b";", 1)[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError:
            raise bad_response(f"chunk size {size[:40]!r}") from None
        if self._left < 0:
            raise bad_response(f"chunk size {size[:40]!r}")
        self._step = self._chunk_data if self._left else self._trailer
        return True

    def _chunk_data(self) -> bool:
        if not self._take():
            return False
        self._step = self._chunk_end
        return True

    def _chunk_end(self) -> bool:
        line = self._line()
        if line is None:
            return False
        if line:
            raise bad_response("a chunk is longer than its size says")
        self._step = self._chunk_size
        return True

    def _trailer(self) -> bool:
        line = self._line()
        if line is None:
            return False
        self.complete = not line
        return True


class EventDecoder:
    """A stream of server-sent events. Only `data` is kept: none of the protocols spoken here needs names or ids."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take body bytes; return the data of each event they complete.

        Raises:
            Unavailable: one event is larger than `MAX_EVENT`.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT:
            raise bad_response(f"an event of more than {MAX_EVENT >> 20} MiB")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
