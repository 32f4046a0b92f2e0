"""This module owns the bytes of a message: a version byte, then msgpack of a tagged struct from a closed set."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from radixlm.wire.messages import VERSION

M = TypeVar("M")

#: Larger messages are refused before they are parsed. A 10^6-token prompt is about 5 MB.
MAX_MESSAGE_BYTES = 64 << 20

_HEADER = bytes((VERSION,))
_encoder = msgspec.msgpack.Encoder()


class Malformed(Exception):
    """Bytes that are not a message of the expected set. The reader drops them and logs; it never crashes."""


def encode(message: Any) -> bytes:
    return _HEADER + _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes one union of messages (`ToEngine`, `ToDetokenizer` or `ToApi`)."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes) -> M:
        """Raises `Malformed` for a wrong version, size or content."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise Malformed(f"message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        if data[:1] != _HEADER:
            raise Malformed(f"message of version {data[:1].hex() or 'none'}; this is version {VERSION}")
        try:
            message: M = self._decoder.decode(memoryview(data)[1:])
        except msgspec.MsgspecError as error:
            raise Malformed(str(error)) from None
        return message
